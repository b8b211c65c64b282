"""What a run leaves out when it joins a Ray cluster: the cluster's own settings, and what needs raylets of the run.

Ray refuses `num_cpus` and its like when a cluster exists already. The CPU platform sets them for the cluster that a
run starts, so they are taken back here; those that the user has set are refused by name. The command by which the CPU
platform starts workers reads variables that only the raylets of a run's own cluster have.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.roles import joins_cluster
from seamless_verl.config.settings import Problem, Settings, check

RAY_INIT = "ray_kwargs.ray_init"
# Ray 2.60, `ray.init`: refused when the cluster exists; what `ray start` has for each.
OF_THE_CLUSTER = {
    "num_cpus": "--num-cpus",
    "num_gpus": "--num-gpus",
    "resources": "--resources",
    "labels": "--labels",
    "object_store_memory": "--object-store-memory",
}
COMMAND = f"{RAY_INIT}.runtime_env.py_executable"
PIN_VARIABLE = f"{RAY_INIT}.runtime_env.env_vars.SEAMLESS_CPU_PIN"  # as platform/cores.py names it


def adopt_cluster(config: DictConfig, overrides: Sequence[str] = ()) -> None:
    """Take back what the CPU platform has set for a cluster of the run's own, if the run joins one.

    `overrides` are the command line's: what they name stays. Workers of a cluster are started anew, and pinned to no
    core: which cores a node has, only the node knows.
    """
    cpu = OmegaConf.select(config, "trainer.device") == "cpu"
    settings = Settings.of(config, devices=None, accelerator=not cpu)
    if not cpu or not joins_cluster(settings):
        return
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    for key in (*(f"{RAY_INIT}.{name}" for name in OF_THE_CLUSTER), COMMAND):
        if key not in named and settings.get(key) is not None:
            OmegaConf.update(config, key, None, force_add=True)
    if PIN_VARIABLE not in named:
        OmegaConf.update(config, PIN_VARIABLE, "0", force_add=True)


@check
def check_joined(settings: Settings) -> list[Problem]:
    """A run that joins a cluster sets nothing of it."""
    if not joins_cluster(settings):
        return []
    reason = "is a setting of the cluster, and this run joins one that exists"
    given = {name: settings.get(f"{RAY_INIT}.{name}") for name in OF_THE_CLUSTER}
    return [
        Problem(f"{RAY_INIT}.{name}", value, reason, f"Remove it, or start the nodes with ray start {option}")
        for name, option in OF_THE_CLUSTER.items()
        if (value := given[name]) is not None
    ]
