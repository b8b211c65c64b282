"""Checks against the host libraries: installed versions, and names that verl looks up in tables of its own.

verl's tables are here as data, and a contract test compares them with the installed ones. verl itself looks the names
up minutes after the start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from seamless_verl.config.roles import MEGATRON, ROLLOUT_KEY, joins_cluster, starts_cluster, uses_megatron
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import ESTIMATOR, LOSS_MODE, OWN_ESTIMATORS, OWN_LOSSES
from seamless_verl.config.versions import (
    VERIFIED_CPU,
    VERIFIED_CUDA,
    Verified,
    installed,
    stack_problem,
    version_problem,
)
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


@check
def check_versions(settings: Settings) -> list[Problem]:
    """Every library that the run uses has a verified version."""
    table = VERIFIED_CUDA if settings.host.accelerator else VERIFIED_CPU
    found = {name: installed(table[name]) for name in _used(settings)}
    problems = (version_problem(found[name], table[name]) for name in found)
    return [problem for problem in problems if problem is not None]


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
        if settings.flag(f"{MEGATRON}.vanilla_mbridge"):
            names.append("mbridge")
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
