"""`python -m seamless_verl.main_ppo`: verl's main job with one more trainer mode and one more platform.

Hydra reads verl's own `ppo_trainer` config and ours. Settings that cannot work are refused within seconds, before
anything heavy is imported, with exit code 2 and one message. The job itself runs in a child process of a supervisor
that leaves nothing behind. Only one run at a time writes into a checkpoint folder, and no incomplete checkpoint stays
in it after the run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config import SeamlessConfig, preflight, register_search_path
from seamless_verl.config.adopting import adopt, adopt_handover
from seamless_verl.config.composing import composing, for_hydra, remove_run_folder
from seamless_verl.config.on_faith import on_faith
from seamless_verl.config.settings import Settings, resolved_tree
from seamless_verl.config.verl_keys import ENGINE, MODE_KEY, VERL_MODES, chosen_engine
from seamless_verl.errors import ConfigError, exits_on_config_error, refuse
from seamless_verl.platform.detect import can_only_be_cpu, on_cpu, set_cpu_environment, usual_platform
from seamless_verl.run_folder import (
    clean_up,
    exclusive_checkpoint_folder,
    register_admin_files,
    register_checkpoints,
    register_resume,
    viewing,
)
from seamless_verl.runtime.checkpoint_cleanup import refreshing_marker
from seamless_verl.runtime.console import RUN_FILE, keep_cause, last_screen, lines_shown, say
from seamless_verl.runtime.supervisor import set_log_folder, supervise

SUPERVISED = "SEAMLESS_SUPERVISED"
TASK_RECORDS = (
    "RAY_task_events_max_num_task_in_gcs",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs",
)
"""How many ended tasks the GCS of a cluster that our trainer starts remembers, and how many it knows to have forgotten.
Ray's defaults are 100,000 and 1,000,000, with which it grew for as long as anybody looked."""
PLATFORM = "SEAMLESS_PLATFORM"  # the choice among config/platform/, by default
OUR_CONFIG = "seamless_ppo_trainer"
OTHER_CONFIG = (
    "--config-name: this config is not built on seamless_ppo_trainer, so verl's own trainer runs. Leave --config-name "
    "and --config-path out for the seamless trainer; now it is trainer.v1.trainer_mode="
)
UNKNOWN_HERE = "is not built on seamless_ppo_trainer, whose settings the seamless trainer needs"
BUILD_ON_OURS = (
    "Leave --config-name and --config-path out, or put seamless_ppo_trainer into the defaults of your config"
)
CHOSEN_CPU = (
    "RAY_ADDRESS=%s: the torch that is installed here is built without accelerators, so this run is on the CPU "
    "platform, and what the nodes count as GPU are its devices. VERL_PLATFORM names another"
)
logger = logging.getLogger(__name__)


@exits_on_config_error
def main() -> int:
    """Supervise a child that trains, or train when this is that child."""
    run_file = os.environ.pop(SUPERVISED, None)
    if run_file is None:
        return supervise_run([sys.executable, *sys.orig_argv[1:]])  # the same again, python's own options included
    os.environ[RUN_FILE] = run_file  # for our trainer, in an actor
    compose_and_run(run)
    return 0


def supervise_run(command: Sequence[str]) -> int:
    """Run the child and clean up after it; of a run that ended early write the last screen. Returns the exit code."""
    lines = list[str]()
    # The CPU platform's config declares the devices of a cluster of its own.
    code = supervise(
        command,
        run_file_variable=SUPERVISED,
        on_exit=clean_up,
        on_end=lambda run_file: lines.extend(last_screen(run_file)),
        ignore_local_cluster=on_cpu(),
    )
    for line in lines if code not in (0, 2) else ():
        say(line)
    return code


def compose_and_run(job: Callable[[DictConfig], object]) -> None:
    """Compose the command line's config, and call `job` with it.

    Raises:
        ConfigError: hydra cannot compose it. A ConfigError of the job ends the process (`run_or_refuse`).
    """
    register_search_path()
    os.environ.setdefault(PLATFORM, usual_platform())
    sys.argv[1:] = for_hydra(sys.argv[1:])
    compose(sys.argv[1:], lambda config: run_or_refuse(job, config))


def compose(arguments: list[str], job: Callable[[DictConfig], object]) -> None:
    """Call `job` with the config of a command line; ConfigError when hydra cannot compose it."""
    import hydra

    with composing(arguments) as begin:

        def composed(config: DictConfig) -> None:
            begin()
            job(config)

        before, sys.argv[1:] = sys.argv[1:], arguments
        try:
            hydra.main(config_path=None, config_name=OUR_CONFIG, version_base=None)(composed)()
        finally:
            sys.argv[1:] = before


def run_or_refuse(job: Callable[[DictConfig], object], config: DictConfig) -> None:
    """Run the job; a setting that cannot work ends the process with code 2, Ctrl-C with 130."""
    try:
        job(config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        if (folder := run_folder()) is not None:
            remove_run_folder(folder)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        keep_cause(error)
        raise


def run_folder() -> Path | None:
    """Where hydra has the settings and the log of this run; None when it did not compose the config."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir) if HydraConfig.initialized() else None


def config_name() -> str | None:
    """The config that hydra composed; None when it composed none."""
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get().job.config_name if HydraConfig.initialized() else None


def command_line() -> list[str]:
    """The overrides that hydra was given; none when it did not compose the config."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return []
    # An override with an interpolation is text here, which only the whole config could resolve.
    return [str(text) for text in OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)]


def check(config: DictConfig, *, unmade: bool = False, anywhere: bool = False) -> SeamlessConfig:
    """Complete a config by its tags, refuse one that cannot work, and log a warning for what may not.

    With `unmade`, missing data and models are expected to be made before the run, and no warning is about them. With
    `anywhere`, a config for accelerators may be checked without one: a warning then says what is not checked.

    Raises:
        ConfigError: a setting cannot work.
    """
    return check_overrides(config, command_line(), unmade=unmade, anywhere=anywhere)


def check_overrides(
    config: DictConfig, overrides: Sequence[str], *, unmade: bool = False, anywhere: bool = False
) -> SeamlessConfig:
    """The same for a config that was made with these overrides."""
    mode = OmegaConf.select(config, MODE_KEY)
    unknown = ConfigError("--config-name", config_name(), UNKNOWN_HERE, BUILD_ON_OURS)
    if mode is None and "seamless" not in config:  # of another program of verl's, or of another release
        raise unknown
    mistakes, warnings, chosen = list[ConfigError](), list[str](), None
    if lacks_accelerator(config) and not anywhere:
        mistakes.append(no_accelerator(config))
    if "seamless" not in config and mode not in VERL_MODES:
        mistakes.append(unknown)
    try:
        seamless = SeamlessConfig.parse(resolved_tree(config).get("seamless"))
        warnings, chosen = complete_and_check(config, seamless, overrides, unmade=unmade)
    except ConfigError as error:
        mistakes += error.mistakes
    refuse(mistakes)
    if "seamless" not in config:
        warnings.insert(0, f"{OTHER_CONFIG}{mode}")
    for warning in warnings:
        logger.warning(warning)
    handover = adopt_handover(config)
    engine = engine_of_ours(config, overrides)
    faith = None if unmade else on_faith(Settings.of(config, devices=None, accelerator=not uses_cpu(config)))
    for choice in () if unmade else (engine, chosen, None if anywhere else handover, faith):
        if choice is not None:
            logger.info(choice)
    return seamless


def engine_of_ours(config: DictConfig, overrides: Sequence[str]) -> str | None:
    """In words the engine that our config chose, where neither the command line nor a config file names one.

    A config file may, so it is not said with one. On the CPU platform there is no other engine.
    """
    if config_name() != OUR_CONFIG or uses_cpu(config):
        return None
    return chosen_engine(str(config.get(ENGINE)), overrides)


def complete_and_check(
    config: DictConfig, seamless: SeamlessConfig, overrides: Sequence[str], *, unmade: bool
) -> tuple[list[str], str | None]:
    """Set what follows from the settings, and refuse what cannot work; else the warnings, and which loss was chosen."""
    chosen = adopt(config, overrides)
    cpu = uses_cpu(config)
    devices, elsewhere = seamless.cpu.device_count if cpu else None, lacks_accelerator(config)
    return preflight(config, devices=devices, accelerator=not cpu, unmade=unmade, elsewhere=elsewhere), chosen


def uses_cpu(config: DictConfig) -> bool:
    """Whether the config is one for the CPU platform, the only one that runs where there is no accelerator."""
    return bool(OmegaConf.select(config, "trainer.device") == "cpu")


def lacks_accelerator(config: DictConfig) -> bool:
    """Whether the config is one for accelerators, and this machine has none."""
    return not uses_cpu(config) and on_cpu()


def no_accelerator(config: DictConfig) -> ConfigError:
    way_out = (
        "Add platform=cpu, or +platform=cpu when the config is not built on seamless_ppo_trainer; "
        "`python -m seamless_verl.check --platform accelerator` checks it for other machines"
    )
    key = "trainer.device"
    return ConfigError(key, OmegaConf.select(config, key), "there is no accelerator here", way_out)


def run(config: DictConfig) -> None:
    """Check the config, then train, and plot the validation curve at the end."""
    seamless = check(config)
    if uses_cpu(config):
        if can_only_be_cpu():
            logger.warning(CHOSEN_CPU, os.environ["RAY_ADDRESS"])
        devices = seamless.cpu.device_count
        set_cpu_environment(os.environ, cores=os.sched_getaffinity(0), devices=devices, pin=seamless.cpu.pin)
    with exclusive_checkpoint_folder(config):
        register_checkpoints(config)
        register_resume(config)
        register_admin_files(config, seamless)
        if RUN_FILE in os.environ and (folder := run_folder()) is not None:
            set_log_folder(folder, Path(os.environ[RUN_FILE]))
        try:
            with refreshing_marker(), shown(config, seamless), lines_shown():
                train(config)
        finally:
            stop_ray()
    if config.trainer.v1.trainer_mode not in VERL_MODES:  # these keep no metrics
        plot_validation_curve(config)


def shown(config: DictConfig, seamless: SeamlessConfig) -> AbstractContextManager[None]:
    """In the block, the run's view is served, if it is enabled."""
    address = seamless.view_address
    return viewing(Path(config.trainer.default_local_dir), *address) if address else nullcontext()


def train(config: DictConfig) -> None:
    """What `verl.trainer.main_ppo` does, with our task runner for our trainer."""
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    OmegaConf.resolve(config)  # where the command runs: Ray's workers may have another environment
    if config.trainer.v1.trainer_mode in VERL_MODES:
        run_ppo(config, TaskRunnerV1)
        return
    for variable in TASK_RECORDS:
        os.environ.setdefault(variable, "20000")
    from ray.exceptions import RayTaskError

    from seamless_verl.runtime.actor_death import ACTOR_GONE
    from seamless_verl.trainer.task_runner import PlacedTaskRunner

    runner = PlacedTaskRunner(config)
    try:
        run_ppo(config, runner)
    except ACTOR_GONE as error:
        if isinstance(error, RayTaskError):  # raised by the task runner, which lives
            raise
        raise runner.lost(error) from error


def stop_ray() -> None:
    """Shut down the Ray that this process started or joined, if it imported Ray at all."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


def plot_validation_curve(config: DictConfig) -> None:
    from seamless_verl.runtime.step_metrics import StepMetrics
    from seamless_verl.trainer.step_log import validation_plot

    if plot := validation_plot(StepMetrics.beside(config.trainer.default_local_dir).rows()):
        sys.stdout.write(plot + "\n")


if __name__ == "__main__":
    sys.exit(main())
