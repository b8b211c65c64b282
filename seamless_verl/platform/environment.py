"""The environment of a run on the CPU platform, set once where the job starts; children inherit it."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

from seamless_verl.platform.cores import CPU_CORES, PIN

DEVICES = "SEAMLESS_CPU_DEVICES"


def prepare(environ: MutableMapping[str, str], *, cores: Collection[int], devices: int, pin: bool) -> None:
    """Name the platform, its cores and its devices; what the user has set stays.

    One thread a process, because a device is one core; no dynamo, because nothing is compiled.
    """
    defaults = {
        "VERL_PLATFORM": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TQ_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        CPU_CORES: ",".join(str(core) for core in sorted(cores)),
        DEVICES: str(devices),
        PIN: str(int(pin)),
    }
    for name, value in defaults.items():
        environ.setdefault(name, value)
