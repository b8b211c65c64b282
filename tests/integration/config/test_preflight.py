"""Looking at a config in a process of its own imports nothing heavy; a journal that another one writes is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.config import (
    TINY_CLI,
    assert_refused,
    tiny_files,
    tiny_plain,
)
from support.purity import HEAVY

from seamless_verl.config import preflight
from seamless_verl.journal import SqliteJournal
from seamless_verl.resources.tags import KEY

pytestmark = pytest.mark.integration
COLOCATED = f"{KEY}=[{{count: 1, devices: 2, tags: [train, rollout]}}]"
MAIN = (
    f"HEAVY = {HEAVY!r}"
    + """
import sys
import hydra
from seamless_verl.config import SeamlessConfig, preflight, register_search_path
register_search_path()

@hydra.main(config_path="pkg://seamless_verl.config", config_name="seamless_ppo_trainer", version_base=None)
def main(config):
    try:
        preflight(config, devices=1, accelerator=False)
    except ValueError:
        pass
    heavy = [name for name in HEAVY if name in sys.modules]
    sys.stdout.write(f"ran {config.trainer.v1.trainer_mode} {config.data.train_batch_size} {heavy}\\n")

main()
"""
)


def test_multirun_imports_nothing_heavy(tmp_path: Path) -> None:
    """The whole way to a refused run, twice over, in a process of its own."""
    (tmp_path / "main.py").write_text(MAIN)
    command = [sys.executable, "main.py", "-m", "data.train_batch_size=8,16", "hydra.sweep.dir=swept"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "ran seamless 8 []" in done.stdout and "ran seamless 16 []" in done.stdout, done.stderr
    assert (tmp_path / "swept" / "1" / ".hydra" / "config.yaml").is_file()


def test_importing_the_config_imports_nothing_heavy() -> None:
    code = f"import sys, seamless_verl.config; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_command_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "ray", "verl", "vllm", "megatron", "transformers")
    argv = ["plan", "--json", *tiny_files(tmp_path), *TINY_CLI, COLOCATED, "platform=cpu", "seamless.cpu.devices=2"]
    code = f"""
import sys
from seamless_verl.cli.main import main
code = main({argv!r})
sys.stderr.write(str([name for name in {heavy!r} if name in sys.modules]))
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "[]")
    assert json.loads(done.stdout)["format"] == 1


def test_a_journal_that_another_run_writes(tmp_path: Path) -> None:
    checkpoints = f"trainer.default_local_dir={tmp_path}/checkpoints"
    config = tiny_plain(tmp_path, "seamless.gateway.enabled=true", checkpoints)
    code = """
import pathlib, sys
from seamless_verl.journal import SqliteJournal
with SqliteJournal(pathlib.Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""
    journal = tmp_path / "checkpoints" / "trajectories.sqlite"
    command = [sys.executable, "-c", code, str(journal)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        assert_refused(
            config, "trainer.default_local_dir", f"{tmp_path}/checkpoints", "seamless.gateway.journal=<file>"
        )
        other.communicate()
    assert preflight(config, devices=1, accelerator=False) == []
    with SqliteJournal(journal):  # the check took nothing
        pass
