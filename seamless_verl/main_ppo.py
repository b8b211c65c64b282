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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config import SeamlessConfig, preflight, register_search_path
from seamless_verl.config.adopting import adopt_parsers, adopt_resources
from seamless_verl.config.checks.files import FOLDER, IN_USE, USE_ANOTHER
from seamless_verl.config.checks.modes import VERL_MODES
from seamless_verl.config.composing import composing, remove_run_folder
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.platform.detect import on_cpu, set_cpu_environment
from seamless_verl.runtime.checkpoint_cleanup import (
    RUN_FILE,
    CleanupReport,
    clean_up_run,
    refreshing_marker,
    register_run,
)
from seamless_verl.runtime.locks import only_writer
from seamless_verl.runtime.supervisor import joins_cluster, set_log_folder, supervise

SUPERVISED = "SEAMLESS_SUPERVISED"
PLATFORM = "SEAMLESS_PLATFORM"  # the choice among config/platform/, by default
logger = logging.getLogger(__name__)


@exits_on_config_error
def main() -> int:
    """Supervise a child that trains, or train when this is that child."""
    run_file = os.environ.pop(SUPERVISED, None)
    if run_file is None:
        command = [sys.executable, *sys.orig_argv[1:]]  # the same again, python's own options included
        # The CPU platform's config declares the devices of a cluster of its own.
        return supervise(
            command, run_file_variable=SUPERVISED, on_exit=clean_up_checkpoints, ignore_local_cluster=on_cpu()
        )
    os.environ[RUN_FILE] = run_file  # for our trainer, in an actor
    compose_and_run(run)
    return 0


def compose_and_run(job: Callable[[DictConfig], object]) -> None:
    """Compose the command line's config, and call `job` with it.

    Raises:
        ConfigError: hydra cannot compose it. A ConfigError of the job ends the process (`run_or_refuse`).
    """
    import hydra

    register_search_path()
    os.environ.setdefault(PLATFORM, "cpu" if on_cpu() else "accelerator")
    with composing(sys.argv[1:]) as begin:

        def composed(config: DictConfig) -> None:
            begin()
            run_or_refuse(job, config)

        hydra.main(config_path=None, config_name="seamless_ppo_trainer", version_base=None)(composed)()


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


def run_folder() -> Path | None:
    """Where hydra has the settings and the log of this run; None when it did not compose the config."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir) if HydraConfig.initialized() else None


def command_line() -> list[str]:
    """The overrides that hydra was given; none when it did not compose the config."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def check(config: DictConfig, *, unmade: bool = False) -> SeamlessConfig:
    """Complete a config by its tags, refuse one that cannot work, and log a warning for what may not.

    With `unmade`, missing data and models are expected to be made before the run, and no warnings are logged.

    Raises:
        ConfigError: a setting cannot work.
    """
    cpu, seamless = uses_cpu(config), SeamlessConfig.parse(config.get("seamless"))
    adopt_resources(config, command_line())
    adopt_parsers(config)
    devices = seamless.cpu.device_count if cpu else None
    warnings = preflight(config, devices=devices, accelerator=not cpu, unmade=unmade)
    for warning in () if unmade else warnings:
        logger.warning(warning)
    return seamless


def uses_cpu(config: DictConfig) -> bool:
    """Whether the config is one for the CPU platform, the only one that runs where there is no accelerator.

    Raises:
        ConfigError: it is for an accelerator, and there is none.
    """
    device = config.trainer.device
    if device != "cpu" and on_cpu():
        way_out = "Add platform=cpu, or +platform=cpu when the config is not built on seamless_ppo_trainer"
        raise ConfigError("trainer.device", device, "there is no accelerator here", way_out)
    return bool(device == "cpu")


def run(config: DictConfig) -> None:
    """Check the config, then train; with `seamless.plot`, plot the validation curve at the end."""
    seamless = check(config)
    if uses_cpu(config):
        devices = seamless.cpu.device_count
        set_cpu_environment(os.environ, cores=os.sched_getaffinity(0), devices=devices, pin=seamless.cpu.pin)
    with exclusive_checkpoint_folder(config):
        register_checkpoints(config)
        if RUN_FILE in os.environ and (folder := run_folder()) is not None:
            set_log_folder(folder, Path(os.environ[RUN_FILE]))
        try:
            with refreshing_marker():
                train(config)
        finally:
            stop_ray()
    if seamless.plot:
        plot_validation_curve(config)


def train(config: DictConfig) -> None:
    """What `verl.trainer.main_ppo` does, with our task runner for our trainer."""
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, TaskRunnerV1 if config.trainer.v1.trainer_mode in VERL_MODES else our_task_runner())


def our_task_runner() -> Any:
    from seamless_verl.trainer.task_runner import task_runner_class

    return task_runner_class()


def stop_ray() -> None:
    """Shut down the Ray that this process started or joined, if it imported Ray at all."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


def plot_validation_curve(config: DictConfig) -> None:
    from seamless_verl.trainer.validation_curve import ValidationCurve, text_plot

    sys.stdout.write(text_plot(ValidationCurve.beside(config.trainer.default_local_dir).points()) + "\n")


def writes_locally(config: DictConfig) -> bool:
    """Whether checkpoints are written on this machine by processes of this run, as far as the settings show."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    joins = joins_cluster(os.environ | ({"RAY_ADDRESS": address} if address else {}))
    return not joins and "://" not in config.trainer.default_local_dir


@contextmanager
def exclusive_checkpoint_folder(config: DictConfig) -> Iterator[None]:
    """In the block, no other run writes into this one's checkpoint folder.

    Raises:
        ConfigError: another run writes there already.
    """
    folder = config.trainer.default_local_dir
    writes = config.trainer.save_freq > 0 or config.trainer.v1.trainer_mode not in VERL_MODES
    with ExitStack() as lock:
        try:
            if writes and writes_locally(config):
                lock.enter_context(only_writer(Path(folder)))
        except BlockingIOError:  # it began since this one was checked
            raise ConfigError(FOLDER, folder, IN_USE, USE_ANOTHER) from None
        yield


def register_checkpoints(config: DictConfig) -> None:
    """Let the supervisor remove checkpoints that this run leaves incomplete; first clean up after killed runs.

    Not in a cluster that outlives this run: the supervisor cannot see whether a save still runs there.
    """
    if config.trainer.save_freq > 0 and writes_locally(config):
        report = register_run(
            config.trainer.default_local_dir,
            async_save=bool(config.actor_rollout_ref.actor.checkpoint.get("async_save", False)),
            seamless=config.trainer.v1.trainer_mode not in VERL_MODES,
        )
        print_cleanup(report, "an earlier run was killed")


def clean_up_checkpoints(run_file: Path) -> None:
    """In the supervisor, when every process of the run is gone."""
    try:
        report = clean_up_run(run_file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"An incomplete checkpoint may be left: {error}\n")
        return
    print_cleanup(report, "the run ended")


def print_cleanup(report: CleanupReport, cause: str) -> None:
    for folder in report.removed:
        sys.stderr.write(f"Removed {folder}: {cause} while it was written\n")
    for folder in report.overwritten:
        sys.stderr.write(f"{folder} is incomplete: {cause} while it was overwritten\n")


if __name__ == "__main__":
    sys.exit(main())
