"""What a step does around its computations: the columns of an update, and the end of what it left over."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.resources.ahead import StalenessBound
from seamless_verl.resources.tail_batching import TailBatching
from seamless_verl.trainer.prompt_feed import PromptFeed, RunAhead
from seamless_verl.trainer.token_mask import trained_columns
from seamless_verl.trainer.trainer import SeamlessTrainer
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import parse_policy

pytestmark = pytest.mark.integration


def trainer_of() -> Any:
    trainer = SeamlessTrainer.__new__(SeamlessTrainer)
    trainer.seamless, trainer.global_steps, trainer.local_trigger_step = SeamlessConfig(), 5, 0
    trainer.counted = Counter()
    trainer.parameter_sync_step, trainer.weighs_sessions, trainer.mismatch = 1, False, None
    trainer.config = OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": True}}})
    return trainer


def test_an_update_asks_for_no_column_that_only_describes_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(trainer_base.PPOTrainer, "_update_actor", lambda _, batch, metrics: asked.append(batch.fields))
    for fields in (["raw_prompt", "input_ids", "extra_fields", "advantages"], None):
        trainer_of()._update_actor(SimpleNamespace(fields=fields, extra_info={}, keys=["u_0_0"]), {})
    assert asked == [["input_ids", "advantages"], None]


@pytest.mark.parametrize(
    ("step", "critic", "parts"), [(5, None, 2), (5, 2, 4), (5, 3, 2), (5, 1, 8), (2, 4, 2), (2, None, 1)]
)
def test_rows_stay_in_their_mini_batches_of_actor_and_critic(step: int, critic: int | None, parts: int) -> None:
    """Of eight prompts with two samples; the actor's four prompts each, from step 4 on."""
    trainer = trainer_of()
    trainer.global_steps, trainer.use_critic = step, critic is not None
    actor = {"ppo_mini_batch_size": 4, "shuffle": False}
    of_critic = {"ppo_mini_batch_size": critic, "shuffle": False}
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor, "rollout": {"n": 2}},
            "critic": of_critic,
            "trainer": {"critic_warmup": 4},
        }
    )
    assert trainer._mini_batches(16) == parts


def test_what_a_step_left_over_has_ended_when_its_groups_are_recorded_though_nothing_computed() -> None:
    """As with `trainer.critic_warmup`, an actor without a critic, and the rollout's logprobs as the old ones."""
    done, recorded = list[Any](), list[Any]()
    trainer = trainer_of()
    trainer.group_details, trainer.lengths = {}, SimpleNamespace(write=lambda *_: None)
    trainer.data_plane = SimpleNamespace(record_groups=lambda _: None)
    trainer.replay_buffer = SimpleNamespace(
        bound=StalenessBound(0, batch=8),
        outstanding_prompts=lambda: ["a"],
        defer=lambda uids, step: done.append(step),
        take_decided=lambda *_: recorded.append(list(done)) or [],  # type: ignore[func-returns-value]
    )
    calls: Any = SimpleNamespace(step=lambda: 5, manager=lambda: SimpleNamespace(defer=done.append))
    trainer.feed = feed = PromptFeed(
        calls, trainer.replay_buffer, ahead=RunAhead(0, None), tail=TailBatching(2), updates=1, samples=1
    )
    feed.mini_batch_taken()
    feed.defer_rest()
    trainer._record_groups()
    assert recorded == [[["a"], 5]] and feed.tail.deferred == ["a"] and feed.deferring is None


def test_tokens_of_a_step_are_those_of_all_its_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl takes the mean over the updates."""
    trainer = trainer_of()
    trainer.step_result, counted = None, list[Any]()
    count_masked = SimpleNamespace(remote=lambda *of: counted.append(of))
    trainer.data_plane = SimpleNamespace(actor=SimpleNamespace(count_masked=count_masked))
    monkeypatch.setattr("seamless_verl.trainer.trainer.ray.get", lambda _: None)

    def step(self: Any, metrics: dict[str, Any], timing: Any) -> None:
        for tokens in (100, 300):
            self._count_masked(tokens)
            self._add_agreement(
                metrics, {"seamless/agreement/plain/tokens": tokens, "seamless/agreement/plain/mean": 1}
            )

    monkeypatch.setattr(trainer_base.PPOTrainer, "step", step)
    for _ in range(2):
        metrics = dict[str, Any]()
        trainer.step(metrics, {})
        assert metrics["seamless/tokens/masked_as_stale"] == metrics["seamless/agreement/plain/tokens"] == 400
    assert counted == [(100, DropReason.STALE), (300, DropReason.STALE)] * 2


@pytest.mark.parametrize(
    ("policy", "level"), [("train_all", 2), ("mask_older_than:1", 1), ("mask_older_than:9", 2), ("fresh_tail_only", 0)]
)
def test_nothing_is_generated_so_far_ahead_that_it_would_be_masked(policy: str, level: int) -> None:
    """With `seamless.ahead=null` and four versions permitted, where the level is found from 2 on; else it is given."""
    oldest = parse_policy(policy).oldest
    assert RunAhead(4, None, oldest).level == level
    assert RunAhead(4, 3, oldest).level == 3


READ = [
    *("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "attention_mask"),
    *("old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "returns", "values", "rm_scores"),
    *("rollout_is_weights", "weight_version", "grammar", "multi_modal_inputs", "routed_experts"),
    *("teacher_ids", "teacher_logprobs", "uid", "turn", "row_weights"),
]


def test_what_is_computed_with_stays_in_its_order() -> None:
    assert trained_columns(["raw_prompt", *READ, "extra_fields", "a_users_own", "index"]) == [
        *READ,
        "a_users_own",
        "index",
    ]


def test_a_batch_that_names_no_columns_has_all() -> None:
    assert trained_columns(None) is None
