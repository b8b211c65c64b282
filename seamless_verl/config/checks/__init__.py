"""The checks of a whole config before a run: `preflight` refuses what cannot run, with all problems that were found.

A check exists if the mistake is silent, late (more than a minute into a run) or in settings of ours. What verl, vLLM,
Megatron or hydra say at the start is theirs to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from seamless_verl.config.checks import (
    agent_names,
    agents,
    batches,
    corrections,
    devices,
    experts,
    files,
    gateway,
    hosts,
    keys,
    model,
    modes,
    resuming,
    samplers,
    unused,
)
from seamless_verl.config.settings import Check, Problem, Settings, named_by_variable
from seamless_verl.errors import ConfigErrors

__all__ = ["CHECKS", "Problem", "Settings", "find_problems", "preflight", "preflight_of_plan"]

# In the order in which mistakes should be corrected: later ones often follow from earlier ones.
CHECKS: tuple[Check, ...] = (
    *(
        modes.check_mode,
        keys.check_missing,
        keys.check_keys,
        modes.check_seamless,
        unused.check_unused,
        unused.check_unread,
    ),
    *(corrections.check_chosen_loss, corrections.check_own_losses, corrections.check_lone_samples),
    *(
        corrections.check_own_estimators,
        corrections.check_estimators_of_v0,
        corrections.check_turns,
        samplers.check_sampler,
        corrections.check_bypass,
    ),
    *(corrections.check_staleness, gateway.check_gateway, gateway.check_options, gateway.check_port),
    *(gateway.check_shards, gateway.check_public_address, gateway.check_journal, gateway.check_view),
    *(gateway.check_metrics_port, gateway.check_traces),
    *(
        keys.check_logprobs_mode,
        keys.check_drafts,
        keys.check_temperature,
        keys.check_top_p,
        keys.check_learning_rates,
        keys.check_kl_estimators,
        hosts.check_assertions,
        hosts.check_home,
        hosts.check_names,
    ),
    *(hosts.check_loggers, agents.check_loops, agents.check_default_loop, hosts.check_versions, hosts.check_stack),
    *(model.check_model, model.check_adapter, model.check_critic_model, model.check_layers),
    hosts.check_adapters_of_te,
    *(experts.check_expert_weights, experts.check_expert_export),
    *(model.check_context_parallel, files.check_data, agent_names.check_agent_names),
    *(agent_names.check_own_loops_run, agent_names.check_fields, batches.check_lengths),
    *(batches.check_training_sequence, files.check_reward_function, resuming.check_resume),
    *(files.check_folder, files.check_steps, hosts.check_joined, devices.check_resources),
    *(
        devices.check_visible_devices,
        devices.check_devices,
        devices.check_cores,
        modes.check_standalone_pool,
        modes.check_reward_model,
    ),
    *(devices.check_trainer_parallel, devices.check_rollout_parallel, model.check_model_division),
    *(batches.check_train_batch, batches.check_mini_batch, batches.check_queue_room),
    *(devices.check_cpu_engines, devices.check_memory),
)


# Those that a plan depends on; the others concern the run alone, or the machine that starts it.
OF_A_PLAN: tuple[Check, ...] = (
    *(modes.check_mode, modes.check_seamless, devices.check_resources, devices.check_trainer_parallel),
    *(devices.check_rollout_parallel, model.check_model_division, devices.check_memory),
)

# Those that concern the machine that starts the run, with what each finds out. They are left out where a run for
# machines with accelerators is checked without one.
OF_THIS_MACHINE: Mapping[Check, str] = {
    hosts.check_versions: "installed versions",
    hosts.check_stack: "installed versions",
    hosts.check_adapters_of_te: "installed versions",
    model.check_layers: "Transformer Engine",
    hosts.check_loggers: "the loggers' packages",
    gateway.check_port: "free ports",
    gateway.check_journal: "the journal's file",
    gateway.check_traces: "the exporters of traces",
    resuming.check_resume: "the checkpoint to resume from",
    files.check_folder: "the checkpoint folder",
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
        ConfigErrors: every problem that is more than a warning.
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
    needed = [check for check in OF_A_PLAN if stated or check is not devices.check_memory]
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
    """The warnings as text; ConfigErrors where a problem is more than a warning."""
    fatal = [problem for problem in problems if not problem.warning]
    if fatal:
        raise ConfigErrors(*fatal)
    return [str(problem) for problem in problems]


def find_problems(settings: Settings, checks: Sequence[Check] = CHECKS) -> list[Problem]:
    """All problems and warnings, in the order of the checks, one for each key, value and reason."""
    found: dict[tuple[str, str, str], Problem] = {}
    for check in checks:
        for problem in check(settings):
            found.setdefault((problem.key, str(problem.value), problem.reason), problem)
    return list(found.values())
