"""Advantages that are computed before a batch is taken are those that it would have got, in a real TransferQueue."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.integration
Rewards = dict[str, float]
REWARDS: Rewards = {"a_0_0": 1.0, "a_1_0": 0.0, "a_2_0": 0.5, "b_0_0": 0.0, "b_1_0": 0.25, "b_1_1": 0.25, "c_0_0": 1.0}
PADDING = {"is_padding": True}


def trainer(estimator: str = "grpo", *, gateway: bool = False, **changed: Any) -> Any:
    """A trainer of steps of two groups, which weighs sessions."""
    from omegaconf import OmegaConf

    from seamless_verl.trainer.group_advantages import GroupAdvantages, follow_from_groups
    from seamless_verl.trainer.trainer import SeamlessTrainer

    made = object.__new__(SeamlessTrainer)
    algorithm = {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
    algorithm |= {"rollout_correction": {"bypass_mode": True}} | changed
    made.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})
    made.seamless = SimpleNamespace(
        gateway=SimpleNamespace(enabled=gateway), tokens=SimpleNamespace(policy="train_all")
    )
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=["a worker"])
    made.weighs_sessions, made.bound = True, SimpleNamespace(batch=2)
    made.group_advantages, made.group_details = GroupAdvantages(), defaultdict(dict)
    made.advantages_follow_from_groups = follow_from_groups(made.config)
    made.replay_buffer = SimpleNamespace(prompt_global_steps={"train": {"a": 1, "b": 1, "c": 2}})
    return made


def put(tq: Any, rewards: Rewards, tag: dict[str, Any] | None = None) -> Any:
    """Rows with these rewards at their ends; a row's length follows from its key."""
    import torch
    from tensordict import NonTensorStack, TensorDict
    from transfer_queue import KVBatchMeta

    lengths = [2 + len(key) % 3 + int(key[-1]) for key in rewards]
    scores = [torch.tensor([0.0] * (n - 1) + [value]) for n, value in zip(lengths, rewards.values(), strict=True)]
    columns = {
        "uid": NonTensorStack(*(key.split("_")[0] for key in rewards)),
        "rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged),
        "response_mask": torch.nested.as_nested_tensor(
            [torch.tensor([1] * (n - 2) + [0, 1]) for n in lengths], layout=torch.jagged
        ),
        "rollout_log_probs": torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths], layout=torch.jagged),
    }
    tags = [{"status": "success"} | (tag or {}) for _ in rewards]
    tq.kv_batch_put(
        keys=list(rewards), partition_id="train", fields=TensorDict(columns, batch_size=len(rewards)), tags=tags
    )
    return KVBatchMeta(keys=list(rewards), tags=tags, partition_id="train")


def advantages(tq: Any, keys: Any) -> dict[str, list[float]]:
    column = tq.kv_batch_get(keys=list(keys), partition_id="train", select_fields=["advantages"])["advantages"]
    return {key: row.tolist() for key, row in zip(keys, column.unbind(), strict=True)}


def ended(made: Any, rewards: Rewards) -> Any:
    """Has the groups of these rows end, as the buffer says."""
    from transfer_queue import KVBatchMeta

    asked = list[int]()

    def ended_groups(at_most: int, known: Any) -> Any:
        asked.append(at_most)
        keys = [key for key in rewards if not known(key.split("_")[0])]
        return KVBatchMeta(keys=keys, tags=[{"status": "success"} for _ in keys], partition_id="train")

    made.replay_buffer.ended_groups = ended_groups
    made._compute_advantages_ahead()
    return asked


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized"])
@pytest.mark.parametrize("ahead", ["a", "ab", "abc"])
def test_what_was_computed_ahead_is_what_the_batch_gets(clean: Any, estimator: str, ahead: str) -> None:
    """Whichever groups had ended by then; one has a session of two rows, one a single sample; padding has none."""
    padding = {"pad_0_0": 0.0, "pad_1_0": 0.0}
    expected = trainer(estimator)
    whole = put(clean, REWARDS | padding)
    expected._compute_advantage(whole, {})
    wanted = advantages(clean, REWARDS)
    clean.kv_clear(keys=whole.keys, partition_id="train")

    made = trainer(estimator)
    put(clean, REWARDS)
    assert ended(made, {key: reward for key, reward in REWARDS.items() if key[0] in ahead}) == [2]
    put(clean, padding, PADDING)
    batch = made._compute_advantage(type(whole)(whole.keys, whole.tags, "train"), {})
    assert advantages(clean, REWARDS) == wanted and set(batch.keys) == set(whole.keys)
    assert {"advantages", "returns", "rm_scores"} <= set(batch.fields) and not made.group_advantages.rows


def test_only_rows_that_lack_them_are_computed_then(clean: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import trainer_base

    made, batch = trainer(), put(clean, REWARDS)
    ended(made, {key: reward for key, reward in REWARDS.items() if key[0] in "ab"})
    asked, computed = list[list[str]](), trainer_base.PPOTrainer._compute_advantage

    def compute(trainer: Any, rows: Any, metrics: Any) -> Any:
        asked.append(rows.keys)
        return computed(trainer, rows, metrics)

    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_advantage", compute)
    made._compute_advantage(batch, {})
    assert asked == [["c_0_0"]]


def test_a_group_that_has_other_rows_by_then_gets_them_anew(clean: Any) -> None:
    """It was reopened, and its extra samples change what the first ones are compared with."""
    made, grown = trainer(gateway=True), {"a_0_0": 1.0, "a_1_0": 0.0, "a_2_0": 1.0}
    first = {key: grown[key] for key in ("a_0_0", "a_1_0")}
    put(clean, first)
    ended(made, first)
    before = advantages(clean, first)
    batch = put(clean, grown)
    made._compute_advantage(batch, {})
    after = advantages(clean, grown)
    assert after["a_0_0"] != before["a_0_0"] and after["a_0_0"][0] == after["a_2_0"][0]
    assert made.group_details["a"]["advantages"]["0"][0] == pytest.approx(after["a_0_0"][0], abs=1e-5)


def test_the_journal_hears_of_them_when_the_group_is_trained(clean: Any) -> None:
    made, batch = trainer(gateway=True), put(clean, REWARDS)
    ended(made, {key: reward for key, reward in REWARDS.items() if key[0] in "ab"})
    assert not made.group_details
    made._compute_advantage(batch, {})
    assert {uid: set(found["advantages"]) for uid, found in made.group_details.items()} == {
        "a": {"0", "1", "2"},
        "b": {"0", "1"},
        "c": {"0"},
    }


def test_padding_of_a_batch_whose_groups_have_them_is_in_no_journal(clean: Any) -> None:
    made, batch = trainer(gateway=True), put(clean, REWARDS)
    ended(made, REWARDS)
    padding = put(clean, {"pad_0_0": 0.0}, PADDING)
    made._compute_advantage(type(batch)(batch.keys + padding.keys, batch.tags + padding.tags, "train"), {})
    assert made.group_details.keys() == {"a", "b", "c"} and advantages(clean, ["pad_0_0"])


def test_columns_and_flags_are_as_after_a_write(clean: Any) -> None:
    """A column that came later is among them, and what a reference's pass was told is not told to the update."""
    import torch
    from tensordict import TensorDict

    made, batch = trainer(), put(clean, REWARDS)
    ended(made, REWARDS)
    columns = TensorDict({"ref_log_prob": torch.zeros(len(REWARDS), 1)}, batch_size=len(REWARDS))
    clean.kv_batch_put(keys=batch.keys, partition_id="train", fields=columns)
    batch.extra_info["compute_loss"] = False
    found = made._compute_advantage(batch, {})
    assert "ref_log_prob" in found.fields and "compute_loss" not in found.extra_info
    assert [tag["status"] for tag in found.tags] == ["success"] * len(REWARDS)


def test_a_group_that_was_dropped_is_forgotten(clean: Any) -> None:
    made = trainer()
    put(clean, REWARDS)
    ended(made, REWARDS)
    del made.replay_buffer.prompt_global_steps["train"]["b"]
    ended(made, REWARDS)
    assert set(made.group_advantages.rows) == {"a", "b", "c"}, "it was asked for, and is computed again"
    ended(made, {})
    assert set(made.group_advantages.rows) == {"a", "c"}


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"estimator": "reinforce_plus_plus_baseline"}, id="it looks at the whole batch"),
        pytest.param({"use_kl_in_reward": True}, id="a reference has a part in them"),
        pytest.param({"rollout_correction": {"bypass_mode": False}}, id="a recomputed logprob has"),
    ],
)
def test_where_more_than_the_group_decides_nothing_is_computed_ahead(changed: dict[str, Any]) -> None:
    made = trainer(**changed)
    made.replay_buffer.ended_groups = lambda *_: pytest.fail("it was looked for")
    made._compute_advantages_ahead()


def test_nor_where_rewards_are_written_later() -> None:
    made = trainer()
    made.reward_loop_manager.reward_loop_worker_handles = None
    made.replay_buffer.ended_groups = lambda *_: pytest.fail("it was looked for")
    made._compute_advantages_ahead()


def test_the_buffer_gives_the_oldest_groups_that_ended_without_what_is_known_or_sampled() -> None:
    from support.sampled_prompts import trainer as with_a_buffer

    buffer = with_a_buffer().replay_buffer
    buffer.prompt_global_steps["train"] = {"d": 4, "c": 3, "b": 2, "a": 1, "running": 0}
    buffer.finished_keys["train"] = {"a", "b", "c", "d"}
    buffer.partitions["train"] = {
        f"{uid}_{i}_0": {"of": uid} for uid in ("d", "running", "c", "b", "a") for i in (0, 1)
    }
    buffer.sampled = ["a"]
    rows = buffer.ended_groups(1, {"b"}.__contains__)
    assert (rows.keys, rows.tags) == (["c_0_0", "c_1_0"], [{"of": "c"}] * 2)
    assert buffer.ended_groups(9, lambda _: True).keys == []
