"""The actor that runs the training: verl's, after it has learned the name of our trainer."""

from __future__ import annotations

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1

from seamless_verl.trainer.host import plain_class


class SeamlessTaskRunner(plain_class(TaskRunnerV1)):  # type: ignore[misc]
    """verl's task runner for the `seamless` trainer."""

    def run(self, config: DictConfig) -> None:
        """Train to the end; the trainer registers itself as it is imported, in this process alone."""
        import seamless_verl.trainer.trainer  # noqa: F401

        super().run(config)


def task_runner_class() -> type:
    """What verl's `run_ppo` starts."""
    return ray.remote(SeamlessTaskRunner)  # type: ignore[no-any-return]
