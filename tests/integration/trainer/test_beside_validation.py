"""A validation beside the next step: which are, what waits for one, and what it leaves to the trainer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager
from seamless_verl.runtime.step_metrics import VALIDATION_S, VALIDATION_WAITED_S
from seamless_verl.trainer import reporting_trainer
from seamless_verl.trainer.step_report import StepReport
from seamless_verl.trainer.trainer import SeamlessTrainer

pytestmark = pytest.mark.integration
BATCH: Any = object()
LONG_S = 20.0


class Run:
    """A trainer at the end of step 4 of a run that validates, and what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = made = SeamlessTrainer.__new__(SeamlessTrainer)
        self.may_end, self.did, self.errors = threading.Event(), list[Any](), list[BaseException]()
        trainer = {"logger": ["console"], "save_freq": -1, "test_freq": 2, "total_epochs": 9}
        others = {"global_profiler": {"steps": None}, "skip": {"rollout_tq": {"enable": False}}}
        made.config = OmegaConf.create({"trainer": trainer, **others})
        made.report, made.global_steps, made.trains, made.run_ended = StepReport(), 4, True, Future()
        made.total_training_steps, made.steps_per_epoch = 8, 100
        made.agent_loop_manager = SeamlessAgentLoopManager.__new__(SeamlessAgentLoopManager)
        made.enter_stage = self.did.append
        loaded = lambda: self.did.append("loaded")  # noqa: E731
        made.commit = SimpleNamespace(wait=loaded, loading=lambda: loaded)  # type: ignore[assignment]
        made.lending = SimpleNamespace(  # type: ignore[assignment]
            keeps_calls=True, generates_elsewhere=True, ids=["r0"], offer=self.offer
        )
        made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[object()])
        made.curve = SimpleNamespace(add=lambda step, metrics: self.did.append(("curve", step)))  # type: ignore[assignment]
        made.replay_buffer = SimpleNamespace(  # type: ignore[assignment]
            for_validation=lambda wait: SimpleNamespace(wait=wait), hurry_validation=lambda: self.did.append("hurried")
        )
        self.offers_until_it_ends = 0
        monkeypatch.setattr(made, "_devices_are_all_cores", lambda: False)
        monkeypatch.setattr(made, "looks_often", lambda: True)
        monkeypatch.setattr(made, "connect_replicas", lambda: self.did.append("connected"))
        monkeypatch.setattr(PPOTrainer, "_validate", lambda made: self.validate(made))
        monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_, **__: self.did.append("computed"))
        monkeypatch.setattr(reporting_trainer, "RETRY_S", 0.01)

    def offer(self, due_in_s: float | None) -> None:
        """The validation ends once devices were offered so often."""
        self.did.append("offered")
        if self.did.count("offered") == self.offers_until_it_ends:
            self.may_end.set()

    def validate(self, trainer: Any) -> dict[str, float]:
        """verl's part, which sees the trainer as it was."""
        assert self.may_end.wait(LONG_S)
        for error in self.errors:
            raise error
        own_buffer = trainer.replay_buffer is not self.trainer.replay_buffer
        self.did.append(("validated", trainer.global_steps, own_buffer))
        return {"reward": 0.5}

    def report(self, metrics: dict[str, float]) -> None:
        self.trainer._compute_metrics(BATCH, metrics, {}, global_steps=4, epoch=0)
        self.trainer.report.begin(lambda: self.did.append("logged"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_the_trainer_goes_on_and_the_step_is_logged_with_the_validation_s_metrics(run: Run) -> None:
    metrics: dict[str, float] = {"its": 1.0}
    assert run.trainer._validate() == {}
    run.report(metrics)
    run.trainer.global_steps = 5
    assert metrics == {"its": 1.0} and "logged" not in run.did
    run.may_end.set()
    run.trainer.report.finish()
    assert metrics.pop(VALIDATION_S) > 0
    assert metrics == {"its": 1.0, "reward": 0.5}
    assert run.did[-1] == "logged" and run.did.index("computed") < run.did.index("logged")
    assert [one for one in run.did if one != "computed"] == ["loaded", ("validated", 4, True), ("curve", 4), "logged"]


def test_the_commit_waits_for_it_while_devices_generate(run: Run) -> None:
    run.trainer._validate()
    run.report({})
    run.trainer.global_steps = 5
    run.offers_until_it_ends = 3
    (waited,) = run.trainer.finish_validation_before_commit().items()
    assert waited[0] == VALIDATION_WAITED_S and 0 < waited[1] < LONG_S
    waiting = run.did.index("validating, step 4")
    looks = [one for one in run.did[waiting:] if one in ("connected", "hurried", "offered")]
    assert looks[:9] == ["connected", "hurried", "offered"] * 3, "looked again as long as it ran"
    assert run.trainer.replay_buffer.late == ()
    assert run.trainer.finish_validation_before_commit() == {}
    run.trainer.report.finish()


def test_a_checkpoint_waits_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of its step has to be written first, and that waits for the validation, whose calls may be frozen."""
    run.trainer._validate()
    run.report({})
    saved = threading.Event()

    def save(*_: Any) -> None:
        saved.set()
        raise KeyboardInterrupt  # the rest of a checkpoint is not of this test

    monkeypatch.setattr(run.trainer.commit, "wait", save)
    run.offers_until_it_ends = 1  # without an offer its calls stay frozen
    with pytest.raises(KeyboardInterrupt):
        run.trainer._save_checkpoint()
    assert saved.is_set() and ("validated", 4, True) in run.did and "logged" in run.did


def test_what_ends_it_ends_the_run(run: Run) -> None:
    run.errors.append(RuntimeError("no replica serves"))
    run.may_end.set()
    run.trainer._validate()
    run.report({})
    with pytest.raises(RuntimeError, match="no replica serves"):
        run.trainer.finish_validation()
    limit = time.monotonic() + LONG_S
    with pytest.raises(RuntimeError, match="no replica serves"):  # as the watchdog sees it
        while time.monotonic() < limit:
            run.trainer.report.raise_failed()
    assert "logged" in run.did, "the step was trained"


def test_where_training_fails_the_last_step_is_logged_without_it(run: Run) -> None:
    metrics = {"its": 1.0}
    run.trainer._validate()
    run.report(metrics)
    run.trainer.run_ended.set_result(None)
    run.trainer.report.finish_within(LONG_S)
    assert run.did[-1] == "logged" and metrics == {"its": 1.0}
    run.may_end.set()


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        pytest.param("config.trainer.validation_data_dir", "/dumps", id="samples are dumped"),
        pytest.param("config.trainer.save_freq", 2, id="a checkpoint comes before"),
        pytest.param("config.trainer.logger", "mlflow", id="a logger is bound to its thread"),
        pytest.param("lending.generates_elsewhere", False, id="engines stand still while training computes"),
        pytest.param("lending.keeps_calls", False, id="calls are cut when training has the devices"),
        pytest.param("reward_loop_manager.reward_loop_worker_handles", None, id="rewards need the devices"),
        pytest.param("trains", False, id="before training"),
        pytest.param("total_training_steps", 4, id="the last step"),
        pytest.param("agent_loop_manager", object(), id="a manager of the user's"),
        pytest.param("_devices_are_all_cores", lambda: True, id="all cores train"),
    ],
)
def test_else_it_is_verl_s(run: Run, changed: str, value: Any) -> None:
    *path, last = changed.split(".")
    target: Any = run.trainer
    for name in path:
        target = getattr(target, name)
    setattr(target, last, value)
    check_inline(run)


@pytest.mark.parametrize(("step", "every"), [(0, -1), (0, 2), (7, 5)])
def test_before_training_it_is_verl_s_whether_or_not_the_step_validates(run: Run, step: int, every: int) -> None:
    run.trainer.global_steps, run.trainer.trains = step, False
    run.trainer.config.trainer.test_freq = every
    check_inline(run)


def check_inline(run: Run) -> None:
    run.may_end.set()
    metrics = run.trainer._validate()
    assert metrics["reward"] == 0.5 and metrics[VALIDATION_S] >= 0
    assert ("validated", run.trainer.global_steps, False) in run.did and run.trainer.validation is None


def test_without_replicas_on_the_trainer_s_devices_no_call_is_cut(run: Run) -> None:
    run.trainer.lending.keeps_calls, run.trainer.lending.ids = False, []
    run.may_end.set()
    assert run.trainer._validate() == {}
    run.trainer.finish_validation()


def test_its_prompts_wait_for_no_commit_since_the_next_one_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may have submitted those of the step after the next by then, which begin with that commit."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    manager, given, waiting = SeamlessAgentLoopManager.__new__(SeamlessAgentLoopManager), list[Any](), list[Any]()
    monkeypatch.setattr(manager, "_give", given.append)
    manager.may_begin = waiting.append
    for validate in (True, False):
        batch = TensorDict({}, batch_size=1)
        tu.assign_non_tensor_data(batch, "validate", validate)
        manager.generate_sequences(batch)
    assert (len(given), len(waiting)) == (1, 1) and tu.get(given[0], "validate")
