"""The limits of one command: time, output, and what Linux lets its processes use. All are checked before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import Doc, NotNegative, NotNegativeNumber, Positive, PositiveNumber

RESOURCES = {
    "cpu_s": "RLIMIT_CPU",
    "address_space_bytes": "RLIMIT_AS",
    "file_bytes": "RLIMIT_FSIZE",
    "processes": "RLIMIT_NPROC",
    "open_files": "RLIMIT_NOFILE",
}


@dataclass(frozen=True)
class CommandLimits:
    """Limits of one command; None is no limit of ours. Where this process has lower ones, those stay.

    `wall_s` is seconds until the command is ended. From `cpu_s` to `open_files` they hold for each of its processes
    by itself, and its children inherit them.
    """

    wall_s: PositiveNumber | None = 3600.0
    grace_s: Annotated[
        NotNegativeNumber,
        Doc("seconds from the request that the command's processes end until they are killed"),
    ] = 5.0
    output_bytes: Annotated[NotNegative, Doc("bytes of stdout and stderr together, until it is ended")] = 64 << 20
    tail_bytes: Annotated[NotNegative, Doc("the last bytes of them, which are kept for the outcome")] = 16 << 10
    cpu_s: Annotated[
        Positive | None,
        Doc("CPU seconds of each process by itself: SIGXCPU, a second later SIGKILL"),
    ] = None
    address_space_bytes: Annotated[
        Positive | None,
        Doc(
            "virtual memory of each process by itself; runtimes that reserve much and use little (Go, Java, Node) "
            "need far more than they use",
        ),
    ] = None
    file_bytes: Annotated[Positive | None, Doc("size of a file that a process writes")] = None
    open_files: Annotated[Positive | None, Doc("file descriptors of each process by itself")] = None
    processes: Annotated[
        Positive | None,
        Doc(
            "processes and threads that its USER may have, all other programs of that user included (RLIMIT_NPROC); "
            "it stops fork bombs only where agents have a user of their own, and does not bind root",
        ),
    ] = None

    def __post_init__(self) -> None:
        fields.check(self, key="limits")

    def resources(self) -> list[str]:
        """`RLIMIT_NAME=value` for each that is set."""
        given = {name: getattr(self, name) for name in RESOURCES}
        return [f"{RESOURCES[name]}={value}" for name, value in given.items() if value is not None]
