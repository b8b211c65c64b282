"""vLLM's entry points into this package, which vLLM calls in each of its processes.

`vllm.platform_plugins` names `host_platform`, and `vllm.general_plugins` names `register`. On an accelerator neither
has an effect, and nothing is imported.
"""

from __future__ import annotations

import os

CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"
HOST_PLATFORM = "seamless_verl.platform.vllm.platform.HostPlatform"


def host_platform() -> str | None:
    """Return the name of our platform class where vLLM itself finds a CPU build, None elsewhere."""
    from vllm.platforms import cpu_platform_plugin

    return HOST_PLATFORM if cpu_platform_plugin() == CPU_PLATFORM else None


def register() -> None:
    """Let a vLLM process on the host run under verl; may be called again.

    Raises:
        HostMovedError: vLLM has moved what an adaptation touches.
        ConfigError: devices were given to a vLLM that did not choose our platform class.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from seamless_verl.platform.vllm.weights import keep_weights
    from seamless_verl.platform.without_torchvision import take_images_without_torchvision

    refuse_foreign_platform(current_platform)
    keep_weights()
    take_images_without_torchvision()


def refuse_foreign_platform(platform: object) -> None:
    """Fail where another CPU platform class would leave the workers unpinned.

    Raises:
        ConfigError: this process was given devices, and `platform` is not ours.
    """
    from seamless_verl.errors import ConfigError
    from seamless_verl.platform.cores import VISIBLE_DEVICES

    found = f"{type(platform).__module__}.{type(platform).__qualname__}"
    if VISIBLE_DEVICES not in os.environ or found == HOST_PLATFORM:
        return
    reason = f"vLLM chose {found}, which would not keep to these devices"
    way_out = "Unset VLLM_TARGET_DEVICE and VLLM_PLUGINS, uninstall zentorch, or reinstall seamless-verl"
    raise ConfigError(VISIBLE_DEVICES, os.environ[VISIBLE_DEVICES], reason, way_out)
