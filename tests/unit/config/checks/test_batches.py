"""preflight accepts exactly the sizes that divide: the rule, written down a second time."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.config import plain, tiny_run, write_model, write_rows

from seamless_verl.config import preflight
from seamless_verl.errors import ConfigErrors

# Weighted towards what divides, so that the accepted are not a rarity.
SIZES = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
BATCHES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])


@cache
def base() -> dict[str, Any]:
    """A run on any number of devices of a model that any of SIZES divides."""
    folder = Path(mkdtemp())
    tree = plain(tiny_run(folder))
    write_rows(folder / "train.parquet", rows=256)
    write_model(folder / "model", num_attention_heads=12, num_key_value_heads=12, num_hidden_layers=12)
    return tree


def accepted(tree: dict[str, Any]) -> bool:
    try:
        preflight(tree, devices=None, accelerator=False)
    except ConfigErrors:
        return False
    return True


@settings(max_examples=120, deadline=None)
@example("seamless", None, 1, None, 1, 2, 1, (1, 1, 1, 1), 1, 0)
@example("seamless", None, 1, None, 1, 2, 1, (1, 1, 1, 1), 1, 1)
@given(
    mode=st.sampled_from(["sync", "colocate_async", "separate_async", "seamless"]),
    train=BATCHES | st.none(),
    mini=BATCHES,
    micro=st.none(),
    n=SIZES,
    updates=st.sampled_from([1, 1, 2]),
    world=st.sampled_from([1, 2, 4, 6, 12]),
    megatron=st.tuples(SIZES, SIZES, st.sampled_from([1, 1, 1, 2]), st.sampled_from([1, 1, 1, 2])),
    rollout_tp=SIZES,
    pool=st.sampled_from([0, 1, 2, 12]),
)
def test_exactly_what_divides_is_accepted(
    mode: str,
    train: int | None,
    mini: int,
    micro: int | None,
    n: int,
    updates: int,
    world: int,
    megatron: tuple[int, int, int, int],
    rollout_tp: int,
    pool: int,
) -> None:
    tp, pp, cp, ep = megatron
    train = mini * updates if train is None else train
    tree = copy.deepcopy(base())
    actor, rollout = tree["actor_rollout_ref"]["actor"], tree["actor_rollout_ref"]["rollout"]
    tree["data"]["train_batch_size"], actor["ppo_mini_batch_size"], rollout["n"] = train, mini, n
    tree["trainer"]["n_gpus_per_node"] = world
    tree["trainer"]["v1"]["trainer_mode"] = mode
    tree["trainer"]["v1"][mode]["parameter_sync_step"] = updates
    actor["use_dynamic_bsz"] = rollout["log_prob_use_dynamic_bsz"] = micro is None
    actor["ppo_micro_batch_size_per_gpu"] = rollout["log_prob_micro_batch_size_per_gpu"] = micro
    actor["megatron"] |= {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
    }
    rollout["tensor_model_parallel_size"] = rollout_tp
    rollout["checkpoint_engine"]["backend"] = "gloo"
    rollout["nnodes"], rollout["n_gpus_per_node"] = (1, pool) if pool else (0, 8)

    standalone = mode == "separate_async" or (mode == "seamless" and pool > 0)
    pools = [world] * (mode == "separate_async" or not standalone) + [pool] * standalone
    fits = world % (tp * pp * cp) == 0 and world % (tp * ep * pp) == 0
    fits = fits and all(size > 0 and size % rollout_tp == 0 for size in pools)
    if mode == "separate_async":
        fits = fits and train == updates * mini
    else:
        fits = fits and train % updates == 0 and train // updates % mini == 0
    if fits:
        ranks = world // (tp * pp * cp)
        fits = mini * n % ranks == 0
        if micro is not None:
            fits = fits and mini * n // ranks % micro == 0 and train // updates * n // ranks % micro == 0
    assert accepted(tree) == fits
