"""The check of CUDA_VISIBLE_DEVICES, and how many devices there are by it. In a cluster each machine has its own."""

from __future__ import annotations

import os

from seamless_verl.config.roles import joins_cluster, starts_cluster
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.resources.visible_devices import (
    ORDER,
    PCI,
    VARIABLE,
    installed_devices,
    order_problem,
    visible_devices,
)


@check
def check_visible_devices(settings: Settings) -> list[Problem]:
    """CUDA_VISIBLE_DEVICES names whole devices of this machine, and each of them by itself."""
    installed = installed_devices()
    if not settings.host.accelerator or joins_cluster(settings) or not installed:
        return []
    value, order = os.environ.get(VARIABLE), os.environ.get(ORDER)
    visible_devices(installed, value)
    reason = order_problem(installed, value, order)
    return [] if reason is None else [Problem(ORDER, order, reason, f"Set {ORDER}={PCI}", warning=True)]


def available_devices(settings: Settings) -> int | None:
    """All devices that there are, None where only a running cluster, or an autoscaling one, knows."""
    if joins_cluster(settings):
        return None
    alone = starts_cluster(settings) and settings.get("ray_kwargs.ray_init.num_gpus") is None
    if settings.host.devices is not None or not settings.host.accelerator or not alone:
        return settings.host.devices
    installed = installed_devices()
    return len(visible_devices(installed, os.environ.get(VARIABLE))) if installed else None


def of_list(settings: Settings) -> str:
    """The list by which devices are left out, for a message; empty where there is none."""
    value = os.environ.get(VARIABLE) if settings.host.accelerator else None
    return "" if value is None else f" in {VARIABLE}={value}"
