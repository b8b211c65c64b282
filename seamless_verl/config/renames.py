"""What was renamed in settings: old keys, old values and old dotted names of code, each with the new one."""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS: Mapping[str, str] = {
    "seamless.handover=shared": "seamless.handover=resident",
}
"""An old key, or an old `key=value`, of the `seamless:` node."""

CODE: Mapping[str, str] = {
    "seamless_verl.trainer.data_plane.agent_loop": "seamless_verl.agent_loops.loops",
    "seamless_verl.trainer.data_plane.loops": "seamless_verl.agent_loops.worker",
    "seamless_verl.trainer.replica.scheduler": "seamless_verl.replica.scheduler",
    "seamless_verl.platform.zygote": "seamless_verl.platform.forkserver",
}
"""Modules that a setting or a file of agent loops may name; the names in them stayed."""


def renamed_code(text: str) -> str | None:
    """The text with the new name in place of an old one; None when it has no old one."""
    return next((text.replace(old, new) for old, new in CODE.items() if old in text), None)
