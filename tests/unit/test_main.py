"""The command line: which platform a config is for, and what of python's own is passed on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_pythons_own_options_reach_the_child(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("""
import os, sys
from seamless_verl import main_ppo
main_ppo.tidy_checkpoints = lambda run_file: None
if main_ppo.SUPERVISED in os.environ:
    print(sys.warnoptions[-1], sys.flags.utf8_mode, sys.argv[1:])
else:
    sys.exit(main_ppo.main())
""")
    command = [sys.executable, "-W", "ignore", "-X", "utf8=1", "-B", str(script), "-W", "a=1"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ignore 1 ['-W', 'a=1']\n"
