"""What a resumed run submits: the same prompts under the same uids, and unfinished ones with the step they had."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager
from seamless_verl.resources.ahead import StalenessBound
from seamless_verl.resources.tail_batching import TailBatching
from seamless_verl.trainer import deferred_prompts, prompt_submission, resubmission
from seamless_verl.trainer.prompt_names import PromptNames, data_rows
from seamless_verl.trainer.prompt_submission import PromptSubmittingTrainer

pytestmark = pytest.mark.integration


def prompts(*texts: str, uid: str = "random") -> Any:
    """A batch as verl's data loader gives it."""
    raw = np.array([[{"role": "user", "content": text}] for text in texts] + [None], dtype=object)[:-1]
    uids = np.array([f"{uid}-{i}" for i in range(len(texts))], dtype=object)
    index = np.array(range(len(texts)), dtype=object)
    columns = {"raw_prompt": raw, "index": index, "uid": uids, "dummy_tensor": torch.zeros(len(texts), 1)}
    return tu.get_tensordict(columns)


def test_a_resumed_run_gives_the_prompts_the_same_names(tmp_path: Path) -> None:
    names = PromptNames()
    first = names.take(data_rows(prompts("a", "b")))
    names.save(tmp_path)
    later = names.take(data_rows(prompts("a", "b")))
    resumed = PromptNames()
    resumed.load(tmp_path)
    assert resumed.take(data_rows(prompts("a", "b", uid="other"))) == later
    assert len({*first, *later}) == 4, "the same prompt is drawn again in the next epoch"
    assert not any("_" in uid for uid in later), "TransferQueue's keys are split there"
    others = PromptNames(), PromptNames()
    others[1].load(tmp_path)
    assert {*others[0].take(data_rows(prompts("a", "b")))}.isdisjoint(first), "another run"
    assert {*others[1].take(data_rows(prompts("c", "a")))}.isdisjoint(later), "another data set, or order"


def test_a_checkpoint_of_an_earlier_release_has_no_names(tmp_path: Path) -> None:
    names = PromptNames()
    own = names.run
    names.load(tmp_path)
    assert (names.run, names.drawn) == (own, 0)


@pytest.mark.parametrize("gateway", [True, False])
def test_prompts_that_are_drawn_are_named_with_a_gateway(monkeypatch: pytest.MonkeyPatch, gateway: bool) -> None:
    monkeypatch.setattr(trainer_base.PPOTrainer, "_fetch_one_gen_batch", lambda _: prompts("a", "b"))
    trainer = trainer_of(gateway=gateway)
    expected = PromptNames()
    expected.run = trainer.names.run
    given = list(trainer._fetch_one_gen_batch()["uid"])
    assert given == (expected.take(data_rows(prompts("a", "b"))) if gateway else ["random-0", "random-1"])


class Trainer(PromptSubmittingTrainer):
    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...


def trainer_of(*, gateway: bool = True, step: int = 5, max_staleness: int = 1) -> PromptSubmittingTrainer:
    trainer = Trainer.__new__(Trainer)
    trainer.seamless = SimpleNamespace(
        gateway=SimpleNamespace(enabled=gateway), staleness_bound=max_staleness, ahead=None
    )  # type: ignore[assignment]
    trainer.names, trainer.global_steps = PromptNames(), step
    trainer.bound = StalenessBound(max_staleness, batch=8)
    return trainer


OUR_MANAGER = SeamlessAgentLoopManager.__new__(SeamlessAgentLoopManager)


class Queue:
    """TransferQueue's tags and rows of one partition, in memory."""

    def __init__(self, tags: dict[str, dict[str, Any]]) -> None:
        self.tags = tags

    def kv_list(self, partition_id: str) -> dict[str, Any]:
        return {partition_id: dict(self.tags)}

    def kv_batch_get(self, *, keys: list[str], partition_id: str) -> Any:
        batch = prompts(*keys)
        tu.assign_non_tensor_stack(batch, "uid", keys)
        return batch

    def kv_batch_put(self, *, keys: list[str], partition_id: str, tags: list[dict[str, Any]]) -> None:
        for key, tag in zip(keys, tags, strict=True):
            self.tags[key] = dict(tag)

    def kv_clear(self, *, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.tags[key]


def test_unfinished_prompts_keep_their_step_unless_it_would_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"old": ("running", 3), "kept": ("running", 4), "pending": ("pending", 5), "done": ("finished", 4)}
    tags = {uid: {"is_prompt": True, "status": status, "global_steps": step} for uid, (status, step) in steps.items()}
    rows = {f"{uid}_0_0": {"status": "success", "global_steps": 4} for uid in ("done", "kept", "trained")}
    queue = Queue(tags | rows)
    for module in (prompt_submission, resubmission):
        monkeypatch.setattr(module, "tq", queue)
    trainer, submitted = trainer_of(), dict[str, int]()

    def generate_sequences(batch: Any) -> None:
        submitted.update(dict.fromkeys(batch["uid"], batch["global_steps"]))

    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=generate_sequences)
    assert trainer._reissue_inflight_prompts() == 3
    assert submitted == {"old": 5, "kept": 4, "pending": 5}
    found = {uid: (tag["status"], tag["global_steps"]) for uid, tag in queue.tags.items() if tag.get("is_prompt")}
    assert found == {"old": ("pending", 5), "kept": ("pending", 4), "pending": ("pending", 5), "done": ("finished", 4)}
    assert {key for key in queue.tags if "_" in key} == {"done_0_0"}, "one began again, one was trained"


def test_a_deferred_prompt_begins_again_under_the_same_uid_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what its sessions generated after the checkpoint is not found. Each deferral gives a uid of its own."""

    def begun_again(*uids: str) -> list[str]:
        queue = Queue({uid: {"is_prompt": True, "status": "pending", "global_steps": 3} for uid in uids})
        monkeypatch.setattr(deferred_prompts, "tq", queue)
        batch = deferred_prompts.take_out(uids, 4)
        assert not queue.tags and tu.get(batch, "global_steps") == 4
        return list(batch["uid"])

    drawn = PromptNames().take(data_rows(prompts("a", "b")))
    once = begun_again(*drawn)
    assert begun_again(*drawn) == once and begun_again(*reversed(drawn)) == once[::-1]
    assert len({*drawn, *once, *begun_again(*once)}) == 6, "a uid is given once, since its end is on record"
    assert not any("_" in uid for uid in once), "TransferQueue's keys are split there"


@pytest.mark.parametrize(("level", "submitted"), [(1, 8), (2, 16), (3, 16)])
def test_a_step_submits_as_many_steps_worth_as_it_is_to_run_ahead(
    monkeypatch: pytest.MonkeyPatch, level: int, submitted: int
) -> None:
    """Also with one update a step, before which nothing else submits; the bound is 2 versions."""
    trainer, outstanding = trainer_of(max_staleness=2), [8]

    def submit(_: Any, number: int = 8) -> dict[str, Any]:
        outstanding.append(number)
        return {}

    monkeypatch.setattr(trainer_base.PPOTrainer, "prepare_step", submit)
    monkeypatch.setattr(Trainer, "_add_prompts_to_generate", submit)
    trainer.config = OmegaConf.create({"data": {"train_batch_size": 8}, "skip": {"rollout_tq": {"enable": False}}})
    trainer.tail, trainer.ahead, trainer.step_batches = TailBatching(0), SimpleNamespace(level=level), 0  # type: ignore[assignment]
    trainer.total_training_steps, trainer.train_dataloader = 9, range(100)
    trainer.replay_buffer = SimpleNamespace(outstanding=lambda: sum(outstanding))  # type: ignore[assignment]
    trainer.prepare_step()
    trainer.refill_for_update()
    assert sum(outstanding) - 8 == submitted


@pytest.mark.parametrize(
    ("changed", "early"),
    [
        pytest.param({}, True, id="on-policy"),
        pytest.param({"max_staleness": 4}, True, id="engines may have ended what was drawn ahead"),
        pytest.param({"test_freq": 5}, False, id="a validation comes between"),
        pytest.param({"test_freq": 4}, True, id="one came before"),
        pytest.param({"total_training_steps": 5}, False, id="the last step"),
        pytest.param({"steps_per_epoch": 5, "total_epochs": 1}, False, id="the last epoch ends"),
        pytest.param({"steps_per_epoch": 5, "total_epochs": 2}, True, id="another epoch begins"),
        pytest.param({"profiled": [6]}, False, id="the next step may be profiled"),
        pytest.param({"manager": object()}, False, id="a manager that may generate before it returns"),
    ],
)
def test_a_step_s_prompts_are_submitted_before_the_bookkeeping_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], early: bool
) -> None:
    given = {"max_staleness": 0, "test_freq": -1, "total_training_steps": 9, "steps_per_epoch": 100, "total_epochs": 1}
    given |= {"profiled": None, "manager": OUR_MANAGER} | changed
    trainer, submitted = trainer_of(max_staleness=given["max_staleness"]), list[int]()
    trainer.config = OmegaConf.create(
        {
            "data": {"train_batch_size": 8},
            "skip": {"rollout_tq": {"enable": False}},
            "trainer": {"test_freq": given["test_freq"], "total_epochs": given["total_epochs"]},
            "global_profiler": {"steps": given["profiled"]},
        }
    )
    trainer.total_training_steps, trainer.steps_per_epoch = given["total_training_steps"], given["steps_per_epoch"]
    trainer.tail, trainer.ahead, trainer.step_batches = TailBatching(0), None, 0
    trainer.replay_buffer = SimpleNamespace(outstanding=lambda: 0)  # type: ignore[assignment]
    trainer.agent_loop_manager = given["manager"]

    def submit(trainer: Any) -> dict[str, Any]:
        submitted.append(trainer.global_steps)
        return {"its": "metrics"}

    monkeypatch.setattr(trainer_base.PPOTrainer, "prepare_step", submit)
    monkeypatch.setattr(Trainer, "refill", lambda trainer: None)
    trainer.global_steps = 5
    trainer.begin_next_step()
    assert (submitted, trainer.global_steps) == ([6] * early, 5)
    trainer.global_steps = 6
    assert trainer.prepare_step() == {"its": "metrics"} and submitted == [6]
    trainer.prepare_step()
    assert submitted == [6, 6]


def test_generation_begins_on_the_version_of_the_step_before() -> None:
    trainer, waits = trainer_of(), list[int]()
    trainer.commit = SimpleNamespace(when_committed=lambda version, begin: waits.append(version))  # type: ignore[assignment]
    trainer._when_it_may_begin(lambda: None)
    with trainer._as_next_step():
        trainer._when_it_may_begin(lambda: None)
    assert waits == [4, 5]


def test_what_ends_the_next_step_s_draw_is_raised_by_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> dict[str, Any]:
        raise ValueError("every prompt is left out")

    trainer = trainer_of(max_staleness=0)
    trainer.agent_loop_manager, trainer.step_batches = OUR_MANAGER, 0
    monkeypatch.setattr(trainer, "_goes_on_at_once", lambda: True)
    monkeypatch.setattr(PromptSubmittingTrainer, "prepare_step", lambda trainer: refuse())
    trainer.begin_next_step()
    assert trainer.global_steps == 5
    monkeypatch.undo()
    with pytest.raises(ValueError, match="every prompt is left out"):
        trainer.prepare_step()


@pytest.mark.parametrize("error", [None, ConnectionError("the queue is gone")])
def test_what_a_step_leaves_over_ends_in_the_background_and_counts_as_deferred_once(error: Exception | None) -> None:
    ends, done = threading.Event(), list[Any]()

    def end(uids: Any) -> None:
        assert ends.wait(30)
        done.append(("ended", uids))
        if error is not None:
            raise error

    trainer = trainer_of(max_staleness=0)
    trainer.tail, trainer.parameter_sync_step, trainer.step_batches = TailBatching(2), 2, 1
    trainer.agent_loop_manager = SimpleNamespace(defer=end)
    trainer.replay_buffer = SimpleNamespace(  # type: ignore[assignment]
        outstanding_prompts=lambda: ["a", "b"], defer=lambda uids, step: done.append(("put aside", uids, step))
    )
    trainer.defer_rest()
    assert trainer.deferring is None, "the step has another mini-batch"
    trainer.step_batches = 2
    trainer.defer_rest()
    assert not done and trainer.tail.deferred == []
    ends.set()
    if error is not None:
        with pytest.raises(ConnectionError):
            trainer.await_deferred()
        assert trainer.tail.deferred == []
        return
    trainer.await_deferred()
    assert done == [("ended", ["a", "b"]), ("put aside", ["a", "b"], 5)] and trainer.tail.deferred == ["a", "b"]
    trainer.await_deferred()
    assert trainer.tail.deferred == ["a", "b"]
