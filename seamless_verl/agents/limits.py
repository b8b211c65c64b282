"""What one command may use. All are checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from seamless_verl.errors import ConfigError

MAY_BE_ZERO = ("grace_s", "tail_bytes", "output_bytes")
RESOURCES = {
    "cpu_s": "RLIMIT_CPU",
    "address_space_bytes": "RLIMIT_AS",
    "file_bytes": "RLIMIT_FSIZE",
    "processes": "RLIMIT_NPROC",
    "open_files": "RLIMIT_NOFILE",
}


@dataclass(frozen=True)
class CommandLimits:
    """Limits of one command; None is no limit of ours. Those the parent already has stay where they are lower.

    wall_s: seconds until it is ended. grace_s: from asking its processes to end until they are killed.
    output_bytes: of stdout and stderr together, until it is ended. tail_bytes: of them, kept for the outcome.
    The next four hold for each of its processes by itself, and its children inherit them:
    cpu_s: CPU seconds (SIGXCPU, a second later SIGKILL). address_space_bytes: virtual memory; runtimes that
    reserve much and use little (Go, Java, Node) need far more than they use. file_bytes: size of a file it
    writes. open_files: file descriptors.
    processes: how many processes and threads its USER may have, all other programs of that user included
    (RLIMIT_NPROC); it holds fork bombs off only where agents have a user of their own, and does not bind root.
    """

    wall_s: float | None = 3600.0
    grace_s: float = 5.0
    output_bytes: int = 64 << 20
    tail_bytes: int = 16 << 10
    cpu_s: int | None = None
    address_space_bytes: int | None = None
    file_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            zero = item.name in MAY_BE_ZERO
            if value is not None and not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
                way_out = "Give a finite number" if item.default is not None else "Give one, or leave it out"
                raise ConfigError(
                    f"limits.{item.name}", value, "must be above 0" if not zero else "is negative", way_out
                )

    def resources(self) -> list[str]:
        """`RLIMIT_NAME=value` for each that is set."""
        set_ones = {name: getattr(self, name) for name in RESOURCES}
        return [f"{RESOURCES[name]}={value}" for name, value in set_ones.items() if value is not None]
