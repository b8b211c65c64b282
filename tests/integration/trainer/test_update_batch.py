"""What a step does around its computations: the columns of an update, and the end of what it left over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.resources.tail_batching import TailBatching
from seamless_verl.trainer.trainer import SeamlessTrainer

pytestmark = pytest.mark.integration


def trainer_of() -> Any:
    trainer = SeamlessTrainer.__new__(SeamlessTrainer)
    trainer.seamless, trainer.global_steps, trainer.step_batches = SeamlessConfig(), 5, 1
    trainer.parameter_sync_step, trainer.weighs_sessions = 1, False
    return trainer


def test_an_update_asks_for_no_column_that_only_describes_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(trainer_base.PPOTrainer, "_update_actor", lambda _, batch, metrics: asked.append(batch.fields))
    for fields in (["raw_prompt", "input_ids", "extra_fields", "advantages"], None):
        trainer_of()._update_actor(SimpleNamespace(fields=fields, extra_info={}, keys=["u_0_0"]), {})
    assert asked == [["input_ids", "advantages"], None]


def test_what_a_step_left_over_has_ended_when_its_groups_are_recorded_though_nothing_computed() -> None:
    """As with `trainer.critic_warmup`, an actor without a critic, and the rollout's logprobs as the old ones."""
    done, recorded = list[Any](), list[Any]()
    trainer = trainer_of()
    trainer.tail, trainer.group_details, trainer.lengths = TailBatching(2), {}, None
    trainer.agent_loop_manager = SimpleNamespace(defer=done.append)
    trainer.data_plane = SimpleNamespace(record_groups=recorded.append)
    trainer.replay_buffer = SimpleNamespace(
        outstanding_prompts=lambda: ["a"],
        defer=lambda uids, step: done.append(step),
        take_decided=lambda *_: list(done),
    )
    trainer.defer_rest()
    trainer._record_groups()
    assert done == [["a"], 5] and trainer.tail.deferred == ["a"] and trainer.deferring is None and len(recorded) == 1
