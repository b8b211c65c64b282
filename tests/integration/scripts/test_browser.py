"""scripts/browser: what it finds, what it installs, and what it says where it can do neither."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.integration
MAKES_BOTH = (
    '#!/bin/sh\necho "$@" >>"$LOG"\nfor name in chromium chromedriver; do cp "$0" "$(dirname "$0")/$name"; done\n'
)
NEEDS_LISTS = (
    '#!/bin/sh\necho "$@" >>"$LOG"\n[ "$1" = update ] && touch "$LOG.lists"\n[ -e "$LOG.lists" ] || exit 100\n'
)


def machine(folder: Path, **commands: str) -> Path:
    """A folder of commands: those that every machine has, and these scripts."""
    for name in ("bash", "sh", "env", "id", "cp", "dirname", "touch", "flock"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, text in commands.items():
        file = folder / name.replace("_", "-")
        file.unlink(missing_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return folder


def browser(commands: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(commands), "LOG": str(commands / "log")}
    return subprocess.run([ROOT / "scripts" / "browser"], env=env, capture_output=True, text=True)


def test_what_is_there_is_named(tmp_path: Path) -> None:
    found = browser(machine(tmp_path, chromium="", chromedriver="", apt_get="#!/bin/sh\nexit 1\n"))
    assert found.stdout.split() == [str(tmp_path / "chromium"), str(tmp_path / "chromedriver")] and not found.stderr


def test_root_gets_what_is_missing(tmp_path: Path) -> None:
    made = browser(machine(tmp_path, apt_get=MAKES_BOTH, id="#!/bin/sh\necho 0\n"))
    assert made.stdout.split() == [str(tmp_path / "chromium"), str(tmp_path / "chromedriver")], made.stderr
    assert (tmp_path / "log").read_text() == "install --yes --no-install-recommends chromium chromium-driver\n"


def test_the_lists_of_packages_are_fetched_where_there_are_none(tmp_path: Path) -> None:
    text = NEEDS_LISTS + MAKES_BOTH.partition("\n")[2].partition("\n")[2]
    made = browser(machine(tmp_path, apt_get=text, id="#!/bin/sh\necho 0\n"))
    assert made.returncode == 0, made.stderr
    assert [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()] == ["install", "update", "install"]


def test_others_are_told_what_to_install(tmp_path: Path) -> None:
    told = browser(machine(tmp_path, apt_get=MAKES_BOTH, id="#!/bin/sh\necho 1000\n"))
    assert told.returncode == 2 and "sudo apt-get install chromium chromium-driver" in told.stderr
    assert not (tmp_path / "log").exists()


def test_where_there_is_no_apt_get_it_says_so(tmp_path: Path) -> None:
    told = browser(machine(tmp_path, chromium=""))
    assert told.returncode == 2 and told.stdout == "" and "there is no apt-get. Install both." in told.stderr


def test_an_installation_that_fails_is_an_error(tmp_path: Path) -> None:
    failed = browser(machine(tmp_path, apt_get="#!/bin/sh\necho no network\nexit 100\n", id="#!/bin/sh\necho 0\n"))
    assert failed.returncode == 2 and "no network" in failed.stderr and "could not install them" in failed.stderr
