"""Which settings of an arm differ from the first one's: what its trainer reads, and what matters most first."""

from __future__ import annotations

from typing import Any

from seamless_verl.tools.compare.differences import Difference, differences


def config(mode: str, loss: str = "vanilla", **seamless: Any) -> dict[str, Any]:
    actor = {"policy_loss": {"loss_mode": loss}, "clip_ratio": 0.2 if loss == "vanilla" else 0.15}
    trainer = {"v1": {"trainer_mode": mode}, "default_local_dir": f"/out/{mode}", "experiment_name": mode}
    return {
        "actor_rollout_ref": {"actor": actor},
        "data": {"seed": len(mode)},
        "trainer": trainer,
        "seamless": {"max_staleness": None, "ahead": None, "weights": {"kv": "recompute"}} | seamless,
    }


def test_the_loss_and_the_bound_come_first_and_places_and_names_are_no_settings() -> None:
    found = differences(config("seamless", "dppo_tv", max_staleness=4, ahead=2), config("sync"))
    assert found == (
        Difference("trainer.v1.trainer_mode", "seamless", "sync"),
        Difference("actor_rollout_ref.actor.policy_loss.loss_mode", "dppo_tv", "vanilla"),
        Difference("seamless.max_staleness", "4", "not read"),
        Difference("actor_rollout_ref.actor.clip_ratio", "0.15", "0.2"),
        Difference("seamless.ahead", "2", "not read"),
    )


def test_beside_verls_mode_ours_has_its_bound_also_where_it_is_the_default() -> None:
    mode, bound = differences(config("seamless"), config("sync"))
    assert (mode.key, bound) == ("trainer.v1.trainer_mode", Difference("seamless.max_staleness", "null", "not read"))
    assert differences(config("sync"), config("seamless"))[1] == Difference(
        "seamless.max_staleness", "not read", "null"
    )


def test_verls_modes_do_not_differ_by_what_neither_reads() -> None:
    (mode,) = differences(config("colocate_async", max_staleness=4), config("sync"))
    assert mode.key == "trainer.v1.trainer_mode"


def test_two_arms_of_ours_differ_by_what_was_given_also_if_it_is_a_default() -> None:
    kept = config("seamless", max_staleness=4, weights={"kv": "keep"})
    assert differences(config("seamless"), kept) == (
        Difference("seamless.max_staleness", "null", "4"),
        Difference("seamless.weights.kv", "recompute", "keep"),
    )
    assert differences(kept, kept) == ()
