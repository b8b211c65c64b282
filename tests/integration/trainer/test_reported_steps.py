"""Which steps are reported beside the next one, and what waits for a report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from seamless_verl.trainer.sampled_prompts import SamplingTrainer
from seamless_verl.trainer.step_report import StepReport
from seamless_verl.trainer.trainer import SeamlessTrainer

pytestmark = pytest.mark.integration
BATCH: Any = object()


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> SeamlessTrainer:
    """In step 4 of a run that goes on at once, saves nothing, and has cores of its own."""
    made = SeamlessTrainer.__new__(SeamlessTrainer)
    made.config = OmegaConf.create({"trainer": {"logger": ["console", "file"], "save_freq": -1}})
    made.report, made.global_steps, made.stages = StepReport(), 4, []  # type: ignore[attr-defined]
    made.enter_stage = made.stages.append  # type: ignore[attr-defined]
    monkeypatch.setattr(made, "_goes_on_at_once", lambda: True)
    monkeypatch.setattr(made, "_devices_are_all_cores", lambda: False)
    computed_by = lambda *_, **__: made.stages.append(threading.current_thread().name)  # type: ignore[attr-defined] # noqa: E731
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", computed_by)
    return made


def reported_by(trainer: SeamlessTrainer) -> str:
    """The name of the thread that computes a step's metrics."""
    trainer._compute_metrics(BATCH, {}, {}, global_steps=4, epoch=0)
    trainer.report.end(lambda: None)
    trainer.report.finish()
    return str(trainer.stages[-1])  # type: ignore[attr-defined]


def test_a_step_is_reported_beside_the_next_one(trainer: SeamlessTrainer) -> None:
    assert reported_by(trainer) == "report of a step"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.save_freq", 2),
        ("trainer.logger", ["console", "mlflow"]),
        ("trainer.logger", "trackio"),
        ("trainer.rollout_data_dir", "/dumps"),
    ],
)
def test_it_is_not_with_a_checkpoint_a_dump_or_a_logger_that_is_bound_to_a_thread(
    trainer: SeamlessTrainer, key: str, value: Any
) -> None:
    OmegaConf.update(trainer.config, key, value)
    assert reported_by(trainer) == threading.main_thread().name


@pytest.mark.parametrize(("method", "answer"), [("_goes_on_at_once", False), ("_devices_are_all_cores", True)])
def test_it_is_not_where_something_else_follows_or_all_cores_train(
    trainer: SeamlessTrainer, monkeypatch: pytest.MonkeyPatch, method: str, answer: bool
) -> None:
    monkeypatch.setattr(trainer, method, lambda: answer)
    assert reported_by(trainer) == threading.main_thread().name


@pytest.mark.parametrize(
    "waits",
    [
        lambda trainer: trainer._await_group(0.0),
        lambda trainer: trainer.while_updating(),
        lambda trainer: trainer._compute_values(BATCH, {}),
        lambda trainer: trainer._update_critic(SimpleNamespace(fields=[], extra_info={}, keys=[]), {}),
    ],
)
def test_a_report_begins_when_the_trainer_waits(
    trainer: SeamlessTrainer, monkeypatch: pytest.MonkeyPatch, waits: Callable[[SeamlessTrainer], Any]
) -> None:
    """For groups, and for workers that compute."""
    reports = list[bool]()
    logged = threading.Event()

    def wait(*_: Any) -> Any:
        reports.append(logged.wait(10.0))
        return SimpleNamespace()

    for name in ("_await_group", "_compute_values", "_update_critic"):
        monkeypatch.setattr(SamplingTrainer, name, wait, raising=False)
    trainer.lending = SimpleNamespace(training=lambda name: nullcontext())  # type: ignore[assignment]
    trainer.weighs_sessions = False
    monkeypatch.setattr(trainer, "prepare_while_updating", lambda: None)
    monkeypatch.setattr(trainer, "_compute_advantages_ahead", lambda: None)
    trainer._compute_metrics(BATCH, {}, {}, global_steps=4, epoch=0)
    trainer.report.end(logged.set)
    assert not logged.is_set()
    waits(trainer)
    assert logged.wait(10.0) and all(reports)


def test_the_metrics_of_a_step_wait_for_the_report_before_it_and_the_stage_says_so(trainer: SeamlessTrainer) -> None:
    may_go_on, written = threading.Event(), list[str]()
    trainer.report.open(lambda: may_go_on.wait(10.0))
    trainer.report.end(lambda: written.append("step 3"))
    threading.Timer(0.05, may_go_on.set).start()
    trainer._compute_metrics(BATCH, {}, {}, global_steps=4, epoch=0)
    assert written == ["step 3"] and trainer.stages[0] == "logging, step 3"  # type: ignore[attr-defined]
    trainer.report.end(lambda: None)
    trainer.report.finish()
