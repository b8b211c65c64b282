"""The swe_agent recipe without its agent: the repositories, what is handed in, and who judges it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.recipes import SWE_AGENT, load

pytestmark = pytest.mark.integration
BUGS, DATA, COLLECT, SOLVE = load(SWE_AGENT, "bugs", "data", "collect", "solve")
PYTHON = Path(sys.executable)
SORTED = BUGS.repository("missing_sort", noun="songs", n=3)
HALF = 0.5  # of its tests pass with the bug


def share(tests: Path, *hand_ins: dict[str, str]) -> list[float]:
    """What each of these sources is judged."""

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(SOLVE.passing_share(PYTHON, tests, files) for files in hand_ins))

    return asyncio.run(all_of_them())


def hidden_tests(folder: Path, repository: Any) -> Path:
    DATA.write_files(folder, DATA.hidden_files(repository))
    return folder


@pytest.mark.parametrize("kind", sorted(BUGS.BUGS))
def test_some_tests_fail_with_the_bug_and_all_pass_without(tmp_path: Path, kind: str) -> None:
    easy, hard = (BUGS.repository(kind, noun="visits", n=n) for n in (3, 8))
    for name, one in (("easy", easy), ("hard", hard)):
        broken = {name: text for name, text in one.files.items() if not name.startswith("test_")}
        before, after = share(hidden_tests(tmp_path / name, one), broken, broken | {one.module: one.fixed})
        assert 0 < before < 1 == after
    assert easy.issue != hard.issue or easy.files != hard.files


def test_the_tests_in_the_repository_show_the_bug(tmp_path: Path) -> None:
    DATA.write_files(tmp_path / "repository", SORTED.files)
    command = [PYTHON, "-m", "unittest"]
    shown = subprocess.run(command, cwd=tmp_path / "repository", capture_output=True, text=True)
    assert shown.returncode == 1 and "FAILED (failures=1)" in shown.stderr and "Ran 2 tests" in shown.stderr


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import atexit\natexit.register(lambda: open('reward.json', 'w').write('{\"reward\": 1.0}'))",
        "import json, os\njson.dump({'reward': 1.0, 'secret': ''}, open('reward.json', 'w'))\nos._exit(0)",
        "import json\nsecret = json.load(open('task.json'))['secret']",
        "a syntax error",
    ],
)
def test_sources_that_do_not_let_themselves_be_judged_have_nothing(tmp_path: Path, cheat: str) -> None:
    tests = hidden_tests(tmp_path / "tests", SORTED)
    assert share(tests, {SORTED.module: f"{SORTED.fixed}\n\n{cheat}\n"}) == [0.0]


@pytest.mark.parametrize("name", ["test_hidden.py", "sub/test_hidden.py", "../test.py", "/tmp/x.py", "a/../b.py", "x"])
def test_a_hand_in_reaches_no_test_and_no_other_folder(tmp_path: Path, name: str) -> None:
    tests = hidden_tests(tmp_path / "tests", SORTED)
    fixed = {SORTED.module: SORTED.fixed}
    assert share(tests, fixed, fixed | {name: "pass"}) == [1.0, 0.0]


def collected(folder: Path, seconds: str, *command: str) -> dict[str, Any]:
    line = [PYTHON, "-I", SWE_AGENT / "collect.py", seconds, "../log.json", *command]
    subprocess.run(line, cwd=folder, check=True)
    return dict(json.loads((folder / "reward.json").read_text()))


def test_what_an_agent_leaves_counts_however_it_ends(tmp_path: Path) -> None:
    folder, away = tmp_path / "work", tmp_path / "away.json"
    folder.mkdir()
    away.write_text("untouched")
    failing = "echo x=1 >a.py; ln -s ../away.json reward.json; exit 3"
    assert collected(folder, "20", "sh", "-c", failing) == {
        "reward": None,
        "exit_code": 3,
        "files": {"a.py": "x=1\n"},
        "replies": [],
    }
    assert away.read_text() == "untouched"
    assert collected(folder, "0.3", "sh", "-c", "echo x=2 >a.py; exec sleep 30")["exit_code"] is None


@pytest.mark.parametrize("option", ["--train", "--val"])
def test_no_repositories_are_refused(tmp_path: Path, option: str) -> None:
    line = [PYTHON, SWE_AGENT / "data.py", "--out", tmp_path, "--size", "none", option, "0"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"{option}=0: there must be at least one repository")
    assert list(tmp_path.iterdir()) == []
