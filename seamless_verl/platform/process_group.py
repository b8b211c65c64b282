"""verl's default process group on the host: gloo, named once."""

from __future__ import annotations

from seamless_verl.platform.adaptation import Adaptation

DEFAULT_BACKEND = Adaptation(
    "verl-default-backend",
    "verl.utils.distributed:initialize_global_process_group_ray",
    "verl 0.9.1",
    'it asks torch for "cpu:gloo,<device>:<backend>", which names the host twice and is refused',
    "(timeout_second=None, backend=None)",
)


def default_to_gloo() -> None:
    """Make "cpu:gloo" the default of verl's process group, for importers by name as well.

    Raises:
        HostMovedError: verl starts its process group in some other way now.
    """
    function = DEFAULT_BACKEND.find()
    if function.__defaults__ != (None, "cpu:gloo"):  # type: ignore[attr-defined]
        DEFAULT_BACKEND.verify()
        function.__defaults__ = (None, "cpu:gloo")  # type: ignore[attr-defined]
