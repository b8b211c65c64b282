"""The environment of a run on the CPU platform, set once where the job starts; children inherit it."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

from seamless_verl.platform.cores import CPU_CORES, PIN

DEVICES = "SEAMLESS_CPU_DEVICES"
PRESTART = "RAY_prestart_worker_first_driver"  # Ray's: whether a node begins with a worker for each CPU


def prepare(environ: MutableMapping[str, str], *, cores: Collection[int], devices: int, pin: bool) -> None:
    """Name the platform, its cores and its devices; what the user has set stays.

    One thread a process, because a device is one core; no dynamo, because nothing is compiled. No workers of Ray's
    before there is work: they would have no runtime environment, and so stand idle beside those that have the run's.
    """
    defaults = {
        "VERL_PLATFORM": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TQ_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        PRESTART: "0",
        CPU_CORES: ",".join(str(core) for core in sorted(cores)),
        DEVICES: str(devices),
        PIN: str(int(pin)),
    }
    for name, value in defaults.items():
        environ.setdefault(name, value)
