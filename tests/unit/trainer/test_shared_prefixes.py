"""Which models share what sequences begin with, by what their workers say; and the share that an update saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from seamless_verl.trainer.shared_prefixes import SharedPrefixes, share_of_update


@dataclass
class Group:
    """The workers of a pool, with what each says of its models."""

    says: Sequence[dict[str, str | None]]

    def share_prefixes(self) -> Sequence[dict[str, str | None]]:
        return self.says


@dataclass
class Batch:
    """Two prompts of two rows each, none beside the other; 60 of a row's 70 tokens are its prompt's."""

    keys: list[str] = field(default_factory=lambda: ["a_0_0", "b_0_0", "b_1_0", "a_1_0"])
    tags: list[dict[str, int]] = field(default_factory=lambda: [{"prompt_len": 60, "seq_len": 70}] * 4)

    def reorder(self, order: list[int]) -> None:
        self.keys = [self.keys[i] for i in order]


def arranged(group: Group, caplog: pytest.LogCaptureFixture) -> tuple[list[str], str]:
    batch = Batch()
    with caplog.at_level(logging.INFO, "seamless_verl.trainer.shared_prefixes"):
        SharedPrefixes({"actor_rollout_wg": group, "ref_policy_wg": group, "critic_wg": None}).arrange(batch, 2, 1)
    return batch.keys, caplog.text


def test_the_prompts_of_an_actor_that_shares_stay_together_though_its_reference_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys, said = arranged(Group([{"actor": None, "reference": "adapters"}] * 2), caplog)
    assert keys in (["a_0_0", "a_1_0", "b_0_0", "b_1_0"], ["b_0_0", "b_1_0", "a_0_0", "a_1_0"])
    assert "reference computes each sequence alone: not proven with adapters" in said
    assert "actor computes each" not in said and "of 280 tokens of the first update 160 are to be computed" in said


def test_nothing_is_arranged_for_an_actor_of_which_one_rank_has_something_against_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys, said = arranged(Group([{"actor": None}, {"actor": "experts"}]), caplog)
    assert keys == ["a_0_0", "b_0_0", "b_1_0", "a_1_0"]
    assert "actor computes each sequence alone: not proven with experts" in said


def test_the_share_that_an_update_saved_weighs_micro_batches_by_their_tokens() -> None:
    """Means of both counts over the same micro-batches, as verl takes them: (90 + 0) / (100 + 300)."""
    metrics = {"actor/shared_saved": 45.0, "actor/shared_tokens": 200.0, "actor/loss": 1.0}
    assert share_of_update(metrics, "actor") == {"actor/seamless/shared/tokens_saved": 0.225, "actor/loss": 1.0}
    assert share_of_update({"critic/loss": 1.0}, "critic") == {"critic/loss": 1.0}
