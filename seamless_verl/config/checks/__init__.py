"""The checks of a whole config before a run: `preflight` refuses what cannot run, with all problems that were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from seamless_verl.config.checks.agent_names import check_agent_names, check_own_loops_run, check_tools_are_read
from seamless_verl.config.checks.agents import check_default_loop, check_loops
from seamless_verl.config.checks.batches import (
    check_critic_batch,
    check_critic_micro_batches,
    check_lengths,
    check_max_sequence,
    check_micro_batches,
    check_mini_batch,
    check_reference_micro_batches,
    check_train_batch,
    check_truncation,
)
from seamless_verl.config.checks.command_fields import check_fields
from seamless_verl.config.checks.corrections import (
    check_bypass,
    check_chosen_loss,
    check_own_losses,
    check_staleness,
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
from seamless_verl.config.checks.engines import check_cpu_engine, check_cpu_kernels, check_engine
from seamless_verl.config.checks.estimators import check_lone_samples, check_own_estimators, check_turns
from seamless_verl.config.checks.files import check_data, check_folder, check_resume, check_reward_function, check_steps
from seamless_verl.config.checks.gateway import (
    check_gateway,
    check_journal,
    check_port,
    check_public_address,
    check_shards,
    check_view,
)
from seamless_verl.config.checks.hosts import (
    check_assertions,
    check_home,
    check_loggers,
    check_names,
    check_platform_name,
    check_stack,
    check_versions,
)
from seamless_verl.config.checks.keys import check_keys
from seamless_verl.config.checks.lengths import check_cache, check_prompts
from seamless_verl.config.checks.model import (
    check_adapter,
    check_bridge,
    check_context_parallel,
    check_critic_model,
    check_head_size,
    check_layers,
    check_model,
    check_model_division,
)
from seamless_verl.config.checks.modes import (
    check_mode,
    check_seamless,
    check_standalone_pool,
)
from seamless_verl.config.checks.queue import check_queue_room
from seamless_verl.config.checks.samplers import check_sampler
from seamless_verl.config.checks.serve_options import check_engine_options, check_options, check_reasoning
from seamless_verl.config.checks.tools import check_function_tools, check_tool_format, check_tools
from seamless_verl.config.checks.unused import check_unused
from seamless_verl.config.checks.values import (
    check_choices,
    check_flags,
    check_logprobs_mode,
    check_missing,
    check_numbers,
    check_temperature,
)
from seamless_verl.config.checks.visible import check_visible_devices
from seamless_verl.config.joining import check_joined
from seamless_verl.config.settings import Check, Problem, RefusedConfigError, Settings, named_by_variable

__all__ = ["CHECKS", "Problem", "RefusedConfigError", "Settings", "find_problems", "preflight", "preflight_of_plan"]

# In the order in which mistakes should be corrected: later ones often follow from earlier ones.
CHECKS: tuple[Check, ...] = (
    check_mode,
    check_missing,
    check_keys,
    check_engine,
    check_seamless,
    check_unused,
    check_chosen_loss,
    check_own_losses,
    check_lone_samples,
    check_own_estimators,
    check_turns,
    check_sampler,
    check_bypass,
    check_staleness,
    check_gateway,
    check_port,
    check_shards,
    check_public_address,
    check_journal,
    check_view,
    check_options,
    check_reasoning,
    check_engine_options,
    check_logprobs_mode,
    check_numbers,
    check_temperature,
    check_flags,
    check_choices,
    check_assertions,
    check_home,
    check_platform_name,
    check_names,
    check_loggers,
    check_loops,
    check_default_loop,
    check_tools,
    check_function_tools,
    check_tool_format,
    check_versions,
    check_stack,
    check_model,
    check_adapter,
    check_critic_model,
    check_bridge,
    check_layers,
    check_context_parallel,
    check_head_size,
    check_data,
    check_agent_names,
    check_own_loops_run,
    check_tools_are_read,
    check_fields,
    check_lengths,
    check_max_sequence,
    check_prompts,
    check_truncation,
    check_reward_function,
    check_resume,
    check_folder,
    check_steps,
    check_joined,
    check_resources,
    check_visible_devices,
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
    check_queue_room,
    check_engine_dtype,
    check_cpu_engine,
    check_cpu_kernels,
    check_cpu_rollout,
    check_memory,
    check_cache,
)


# Those that a plan depends on; the others concern the run alone, or the machine that starts it.
OF_A_PLAN: tuple[Check, ...] = (
    *(check_mode, check_seamless, check_resources, check_trainer_parallel, check_rollout_parallel),
    *(check_model_division, check_memory),
)

# Those that concern the machine that starts the run, with what each finds out. They are left out where a run for
# machines with accelerators is checked without one.
OF_THIS_MACHINE: Mapping[Check, str] = {
    check_versions: "installed versions",
    check_stack: "installed versions",
    check_bridge: "Megatron-Bridge",
    check_layers: "Transformer Engine",
    check_loggers: "the loggers' packages",
    check_port: "free ports",
    check_journal: "the journal's file",
    check_resume: "the checkpoint to resume from",
    check_folder: "the checkpoint folder",
}


def preflight(
    config: DictConfig | Mapping[str, Any],
    *,
    devices: int | None,
    accelerator: bool,
    unmade: bool = False,
    elsewhere: bool = False,
) -> list[str]:
    """Refuse a composed config that cannot run, before anything starts; otherwise return the warnings.

    With `unmade`, none of them is about data and models that are to be made.

    `devices` is how many there are in all, None when only a running cluster knows; `accelerator` is
    False on the CPU platform; `unmade` as in Settings, `elsewhere` as in Host. Imports none of torch, ray, verl, vllm
    and Megatron.

    Raises:
        RefusedConfigError: the first problem; its text lists every problem, one a line.
    """
    settings = Settings.of(config, devices=devices, accelerator=accelerator, unmade=unmade, elsewhere=elsewhere)
    checks = [one for one in CHECKS if not elsewhere or one not in OF_THIS_MACHINE]
    problems = [one for one in find_problems(settings, checks) if not (unmade and one.unmade)]
    found = warnings_of([named_by_variable(one, config) for one in problems])
    if not elsewhere:
        return found
    return [*found, f"not checked without an accelerator: {', '.join(dict.fromkeys(OF_THIS_MACHINE.values()))}"]


def preflight_of_plan(settings: Settings, *, elsewhere: bool = False) -> list[str]:
    """Refuse settings without a plan, whatever data and models this machine has; other problems are warnings.

    Memory that is not stated is this machine's own, and refuses no plan for other machines. What this machine lacks
    for a run is none of a plan's warnings; where the run is `elsewhere`, as in Host, it is not looked at.
    """
    stated = settings.seamless.device_memory_gb is not None or settings.seamless.host_memory_gb is not None
    needed = [check for check in OF_A_PLAN if stated or check is not check_memory]
    warnings_of(find_problems(replace(settings, unmade=True), needed))
    problems = find_problems(settings, [check for check in CHECKS if check not in OF_THIS_MACHINE])
    here = [] if elsewhere else find_problems(settings, tuple(OF_THIS_MACHINE))
    problems += [problem for problem in here if not problem.warning]
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
    """All problems and warnings, in the order of the checks, one for each key, value and reason."""
    found: dict[tuple[str, str, str], Problem] = {}
    for check in checks:
        for problem in check(settings):
            found.setdefault((problem.key, str(problem.value), problem.reason), problem)
    return list(found.values())
