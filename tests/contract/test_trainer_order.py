"""The order in which verl calls the hooks that `SeamlessTrainer` overrides, from its start to its last step."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from support.hosts import found

BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
ORDER = {
    "__init__": ("_build_replay_buffer",),
    "init": ("_setup", "on_init_end"),
    "_setup": (
        "_init_tokenizer",
        "_init_dataloader",
        "_init_dump_executor",
        "_init_resource_pool_mgr",
        "_load_checkpoint",
    ),
    "fit": (
        *("on_validate_begin", "_validate", "on_validate_end", "_shutdown_dump_executor"),  # before training
        *("_reissue_inflight_prompts", "on_train_begin"),
        *("on_step_begin", "_start_profiling", "step", "_stop_profiling", "_save_checkpoint", "on_step_end"),
        *("_consume_sync_metrics", "on_validate_begin", "_validate", "on_validate_end"),
        *(
            "_compute_metrics",
            "_log_rollout_data",
            "_shutdown_dump_executor",
            "on_train_end",
            "_shutdown_dump_executor",
        ),
    ),
    "step": ("prepare_step", "_step_once"),
    "prepare_step": ("_add_batch_to_generate",),
    "_add_batch_to_generate": ("_next_train_batch", "_submit_batch_to_rollout"),
    "_add_prompts_to_generate": ("_next_train_batch", "_submit_batch_to_rollout"),
    "_next_train_batch": ("_fetch_one_gen_batch",),
    "_step_once": (
        *("on_sample_begin", "on_sample_end", "_compute_reward_colocate", "_balance_batch", "_compute_old_log_prob"),
        *("_compute_ref_log_prob", "_compute_values", "_compute_advantage", "_update_critic", "_update_actor"),
    ),
    "_balance_batch": ("_get_required_batch_multiple",),
    "_validate": ("_compute_reward_colocate", "_maybe_log_val_generations", "_dump_generations", "_val_metrics_update"),
}
"""The methods of its own that each method of verl's trainer calls, in the order of its source."""


def calls_of(method: Any, names: set[str]) -> Iterator[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    asked = [
        node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    own = [
        func for func in asked if isinstance(func.value, ast.Name) and func.value.id == "self" and func.attr in names
    ]
    yield from (func.attr for func in sorted(own, key=lambda func: (func.lineno, func.col_offset)))


@pytest.mark.parametrize("caller", ORDER)
def test_verl_calls_its_hooks_in_this_order(caller: str) -> None:
    base = found(BASE, "seamless-trainer")
    names = {name for name, value in vars(base).items() if inspect.isfunction(value)}
    assert tuple(calls_of(getattr(base, caller), names)) == ORDER[caller]


def called_from(caller: str) -> Iterator[str]:
    """The caller and what it calls, as far as `ORDER` follows it, in order."""
    yield caller
    for name in ORDER.get(caller, ()):
        yield from called_from(name)


def test_our_trainer_is_verl_s_with_hooks_in_the_order_in_which_they_are_called() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from seamless_verl.trainer.trainer import SeamlessTrainer

    assert SeamlessTrainer.__mro__[1] is PPOTrainer
    called = list(dict.fromkeys(name for start in ("__init__", "init", "fit") for name in called_from(start)))
    hooks = [name for name in vars(SeamlessTrainer) if name in called]
    assert hooks == sorted(hooks, key=called.index) and len(hooks) > 25
