"""Process groups on the host: gloo as verl's default backend, and one gloo device for all groups of a process.

gloo gives each device a thread that wakes up every 10 ms, also without traffic (gloo/transport/tcp/loop.cc), and torch
gives each group a device of its own. A Megatron rank has some 25 groups and an engine 13, on the cores that compute:
waking those threads up took 3% of both.
"""

from __future__ import annotations

import functools
import os
from typing import Any, cast

from seamless_verl.platform.adaptation import DEFAULT_BACKEND, GLOO_DEVICES

INTERFACES = "GLOO_SOCKET_IFNAME"  # torch's: gloo's network interfaces, by comma


def default_to_gloo() -> None:
    """Make "cpu:gloo" the default of verl's process group, for importers by name as well.

    Raises:
        HostMovedError: verl starts its process group in some other way now.
    """
    function = DEFAULT_BACKEND.find()
    if function.__defaults__ != (None, "cpu:gloo"):  # type: ignore[attr-defined]
        DEFAULT_BACKEND.verify()
        function.__defaults__ = (None, "cpu:gloo")  # type: ignore[attr-defined]


def share_gloo_devices() -> None:
    """Let the gloo groups that this process makes from now on share one set of devices; may be called again.

    Raises:
        HostMovedError: torch does not take devices any more.
    """
    for adaptation in GLOO_DEVICES:
        adaptation.verify()
    from torch.distributed import ProcessGroupGloo

    group: Any = ProcessGroupGloo
    original = group.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        if args or set(kwargs) != {"timeout"}:  # options name their devices; a weight transfer's device ends with it
            original(self, store, rank, size, *args, **kwargs)
            return
        options = group._Options()
        options._timeout, options._devices = kwargs["timeout"], gloo_devices()
        options._threads = 2 * len(options._devices)  # as torch has it
        original(self, store, rank, size, options)

    group.__init__ = init


@functools.cache
def gloo_devices() -> list[Any]:
    """The devices that torch would make for a group; made once for this process."""
    from torch.distributed import ProcessGroupGloo

    group = cast(Any, ProcessGroupGloo)
    if names := os.environ.get(INTERFACES):
        return [group.create_device(interface=name) for name in names.split(",")]
    return [group.create_default_device()]
