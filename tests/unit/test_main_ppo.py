"""Which platform a config is for."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from seamless_verl.errors import ConfigError
from seamless_verl.main_ppo import uses_cpu


def test_a_config_for_accelerators_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert uses_cpu(OmegaConf.create({"trainer": {"device": "cpu"}}))
    with pytest.raises(ConfigError, match="platform=cpu"):
        uses_cpu(OmegaConf.create({"trainer": {"device": "cuda"}}))


def test_the_cpu_platform_can_be_chosen_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cuda")
    assert uses_cpu(OmegaConf.create({"trainer": {"device": "cpu"}}))
    assert not uses_cpu(OmegaConf.create({"trainer": {"device": "cuda"}}))
