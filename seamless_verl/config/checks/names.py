"""What is chosen by its name from a table of verl's, which it reads a minute after the start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import joins_cluster
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.tables import ADVANTAGES, LOGGERS, POLICY_LOSSES
from seamless_verl.config.schema import nearest

TABLES: Mapping[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": ADVANTAGES,
    "algorithm.kl_ctrl.type": ("adaptive", "fixed"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
}
OWN_CODE = "VERL_USE_EXTERNAL_MODULES"  # verl imports these first, and they may add to its tables
OWN_CODE_KEYS = (  # and what these name, in the processes that read the tables
    "actor_rollout_ref.model.external_lib",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",
    "trainer.v1.sampler.custom_sampler.path",
)
PLUGINS = "verl.plugins"
LOGGER = "trainer.logger"


@check
def check_names(settings: Settings) -> list[Problem]:
    """Each is in its table; where code of the user's own may add to it, one that is not may be right."""
    own = _has_own_code(settings)
    given = ((key, settings.get(key), names) for key, names in TABLES.items())
    return [
        Problem(key, value, "is none of verl's own", f"{nearest(str(value), list(names))}. {OWN_CODE} can add", own)
        for key, value, names in given
        if value is not None and value not in names
    ]


def _has_own_code(settings: Settings) -> bool:
    plugins = (one.value for one in entry_points(group=PLUGINS))
    foreign = any(not value.startswith("seamless_verl") for value in plugins)
    return foreign or bool(os.environ.get(OWN_CODE)) or any(settings.get(key) for key in OWN_CODE_KEYS)


@check
def check_loggers(settings: Settings) -> list[Problem]:
    """Known ones, whose packages are installed. In a cluster another machine may have them."""
    asked = settings.get(LOGGER, [])
    named = [str(name) for name in (asked if isinstance(asked, list) else [asked])]
    known = [name for name in named if name in LOGGERS]
    away = [] if joins_cluster(settings) else [name for name in known if not _installed(LOGGERS[name])]
    return [
        *(Problem(LOGGER, n, "is none of verl's loggers", nearest(n, list(LOGGERS))) for n in named if n not in known),
        *(Problem(LOGGER, n, f"needs the module {LOGGERS[n]}, which is not installed", _without(n)) for n in away),
    ]


def _installed(module: str | None) -> bool:
    return module is None or find_spec(module) is not None


def _without(name: str) -> str:
    return f"Install it, or take {name} out of {LOGGER}"
