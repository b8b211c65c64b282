"""Each patch against verl is still needed, and does what it says, in the verl that is installed."""

from __future__ import annotations

import ast
import inspect
import logging
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.paths import ROOT

SEPARATE_ASYNC = "verl/trainer/ppo/v1/trainer_separate_async.py"
LOGGER_KEYWORDS = inspect.signature(logging.Logger._log).parameters.keys()


def apply_patches(root: Path, *options: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/apply_patches"), "--root", str(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def unpatched(tmp_path: Path) -> Path:
    """A copy of the installed file as upstream published it, even where the installed one is patched."""
    installed = metadata.distribution("verl")
    (tmp_path / SEPARATE_ASYNC).parent.mkdir(parents=True)
    shutil.copy(str(installed.locate_file(SEPARATE_ASYNC)), tmp_path / SEPARATE_ASYNC)
    info = tmp_path / f"verl-{installed.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {installed.version}\n")
    if (ROOT / "patches" / f"verl-{installed.version}").is_dir():
        apply_patches(tmp_path, "--revert")
    return tmp_path


def logger_calls(source: str) -> list[ast.Call]:
    """The calls of `logger.<level>(...)` in a module."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).startswith("logger.")]


def refused_keywords(source: str) -> list[str | None]:
    """Keywords that the module's logger calls give and that a standard logger raises TypeError for."""
    keywords = [keyword.arg for call in logger_calls(source) for keyword in call.keywords]
    return [keyword for keyword in keywords if keyword not in LOGGER_KEYWORDS]


def test_0001_is_still_needed(unpatched: Path) -> None:
    refused = refused_keywords((unpatched / SEPARATE_ASYNC).read_text())
    assert refused == ["flush"], (
        f"verl {metadata.version('verl')} no longer gives flush= to a logger in {SEPARATE_ASYNC} "
        f"(found {refused}): delete patches/verl-*/0001-*, its row in patches/README.md and its tests here"
    )


def test_a_logger_refuses_what_0001_takes_out() -> None:
    """The reason itself: what the unpatched call does when it is reached."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'flush'"):
        logging.getLogger(__name__).error("never written", flush=True)  # type: ignore[call-arg]


def test_0001_takes_out_the_keyword_and_nothing_else(unpatched: Path) -> None:
    before = (unpatched / SEPARATE_ASYNC).read_text()
    apply_patches(unpatched)
    after = (unpatched / SEPARATE_ASYNC).read_text()
    compile(after, SEPARATE_ASYNC, "exec")
    assert refused_keywords(after) == []
    assert len(logger_calls(after)) == len(logger_calls(before)) > 0
    tree = ast.parse(before)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "logger.info":
            call.keywords = [keyword for keyword in call.keywords if keyword.arg != "flush"]
    assert ast.dump(ast.parse(after)) == ast.dump(tree)
