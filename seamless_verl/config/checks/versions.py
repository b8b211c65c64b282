"""Installed versions against the verified ones: older is refused, newer is a warning."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import uses_megatron
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import MEGATRON, ROLLOUT
from seamless_verl.config.checks.tables import VERIFIED_CPU, VERIFIED_CUDA, Verified


@check
def check_versions(settings: Settings) -> list[Problem]:
    """Every library the run would use."""
    table = VERIFIED_CUDA if settings.host.accelerator else VERIFIED_CPU
    found = {name: installed(table[name]) for name in _used(settings)}
    judged = (judge(found[name], table[name]) for name in found)
    return [problem for problem in judged if problem is not None]


def judge(found: str | None, verified: Verified) -> Problem | None:
    """The problem with one version; None when it was verified. A local part (`+cpu`) does not count."""
    name = verified.distributions[0]
    install = f"Install {name}=={verified.newest or verified.oldest}"
    if found is None:
        return Problem(name, None, "is not installed", install)
    release = Version(Version(found).public)
    if release < Version(verified.oldest):
        return Problem(name, found, f"is older than the verified {verified.oldest}", install)
    if verified.newest is not None and release > Version(verified.newest):
        reason = f"is newer than the verified {verified.newest} and may behave otherwise"
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


def _used(settings: Settings) -> list[str]:
    names = ["verl", "ray", "transfer_queue", "transformers"]
    if settings.get(f"{ROLLOUT}.name") == "vllm":
        names.append("vllm")
    if uses_megatron(settings):
        names.append("megatron")
        if settings.flag(f"{MEGATRON}.vanilla_mbridge"):
            names.append("mbridge")
    return names
