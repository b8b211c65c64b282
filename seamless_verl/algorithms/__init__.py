"""Policy losses, advantage estimators and samplers, a method a file; a new one is a file and a line here."""

from collections.abc import Mapping
from importlib import import_module

LOSSES = {"interpolated": "interpolated", "m2po": "m2po"}
"""Policy losses by verl's `policy_loss.loss_mode`, each with its module here."""
ESTIMATORS = {"hgpo": "hgpo", "mc_grpo": "median", "grpo_novelty": "novelty"}
"""Advantage estimators by verl's `algorithm.adv_estimator`, each with its module here."""
OF_TURNS = ("hgpo",)
"""Those that compare turns, and read the rewards that turns were given."""


def register(algorithms: Mapping[str, str]) -> None:
    """Registers them with verl, in this process: their modules do it when they are imported."""
    for module in algorithms.values():
        import_module(f"{__name__}.{module}")
