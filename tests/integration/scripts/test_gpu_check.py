"""scripts/gpu_check without a card, and its runner: each check has an outcome, and a cut one leaves nothing running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import runner
from gpu.catalog import CHECKS, Check
from support.paths import ROOT, child_environment
from support.processes import has_ended

pytestmark = pytest.mark.integration


def kit(*options: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", **child_environment()}
    command = [sys.executable, str(ROOT / "scripts/gpu_check"), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_a_dry_run_lists_all_checks_with_their_limits_and_imports_them(tmp_path: Path) -> None:
    done = kit("--dry-run", "--wheels", str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no wheel folder yet" in done.stdout and "cannot be imported" not in done.stdout
    for check in CHECKS:
        assert any(line.split()[:3] == [check.name, str(check.limit_s), "s"] for line in done.stdout.splitlines())


def test_an_unknown_check_is_named_with_the_known_ones() -> None:
    done = kit("--dry-run", "--only", "engines")
    assert done.returncode == 2 and "--only engines: no such check" in done.stderr and "engine-load" in done.stderr


def outcome(folder: Path, name: str, limit_s: float) -> dict[str, object]:
    return runner.run(Check(name, f"support.gpu_checks:{name}", 60, 1, ""), "cpu", limit_s, folder)


def test_a_check_that_hangs_is_cut_with_its_processes_and_keeps_its_figures(tmp_path: Path) -> None:
    found = outcome(tmp_path, "hangs", 8)
    assert found["state"] == "cut" and found["reason"] == "its limit of 8 s was over"
    child = found["figures"]["begun"]["child"]  # type: ignore[index]
    assert has_ended(child)


def test_a_check_passes_fails_or_is_skipped_with_a_reason(tmp_path: Path) -> None:
    failed, skipped, passed = (outcome(tmp_path, name, 60) for name in ("fails", "skips", "passes"))
    assert (failed["state"], failed["reason"]) == ("failed", "RuntimeError: not as it should be")
    assert failed["figures"] == {"before": {"figure": 1}} and "Traceback" in str(failed["log"])
    assert (skipped["state"], skipped["reason"]) == ("skipped", "nothing to check here")
    assert (passed["state"], passed["figures"]) == ("passed", {"folder": {"empty": True}})


def test_results_are_written_after_each_check_and_a_small_card_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def run(check: Check, on: str, limit_s: float, folder: Path) -> dict[str, object]:
        written.extend(len(json.loads(file.read_text())["checks"]) for file in tmp_path.glob("*.json"))
        return {"name": check.name, "state": "passed", "reason": None, "seconds": 1, "figures": {}}

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner, "card", lambda: {"card": "NVIDIA Small 10GB", "gigabytes": 10.7, "driver": "1"})
    assert runner.run_all(CHECKS, "cuda", tmp_path, minutes=None)
    (file,) = tmp_path.glob("nvidia-small-10gb-*.json")
    found = {entry["name"]: entry for entry in json.loads(file.read_text())["checks"]}
    assert list(found) == [check.name for check in CHECKS]
    assert found["memory"]["reason"] == "needs a card with 20 GB, and this one has 11 GB"
    passed = [name for name, entry in found.items() if entry["state"] == "passed"]
    assert passed == [check.name for check in CHECKS if check.gigabytes <= 10]
    assert len(written) == len(passed) - 1, "a result file was there before each check but the first"
    assert runner.run_all(CHECKS[:1], "cuda", tmp_path / "late", minutes=0)
    (late,) = (tmp_path / "late").glob("*.json")
    assert json.loads(late.read_text())["checks"][0]["reason"] == "--minutes 0 were over"
