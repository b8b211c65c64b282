"""Memory of this machine's devices, in bytes, read without torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def host_bytes(meminfo: Path = MEMINFO, limits: tuple[Path, ...] = LIMITS) -> int | None:
    """The host's memory, or a container's share of it; None when the system does not say."""
    if not meminfo.is_file():
        return None
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    total = int(found.group(1)) * 1024 if found else None
    given = [int(text) for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([*([total] if total else []), *given], default=None)


def accelerator_bytes() -> int | None:
    """The least memory of an accelerator in this machine; None when its driver does not say."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run([command, *QUERY], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # a driver that does not answer says nothing
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if done.returncode == 0 and sizes else None
