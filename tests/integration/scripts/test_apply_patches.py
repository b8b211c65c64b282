"""scripts/apply_patches on a copy of the verl file that a patch names; the installed verl is only read."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.integration
SCRIPT = str(ROOT / "scripts/apply_patches")
PATCH = "0001-trainer-fix-logger-flush.patch"
TARGET = "verl/trainer/ppo/v1/trainer_separate_async.py"
PATCHED_LINE = b"                flush=True,\n"
Limit = Callable[[], None]  # on the child, before it runs
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


def run(root: Path, *options: str, limit: Limit | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit)


def fill_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def heed_modes() -> None:
    """Make root heed file modes like everybody else, from the next exec on."""
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0):
        raise OSError("this container does not let root give a capability up")


def status(root: Path, *options: str) -> str:
    done = run(root, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.removeprefix(f"{PATCH}: ").rstrip("\n")


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, mode and inode of every file below `root`; a leftover .orig, .rej or staged file is a key."""
    files = [path for path in root.rglob("*") if path.is_file()]
    entries = ((path.read_bytes(), path.stat().st_mode, path.stat().st_ino) for path in files)
    return dict(zip((str(path.relative_to(root)) for path in files), entries, strict=True))


@pytest.fixture
def verl_copy(tmp_path: Path) -> Path:
    """The installed verl's version and the one file that patches name, without the patches."""
    installed, root = distribution("verl"), tmp_path / "site"
    (root / TARGET).parent.mkdir(parents=True)
    shutil.copy(str(installed.locate_file(TARGET)), root / TARGET)
    (root / TARGET).chmod(0o640)
    info = root / f"verl-{installed.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {installed.version}\n")
    status(root, "--revert")
    return root


def test_apply_then_revert_is_byte_exact(verl_copy: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cached.py"  # installers link files to their cache, which other environments share
    os.link(verl_copy / TARGET, cached)
    before = snapshot(verl_copy)
    assert status(verl_copy) == "applied"
    after = snapshot(verl_copy)
    assert after.keys() == before.keys()
    assert after[TARGET][:2] == (before[TARGET][0].replace(PATCHED_LINE, b""), before[TARGET][1])
    assert after[TARGET][0] != before[TARGET][0] == cached.read_bytes()
    assert status(verl_copy, "--revert") == "reverted"
    reverted = snapshot(verl_copy)
    assert all(reverted.pop(name)[:2] == before[name][:2] for name in before) and not reverted


@pytest.mark.parametrize(("option", "when_out"), [("--check", "fits"), ("--status", "not applied")])
def test_a_second_time_and_looking_touch_nothing(verl_copy: Path, option: str, when_out: str) -> None:
    before = snapshot(verl_copy)
    assert (status(verl_copy, "--revert"), status(verl_copy, option)) == ("not applied", when_out)
    assert snapshot(verl_copy) == before
    status(verl_copy)
    before = snapshot(verl_copy)
    assert (status(verl_copy), status(verl_copy, option)) == ("already applied", "applied")
    assert snapshot(verl_copy) == before


def test_git_takes_the_patch_and_agrees(verl_copy: Path, tmp_path: Path) -> None:
    theirs = shutil.copytree(verl_copy, tmp_path / "git")
    subprocess.run(["git", "init", "-q", str(theirs)], check=True)
    subprocess.run(["git", "apply", str(ROOT / "patches/verl-0.9.1" / PATCH)], cwd=theirs, check=True)
    status(verl_copy)
    assert (theirs / TARGET).read_bytes() == (verl_copy / TARGET).read_bytes()


@pytest.mark.parametrize("options", [(), ("--check",), ("--revert",), ("--status",)])
def test_another_version_is_refused_by_name(verl_copy: Path, options: tuple[str, ...]) -> None:
    info = next(verl_copy.glob("verl-*.dist-info"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.2\n")
    info.rename(verl_copy / "verl-0.9.2.dist-info")
    before, refused = snapshot(verl_copy), run(verl_copy, *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "found verl 0.9.2" in refused.stderr
    assert "patches are for verl-0.9.1. Install that version" in refused.stderr
    assert snapshot(verl_copy) == before


@pytest.mark.parametrize("options", [(), ("--check",), ("--revert",)])
def test_an_edited_file_is_refused_and_left_alone(verl_copy: Path, options: tuple[str, ...]) -> None:
    target = verl_copy / TARGET
    target.write_bytes(target.read_bytes().replace(PATCHED_LINE, b"                flush=False,\n"))
    before, refused = snapshot(verl_copy), run(verl_copy, *options)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{PATCH} does not fit {TARGET}" in refused.stderr
    assert snapshot(verl_copy) == before


@pytest.mark.parametrize("limit", [heed_modes, fill_disk])
def test_a_failed_write_changes_nothing_and_says_so(verl_copy: Path, limit: Limit) -> None:
    directory, before = (verl_copy / TARGET).parent, snapshot(verl_copy)
    directory.chmod(0o555 if limit is heed_modes else 0o755)
    refused, read_only = run(verl_copy, limit=limit), run(verl_copy, "--status", limit=limit)
    assert (refused.returncode, read_only.returncode) == (1, 0)
    assert "read-only or its disk full, and nothing was changed" in refused.stderr
    assert snapshot(verl_copy) == before
