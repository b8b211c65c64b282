"""The machine on which a run was made, and whether those of two runs are the same.

It is the one on which the comparison was started: of a cluster's other machines nothing is known. A comparison may be
continued elsewhere, and a ratio of runs of two machines is one of machines, too. What an earlier version of this
package did not write down is not known, and then says nothing.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from seamless_verl.platform.nvml import VARIABLE, visible_gpus

IDENTITY = ("processor", "cores", "gpus", "driver")
"""What two runs must have alike to be of one kind of machine; cores are those that the runs may use."""


def machine() -> dict[str, Any]:
    """The processor, the cores that a run may use, memory, load, kernel, and GPUs with their driver."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        **gpus(),
    }


def processor() -> str:
    """The processor's name, as Linux has it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def gpus() -> dict[str, Any]:
    """The names of the GPUs that this process sees, as `gpus`, and their `driver`; empty where NVML does not say."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        names, driver = visible_gpus(pynvml, os.environ.get(VARIABLE))
    except pynvml.NVMLError:
        return {}
    return {"gpus": names, "driver": driver}


def machine_words(found: Mapping[str, Any]) -> str:
    """Its processor, cores, memory and GPUs, as a report names them."""
    counted = Counter(found.get("gpus", ()))
    cards = [f"{number} x {name}" for name, number in counted.items()]
    driver = [f"driver {found['driver']}"] if cards and found.get("driver") else []
    return ", ".join([f"{found['processor']}, {found['cores']} cores, {found['memory_gb']} GB", *cards, *driver])


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two machines are known to be of two kinds."""
    return any(one[name] != other[name] for name in IDENTITY if name in one and name in other)


def identity(found: Mapping[str, Any]) -> dict[str, Any]:
    """What of a machine is compared."""
    return {name: found[name] for name in IDENTITY if name in found}
