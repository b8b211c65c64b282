"""The checks of a whole config before a run: `preflight` refuses what cannot run, with all problems at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from seamless_verl.config.checks.agents import check_default_loop, check_loops
from seamless_verl.config.checks.batches import (
    check_critic_batch,
    check_critic_micro_batches,
    check_lengths,
    check_micro_batches,
    check_mini_batch,
    check_reference_micro_batches,
    check_train_batch,
    check_truncation,
)
from seamless_verl.config.checks.devices import (
    check_cores,
    check_cpu_rollout,
    check_devices,
    check_engine_dtype,
    check_memory,
    check_resources,
    check_rollout_parallel,
    check_trainer_parallel,
)
from seamless_verl.config.checks.files import check_data, check_folder, check_resume, check_reward_function, check_steps
from seamless_verl.config.checks.gateway import check_gateway, check_journal, check_port, check_shards
from seamless_verl.config.checks.hosts import check_loggers, check_names, check_versions
from seamless_verl.config.checks.model import (
    check_adapter,
    check_bridge,
    check_critic_model,
    check_head_size,
    check_model,
    check_model_division,
)
from seamless_verl.config.checks.modes import (
    check_missing,
    check_mode,
    check_numbers,
    check_renamed_code,
    check_seamless,
    check_standalone_pool,
    check_unused,
)
from seamless_verl.config.checks.serve_options import check_engine_options, check_options, check_reasoning
from seamless_verl.config.checks.settings import Check, Problem, RefusedConfigError, Settings

__all__ = ["CHECKS", "Problem", "RefusedConfigError", "Settings", "find_problems", "preflight", "preflight_of_plan"]

# In the order in which mistakes should be corrected: later ones often follow from earlier ones.
CHECKS: tuple[Check, ...] = (
    check_mode,
    check_renamed_code,
    check_missing,
    check_seamless,
    check_unused,
    check_gateway,
    check_port,
    check_shards,
    check_journal,
    check_options,
    check_reasoning,
    check_engine_options,
    check_numbers,
    check_names,
    check_loggers,
    check_loops,
    check_default_loop,
    check_versions,
    check_model,
    check_adapter,
    check_critic_model,
    check_bridge,
    check_head_size,
    check_data,
    check_lengths,
    check_truncation,
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


# Those that a plan depends on; the others concern the run alone, or the machine that starts it.
OF_A_PLAN: tuple[Check, ...] = (
    *(check_mode, check_seamless, check_resources, check_trainer_parallel, check_rollout_parallel),
    *(check_model_division, check_memory),
)


def preflight(
    config: DictConfig | Mapping[str, Any], *, devices: int | None, accelerator: bool, unmade: bool = False
) -> list[str]:
    """Refuse a composed config that cannot run, before anything starts; otherwise return the warnings.

    `devices` is how many there are in all, None when only a running cluster knows; `accelerator` is
    False on the CPU platform; `unmade` as in Settings. Imports none of torch, ray, verl, vllm and Megatron.

    Raises:
        RefusedConfigError: the first problem; its text lists every problem, one a line.
    """
    return warnings_of(find_problems(Settings.of(config, devices=devices, accelerator=accelerator, unmade=unmade)))


def preflight_of_plan(settings: Settings) -> list[str]:
    """Refuse settings without a plan, whatever data and models this machine has; other problems are warnings.

    Memory that is not stated is this machine's own, and refuses no plan for other machines.
    """
    stated = settings.seamless.device_memory_gb is not None
    needed = [check for check in OF_A_PLAN if stated or check is not check_memory]
    warnings_of(find_problems(replace(settings, unmade=True), needed))
    problems = find_problems(settings)
    keys = ", ".join(dict.fromkeys(problem.key for problem in problems if not problem.warning))
    refused = (
        f"a run would be refused here, for {keys}; `python -m seamless_verl.check` with the same settings says why"
    )
    return [*(str(problem) for problem in problems if problem.warning), *([refused] if keys else [])]


def warnings_of(problems: Sequence[Problem]) -> list[str]:
    """The warnings as text; RefusedConfigError where a problem is more than a warning."""
    fatal = [problem for problem in problems if not problem.warning]
    if fatal:
        raise RefusedConfigError(*fatal)
    return [str(problem) for problem in problems]


def find_problems(settings: Settings, checks: Sequence[Check] = CHECKS) -> list[Problem]:
    """All problems and warnings, in the order of the checks, one for each key and reason."""
    found: dict[tuple[str, str], Problem] = {}
    for check in checks:
        for problem in check(settings):
            found.setdefault((problem.key, problem.reason), problem)
    return list(found.values())
