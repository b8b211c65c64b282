"""The `seamless:` node, its defaults beside verl's, and the checks that a run passes before it starts."""

from __future__ import annotations

from seamless_verl.config.checks import preflight
from seamless_verl.config.composing import register_search_path
from seamless_verl.config.schema import CpuConfig, GatewayConfig, SeamlessConfig, usable_cores
from seamless_verl.resources.tags import Layout

__all__ = [
    "CpuConfig",
    "GatewayConfig",
    "Layout",
    "SeamlessConfig",
    "preflight",
    "register_search_path",
    "usable_cores",
]
