"""Where a run saves: it alone, and nothing half-written stays there after it.

`python -m seamless_verl.main_ppo`: verl's main job with one more trainer mode and one more platform.

Hydra reads verl's own `ppo_trainer` config and ours. Settings that cannot work are refused within
seconds, before anything heavy is imported, with exit code 2 and one message. The job itself runs
in a child process of a supervisor that leaves nothing behind.
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
from seamless_verl.config.checks.files import ELSEWHERE, FOLDER, IN_USE
from seamless_verl.config.checks.modes import VERL_MODES
from seamless_verl.config.composing import composing, remove_run_folder
from seamless_verl.errors import ConfigError, refusing
from seamless_verl.platform.detect import on_cpu, prepare
from seamless_verl.runtime.checkpoint_cleanup import RUN_FILE, Leftovers, announce, discard_partial, refreshing
from seamless_verl.runtime.locks import only_writer
from seamless_verl.runtime.supervisor import joins_cluster, logs_belong_in, supervise


def stays(config: DictConfig) -> bool:
    """Whether what is written is on this machine, as far as it can be told."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    joins = joins_cluster(os.environ | ({"RAY_ADDRESS": address} if address else {}))
    return not joins and "://" not in config.trainer.default_local_dir


@contextmanager
def writing_alone(config: DictConfig) -> Iterator[None]:
    """Meanwhile no other run writes into this one's folder: ConfigError where one does already."""
    folder = config.trainer.default_local_dir
    writes = config.trainer.save_freq > 0 or config.trainer.v1.trainer_mode not in VERL_MODES
    with ExitStack() as held:
        try:
            if writes and stays(config):
                held.enter_context(only_writer(Path(folder)))
        except BlockingIOError:  # it began since this one was checked
            raise ConfigError(FOLDER, folder, IN_USE, ELSEWHERE) from None
        yield


def announce_checkpoints(config: DictConfig) -> None:
    """Let the supervisor remove what this run leaves half-written.

    Not in a cluster that goes on without this run: whether a save still goes on there it cannot tell.
    """
    if config.trainer.save_freq > 0 and stays(config):
        left = announce(
            config.trainer.default_local_dir,
            async_save=bool(config.actor_rollout_ref.actor.checkpoint.get("async_save", False)),
            seamless=config.trainer.v1.trainer_mode not in VERL_MODES,
        )
        tell(left, "an earlier run was killed")


def tidy_checkpoints(run_file: Path) -> None:
    """In the supervisor, when every process of the run is gone."""
    try:
        left = discard_partial(run_file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"A half-written checkpoint may be left: {error}\n")
        return
    tell(left, "the run ended")


def tell(left: Leftovers, end: str) -> None:
    for folder in left.removed:
        sys.stderr.write(f"Removed {folder}: {end} while it was written\n")
    for folder in left.spoilt:
        sys.stderr.write(f"{folder} is not whole: {end} while it was written anew\n")


SUPERVISED = "SEAMLESS_SUPERVISED"
PLATFORM = "SEAMLESS_PLATFORM"  # the choice among config/platform/, by default
logger = logging.getLogger(__name__)


@refusing
def main() -> int:
    """Supervise a child that trains, or train when this is that child."""
    run_file = os.environ.pop(SUPERVISED, None)
    if run_file is None:
        command = [sys.executable, *sys.orig_argv[1:]]  # the same again, python's own options included
        # The CPU platform's config declares the devices of a cluster of its own.
        return supervise(command, marker=SUPERVISED, afterwards=tidy_checkpoints, alone=on_cpu())
    os.environ[RUN_FILE] = run_file  # for our trainer, in an actor
    compose_and(run)
    return 0


def compose_and(run: Callable[[DictConfig], object]) -> None:
    """Raises ConfigError for what hydra cannot compose; what it can has its end in `run_or_refuse`."""
    import hydra

    register_search_path()
    os.environ.setdefault(PLATFORM, "cpu" if on_cpu() else "accelerator")
    with composing(sys.argv[1:]) as begin:

        def job(config: DictConfig) -> None:
            begin()
            run_or_refuse(run, config)

        hydra.main(config_path=None, config_name="seamless_ppo_trainer", version_base=None)(job)()


def run_or_refuse(run: Callable[[DictConfig], object], config: DictConfig) -> None:
    """Run the job; a setting that cannot work ends the process with code 2, Ctrl-C with 130."""
    try:
        run(config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        discard_run_folder()
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def discard_run_folder() -> None:
    """Remove what hydra made for a run that did not begin."""
    if (folder := run_folder()) is not None:
        remove_run_folder(folder)


def run_folder() -> Path | None:
    """Where hydra has the settings and the log of this run; None when it did not compose the config."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir) if HydraConfig.initialized() else None


def run(config: DictConfig) -> None:
    seamless = check(config)
    if uses_cpu(config):
        devices = seamless.cpu.device_count
        prepare(os.environ, cores=os.sched_getaffinity(0), devices=devices, pin=seamless.cpu.pin)
    with writing_alone(config):
        announce_checkpoints(config)
        if RUN_FILE in os.environ and (folder := run_folder()) is not None:
            logs_belong_in(folder, Path(os.environ[RUN_FILE]))
        try:
            with refreshing():
                train(config)
        finally:
            stop_ray()
    if seamless.plot:
        show_curve(config)


def check(config: DictConfig, *, unmade: bool = False) -> SeamlessConfig:
    """Complete a config by its tags, refuse one that cannot work, and say what may not.

    `unmade`: data and models that are not there may come yet, and nothing is said of them.
    """
    cpu, seamless = uses_cpu(config), SeamlessConfig.parse(config.get("seamless"))
    adopt_resources(config, command_line())
    adopt_parsers(config)
    devices = seamless.cpu.device_count if cpu else None
    warnings = preflight(config, devices=devices, accelerator=not cpu, unmade=unmade)
    for warning in () if unmade else warnings:
        logger.warning(warning)
    return seamless


def command_line() -> list[str]:
    """The overrides that hydra was given; none when it did not compose the config."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def uses_cpu(config: DictConfig) -> bool:
    """Whether the config is one for the CPU platform, which alone runs where there is no accelerator."""
    device = config.trainer.device
    if device != "cpu" and on_cpu():
        way_out = "Add platform=cpu, or +platform=cpu when the config is not built on seamless_ppo_trainer"
        raise ConfigError("trainer.device", device, "there is no accelerator here", way_out)
    return bool(device == "cpu")


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
    """Shut down the Ray that this process started or joined, if it came that far."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


def show_curve(config: DictConfig) -> None:
    from seamless_verl.trainer.validation_curve import ValidationCurve, text_plot

    sys.stdout.write(text_plot(ValidationCurve.beside(config.trainer.default_local_dir).points()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
