"""Everything that can be known to be wrong with a run before anything of it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from seamless_verl.config.checks.agents import check_default_loop, check_loops
from seamless_verl.config.checks.batches import check_critic_batch, check_mini_batch, check_train_batch
from seamless_verl.config.checks.data import check_data
from seamless_verl.config.checks.devices import (
    check_cores,
    check_cpu_rollout,
    check_devices,
    check_engine_dtype,
)
from seamless_verl.config.checks.gateway import check_gateway, check_journal, check_port, check_shards
from seamless_verl.config.checks.lengths import check_lengths
from seamless_verl.config.checks.micro_batches import (
    check_critic_micro_batches,
    check_micro_batches,
    check_reference_micro_batches,
)
from seamless_verl.config.checks.missing import check_missing
from seamless_verl.config.checks.model import (
    check_bridge,
    check_critic_model,
    check_head_size,
    check_model,
    check_model_division,
)
from seamless_verl.config.checks.modes import check_mode, check_seamless, check_standalone_pool
from seamless_verl.config.checks.parallel import check_rollout_parallel, check_trainer_parallel
from seamless_verl.config.checks.placement import check_memory, check_resources
from seamless_verl.config.checks.problem import Problem, RefusedConfigError
from seamless_verl.config.checks.resuming import check_folder, check_resume, check_steps
from seamless_verl.config.checks.reward import check_reward_function
from seamless_verl.config.checks.serve_options import check_options
from seamless_verl.config.checks.settings import Check, Settings
from seamless_verl.config.checks.versions import check_versions

__all__ = ["CHECKS", "Problem", "RefusedConfigError", "Settings", "find_problems", "preflight"]

# In the order in which a reader should mend things: later checks often follow from earlier ones.
CHECKS: tuple[Check, ...] = (
    check_mode,
    check_missing,
    check_seamless,
    check_gateway,
    check_port,
    check_shards,
    check_journal,
    check_options,
    check_loops,
    check_default_loop,
    check_versions,
    check_model,
    check_critic_model,
    check_bridge,
    check_head_size,
    check_data,
    check_lengths,
    check_reward_function,
    check_resume,
    check_folder,
    check_steps,
    check_resources,
    check_devices,
    check_cores,
    check_standalone_pool,
    check_trainer_parallel,
    check_rollout_parallel,
    check_model_division,
    check_train_batch,
    check_critic_batch,
    check_mini_batch,
    check_micro_batches,
    check_reference_micro_batches,
    check_critic_micro_batches,
    check_engine_dtype,
    check_cpu_rollout,
    check_memory,
)


def preflight(config: DictConfig | Mapping[str, Any], *, devices: int | None, accelerator: bool) -> list[str]:
    """Refuse a composed config that cannot run, before anything starts; return warnings for one that may.

    `devices` is how many there are in all, None when only a running cluster knows; `accelerator` is
    False on the CPU platform. Raises RefusedConfigError, a ConfigError that is the first problem and
    whose text lists every problem, one a line. Imports none of torch, ray, verl, vllm and Megatron.
    """
    settings = Settings.of(config, devices=devices, accelerator=accelerator)
    problems = find_problems(settings)
    fatal = [problem for problem in problems if not problem.warning]
    if fatal:
        raise RefusedConfigError(*fatal)
    return [str(problem) for problem in problems]


def find_problems(settings: Settings) -> list[Problem]:
    """All problems and warnings, in the order of CHECKS, one for each key and reason."""
    found: dict[tuple[str, str], Problem] = {}
    for check in CHECKS:
        for problem in check(settings):
            found.setdefault((problem.key, problem.reason), problem)
    return list(found.values())
