"""The tables of the config checks are what the installed hosts say."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from packaging.version import Version

from seamless_verl.config.checks.hosts import ADVANTAGES, LOGGERS, POLICY_LOSSES, VERIFIED_CPU, installed
from seamless_verl.config.composing import verl_config_dir
from seamless_verl.config.verl_keys import OWN_ESTIMATORS, OWN_LOSSES, VERL_MODES


@pytest.mark.integration
def test_what_verl_finds_by_name() -> None:

    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils import tracking
    from verl.utils.tracking import Tracking

    from seamless_verl import algorithms

    algorithms.register(algorithms.LOSSES | algorithms.ESTIMATORS)
    assert algorithms.LOSSES.keys() == set(OWN_LOSSES) and algorithms.ESTIMATORS.keys() == set(OWN_ESTIMATORS)
    assert sorted(ADV_ESTIMATOR_REGISTRY) == sorted((*ADVANTAGES, *OWN_ESTIMATORS))
    assert sorted(POLICY_LOSS_REGISTRY) == sorted((*POLICY_LOSSES, *OWN_LOSSES))
    assert {*Tracking.supported_backend, "tracking"} == set(LOGGERS)
    source = inspect.getsource(tracking)
    imported = {one for one in LOGGERS.values() if one is not None and one != "tensorboard"}  # which torch imports
    assert all(re.search(rf"^ +import {module}\b", source, re.MULTILINE) for module in imported)
    assert "import SummaryWriter" in source


def test_verl_modes() -> None:
    """Every trainer that verl 0.9.1 registers, read from its source without importing it."""
    folder = verl_config_dir().parent / "ppo" / "v1"
    names = [
        call.args[0].value
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "register_trainer"
        if isinstance(call.args[0], ast.Constant)
    ]
    assert sorted(names) == sorted(VERL_MODES)


def test_installed_versions_were_verified() -> None:
    for name, verified in VERIFIED_CPU.items():
        found = installed(verified)
        assert found is not None, name
        assert verified.newest is not None
        release = Version(Version(found).public)
        assert Version(verified.oldest) <= release <= Version(verified.newest), (name, found)
