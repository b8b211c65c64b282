"""`python -m seamless_verl.main_ppo`: verl's main job with one more trainer mode and one more platform.

Hydra reads verl's own `ppo_trainer` config and ours. Settings that cannot work are refused within
seconds, before anything heavy is imported, with exit code 2 and one message. The job itself runs
in a child process of a supervisor that leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from omegaconf import DictConfig

from seamless_verl.config import SeamlessConfig, preflight, register_search_path
from seamless_verl.config.checks.modes import VERL_MODES
from seamless_verl.errors import ConfigError
from seamless_verl.platform.detect import on_cpu
from seamless_verl.platform.environment import prepare
from seamless_verl.supervisor import supervise
from seamless_verl.trainer.partial import CheckpointsBefore

SUPERVISED = "SEAMLESS_SUPERVISED"
CPU_GROUP = "platform=cpu"
logger = logging.getLogger(__name__)


def main() -> int:
    """Supervise a child that trains, or train when this is that child."""
    if os.environ.pop(SUPERVISED, None) is None:
        return supervise([sys.executable, "-m", "seamless_verl.main_ppo", *sys.argv[1:]], marker=SUPERVISED)
    import hydra

    register_search_path()
    if on_cpu():
        sys.argv = with_cpu_group(sys.argv)
    hydra.main(config_path=None, config_name="seamless_ppo_trainer", version_base=None)(run_or_refuse)()
    return 0


def with_cpu_group(arguments: list[str]) -> list[str]:
    """The command line with the CPU platform's config group, among the user's own overrides.

    Beside the first of them, since hydra's parser takes all overrides from one place.
    """
    if any(argument.lstrip("+") == CPU_GROUP for argument in arguments):
        return arguments
    overrides = (i for i, a in enumerate(arguments) if i and "=" in a and not a.startswith("-"))
    place = next(overrides, len(arguments))
    return [*arguments[:place], f"+{CPU_GROUP}", *arguments[place:]]


def run_or_refuse(config: DictConfig) -> None:
    """Run the job; a setting that cannot work ends the process with code 2, Ctrl-C with 130."""
    try:
        run(config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def run(config: DictConfig) -> None:
    cpu, seamless = on_cpu(), SeamlessConfig.parse(config.get("seamless"))
    devices = seamless.cpu.device_count if cpu else None
    for warning in preflight(config, devices=devices, accelerator=not cpu):
        logger.warning(warning)
    if devices is not None:
        prepare(os.environ, cores=os.sched_getaffinity(0), devices=devices, pin=seamless.cpu.pin)
    before = CheckpointsBefore.of(config.trainer.default_local_dir)
    try:
        train(config)
    except BaseException:
        stop_ray()
        if not config.actor_rollout_ref.actor.checkpoint.get("async_save", False):
            before.discard_partial()
        raise
    finally:
        stop_ray()
    if seamless.plot:
        show_curve(config)


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
    from seamless_verl.trainer.curve import ValidationCurve, text_plot

    sys.stdout.write(text_plot(ValidationCurve.beside(config.trainer.default_local_dir).points()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
