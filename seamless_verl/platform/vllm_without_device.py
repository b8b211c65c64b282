"""vLLM in a process on a node without a device, as the gateway's on the head of a cluster.

vLLM makes no configuration without a device, also where none is used: not even the parser of its options.
"""

from __future__ import annotations

from vllm.platforms import current_platform


def take_host_for_device() -> None:
    """Has vLLM take the host for its device where it found none; elsewhere nothing is changed."""
    if not current_platform.device_type:
        current_platform.device_type = "cpu"
