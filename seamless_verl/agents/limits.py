"""The limits of one command: time, output, and what Linux lets its processes use. All are checked before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import NotNegative, NotNegativeNumber, Positive, PositiveNumber, SettingsNode

RESOURCES = {
    "cpu_s": "RLIMIT_CPU",
    "address_space_bytes": "RLIMIT_AS",
    "file_bytes": "RLIMIT_FSIZE",
    "processes": "RLIMIT_NPROC",
    "open_files": "RLIMIT_NOFILE",
}


@dataclass(frozen=True)
class CommandLimits(SettingsNode):
    """Limits of one command; None is no limit of ours. Where this process has lower ones, those stay.

    `wall_s` is seconds until the command is ended. From `cpu_s` to `open_files` they hold for each of its processes
    by itself, and its children inherit them.
    """

    wall_s: PositiveNumber | None = 3600.0
    grace_s: NotNegativeNumber = 5.0
    """Seconds from the request that the command's processes end until they are killed."""
    output_bytes: NotNegative = 64 << 20
    """Bytes of stdout and stderr together, until it is ended."""
    tail_bytes: NotNegative = 16 << 10
    """The last bytes of them, which are kept for the outcome."""
    cpu_s: Positive | None = None
    """CPU seconds of each process by itself: SIGXCPU, a second later SIGKILL."""
    address_space_bytes: Positive | None = None
    """Virtual memory of each process by itself; runtimes such as Go, Java, Node reserve much more than they use."""
    file_bytes: Positive | None = None
    """Size of a file that a process writes."""
    open_files: Positive | None = None
    """File descriptors of each process by itself."""
    processes: Positive | None = None
    """Processes and threads of its USER, all programs of that user included (RLIMIT_NPROC); does not bind root."""

    def __post_init__(self) -> None:
        fields.check(self, key="limits")

    def resources(self) -> list[str]:
        """`RLIMIT_NAME=value` for each that is set."""
        given = {name: getattr(self, name) for name in RESOURCES}
        return [f"{RESOURCES[name]}={value}" for name, value in given.items() if value is not None]
