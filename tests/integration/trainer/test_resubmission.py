"""What a resumed run submits: the same prompts under the same uids, and unfinished ones with the step they had."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
from seamless_verl.trainer import prompt_feed, prompt_names
from seamless_verl.trainer.checkpoints import PROMPTS, load_state, save_state
from seamless_verl.trainer.prompt_feed import PromptFeed, RunAhead
from seamless_verl.trainer.prompt_names import PromptNames, data_rows
from seamless_verl.trainer.trainer import SeamlessTrainer

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
    save_state(tmp_path, {PROMPTS: names})
    later = names.take(data_rows(prompts("a", "b")))
    resumed = PromptNames()
    load_state(tmp_path, {PROMPTS: resumed})
    assert resumed.take(data_rows(prompts("a", "b", uid="other"))) == later
    assert len({*first, *later}) == 4, "the same prompt is drawn again in the next epoch"
    assert not any("_" in uid for uid in later), "TransferQueue's keys are split there"
    others = PromptNames(), PromptNames()
    load_state(tmp_path, {PROMPTS: others[1]})
    assert {*others[0].take(data_rows(prompts("a", "b")))}.isdisjoint(first), "another run"
    assert {*others[1].take(data_rows(prompts("c", "a")))}.isdisjoint(later), "another data set, or order"


def test_a_checkpoint_of_another_mode_has_no_names(tmp_path: Path) -> None:
    names = PromptNames()
    own = names.run
    load_state(tmp_path, {PROMPTS: names})
    assert (names.run, names.drawn) == (own, 0)


@pytest.mark.parametrize("gateway", [True, False])
def test_prompts_that_are_drawn_are_named_with_a_gateway(monkeypatch: pytest.MonkeyPatch, gateway: bool) -> None:
    monkeypatch.setattr(trainer_base.PPOTrainer, "_fetch_one_gen_batch", lambda _: prompts("a", "b"))
    trainer = trainer_of(gateway=gateway)
    expected = PromptNames()
    expected.run = trainer.names.run
    given = list(trainer._fetch_one_gen_batch()["uid"])
    assert given == (expected.take(data_rows(prompts("a", "b"))) if gateway else ["random-0", "random-1"])


def trainer_of(*, gateway: bool = True) -> Any:
    """A trainer in step 5."""
    trainer = SeamlessTrainer.__new__(SeamlessTrainer)
    trainer.seamless = SimpleNamespace(gateway=SimpleNamespace(enabled=gateway))  # type: ignore[assignment]
    trainer.names, trainer.global_steps, trainer.sampled = PromptNames(), 5, None
    return trainer


def feed_of(
    *, max_staleness: int = 1, outstanding: Callable[[], int] = lambda: 0, tail: int = 0, updates: int = 1, **calls: Any
) -> PromptFeed:
    """The feed of that trainer's prompts, of which a step has 8; `calls` are those of the run."""
    made = {"step": lambda: 5, "steps_left": lambda: 4, "data_size": lambda: 100} | calls
    buffer: Any = SimpleNamespace(bound=StalenessBound(max_staleness, batch=8 // updates), outstanding=outstanding)
    run: Any = SimpleNamespace(**made)
    ahead = RunAhead(max_staleness, None)
    return PromptFeed(run, buffer, ahead=ahead, tail=TailBatching(tail), updates=updates, samples=4)


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
    for module in (prompt_feed, prompt_names):
        monkeypatch.setattr(module, "tq", queue)
    trainer, submitted = trainer_of(), dict[str, int]()

    def generate_sequences(batch: Any) -> None:
        submitted.update(dict.fromkeys(batch["uid"], batch["global_steps"]))

    trainer.feed = feed_of(manager=lambda: SimpleNamespace(generate_sequences=generate_sequences))
    assert trainer._reissue_inflight_prompts() == 3
    assert submitted == {"old": 5, "kept": 4, "pending": 5}
    found = {uid: (tag["status"], tag["global_steps"]) for uid, tag in queue.tags.items() if tag.get("is_prompt")}
    assert found == {"old": ("pending", 5), "kept": ("pending", 4), "pending": ("pending", 5), "done": ("finished", 4)}
    assert {key for key in queue.tags if "_" in key} == {"done_0_0"}, "one began again, one was trained"


def test_a_deferred_prompt_begins_again_under_the_same_uid_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what its sessions generated after the checkpoint is not found. Each deferral gives a uid of its own."""

    def begun_again(*uids: str) -> list[str]:
        queue = Queue({uid: {"is_prompt": True, "status": "pending", "global_steps": 3} for uid in uids})
        monkeypatch.setattr(prompt_names, "tq", queue)
        batch = prompt_names.take_out(uids, 4)
        assert not queue.tags and tu.get(batch, "global_steps") == 4
        return list(batch["uid"])

    drawn = PromptNames().take(data_rows(prompts("a", "b")))
    once = begun_again(*drawn)
    assert begun_again(*drawn) == once and begun_again(*reversed(drawn)) == once[::-1]
    assert len({*drawn, *once, *begun_again(*once)}) == 6, "a uid is given once, since its end is on record"
    assert not any("_" in uid for uid in once), "TransferQueue's keys are split there"


@pytest.mark.parametrize(("level", "submitted"), [(1, 8), (2, 16), (3, 16)])
def test_a_step_submits_as_many_steps_worth_as_it_is_to_run_ahead(level: int, submitted: int) -> None:
    """Also with one update a step, before which nothing else submits; the bound is 2 versions."""
    outstanding = [8]

    def begin_step() -> dict[str, Any]:
        outstanding.append(8)
        return {}

    feed = feed_of(
        max_staleness=2,
        outstanding=lambda: sum(outstanding),
        begin_step=begin_step,
        add_prompts=outstanding.append,
    )
    feed.ahead.chosen = SimpleNamespace(level=level)  # type: ignore[assignment]
    feed.prepare_step()
    feed.refill_for_update()
    assert sum(outstanding) - 8 == submitted


@pytest.mark.parametrize(
    ("changed", "early"),
    [
        pytest.param({}, True, id="on-policy"),
        pytest.param({"max_staleness": 4}, True, id="engines may have ended what was drawn ahead"),
        pytest.param({"test_freq": 5}, False, id="a validation comes between"),
        pytest.param({"test_freq": 5, "validation": object()}, True, id="a validation begins beside training"),
        pytest.param({"test_freq": 4}, True, id="one came before"),
        pytest.param({"total_training_steps": 5}, False, id="the last step"),
        pytest.param({"steps_per_epoch": 5, "total_epochs": 1}, False, id="the last epoch ends"),
        pytest.param({"steps_per_epoch": 5, "total_epochs": 2}, True, id="another epoch begins"),
        pytest.param({"profiled": [6]}, False, id="the next step may be profiled"),
        pytest.param({"manager": object()}, False, id="a manager that may generate before it returns"),
    ],
)
def test_a_step_s_prompts_are_submitted_before_the_bookkeeping_of_the_last_one(
    changed: dict[str, Any], early: bool
) -> None:
    given = {"max_staleness": 0, "test_freq": -1, "total_training_steps": 9, "steps_per_epoch": 100, "total_epochs": 1}
    given |= {"profiled": None, "manager": OUR_MANAGER, "validation": None} | changed
    trainer, submitted = trainer_of(), list[int]()
    trainer.config = OmegaConf.create(
        {
            "skip": {"rollout_tq": {"enable": False}},
            "trainer": {"test_freq": given["test_freq"], "total_epochs": given["total_epochs"]},
            "global_profiler": {"steps": given["profiled"]},
        }
    )
    trainer.total_training_steps, trainer.steps_per_epoch = given["total_training_steps"], given["steps_per_epoch"]
    trainer.agent_loop_manager, trainer.validation = given["manager"], given["validation"]

    def begin_step() -> dict[str, Any]:
        submitted.append(trainer.global_steps)
        return {"its": "metrics"}

    trainer.feed = feed_of(max_staleness=given["max_staleness"], begin_step=begin_step, add_prompts=lambda _: None)
    trainer._begin_next_step()
    assert (submitted, trainer.global_steps) == ([6] * early, 5)
    trainer.global_steps = 6
    assert trainer.prepare_step() == {"its": "metrics"} and submitted == [6]
    trainer.prepare_step()
    assert submitted == [6, 6]


def test_what_ends_the_next_step_s_draw_is_raised_by_that_step() -> None:
    def refuse() -> dict[str, Any]:
        raise ValueError("every prompt is left out")

    feed = feed_of(max_staleness=0, begin_step=refuse)
    feed.prepare_early()
    with pytest.raises(ValueError, match="every prompt is left out"):
        feed.prepare_step()


@pytest.mark.parametrize("error", [None, ConnectionError("the queue is gone")])
def test_what_a_step_leaves_over_ends_in_the_background_and_counts_as_deferred_once(error: Exception | None) -> None:
    ends, done = threading.Event(), list[Any]()

    def end(uids: Any) -> None:
        assert ends.wait(30)
        done.append(("ended", uids))
        if error is not None:
            raise error

    feed = feed_of(max_staleness=0, tail=2, updates=2, manager=lambda: SimpleNamespace(defer=end))
    buffer: Any = feed.buffer
    buffer.outstanding_prompts = lambda: ["a", "b"]
    buffer.defer = lambda uids, step: done.append(("put aside", uids, step))
    feed.mini_batch_taken()
    feed.defer_rest()
    assert feed.deferring is None, "the step has another mini-batch"
    feed.mini_batch_taken()
    feed.defer_rest()
    assert not done and feed.tail.deferred == []
    ends.set()
    if error is not None:
        with pytest.raises(ConnectionError):
            feed.await_deferred()
        assert feed.tail.deferred == []
        return
    feed.await_deferred()
    assert done == [("ended", ["a", "b"]), ("put aside", ["a", "b"], 5)] and feed.tail.deferred == ["a", "b"]
    feed.await_deferred()
    assert feed.tail.deferred == ["a", "b"]
