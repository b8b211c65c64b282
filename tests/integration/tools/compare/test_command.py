"""`seamless-verl compare` from its command line to its files, with a short job in the place of a training one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pyarrow import parquet
from support.paths import DATA, ROOT

pytestmark = pytest.mark.integration
JOB = DATA / "compared_job.py"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "run.sh").write_text(f'#!/usr/bin/env bash\nexport MAIN="${{MAIN:-x}}"\nexec "$PYTHON" {JOB} "$@"\n')
    (folder / "run.sh").chmod(0o755)
    return folder


def command(recipe: Path, *options: str) -> list[str]:
    shared = ["--steps", "4", "--skip", "1", "--out", str(recipe.parent / "out")]
    return [sys.executable, "-m", "seamless_verl.cli", "compare", str(recipe), *shared, *options]


def compare(recipe: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(recipe, *options), cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_comparison_goes_on_behind_arms_that_fail_and_has_all_files(recipe: Path) -> None:
    done = compare(recipe, "--arms", "sync,colocate_async,separate_async,seamless", "data.x=1")
    assert done.returncode == 1, done.stderr
    assert "colocate_async cannot run here" in done.stderr and "seamless: " in done.stdout
    assert "checking arm 2 of 4: colocate_async" in done.stderr and "trainer_mode=seamless (sync)" in done.stdout
    out = recipe.parent / "out"
    manifest = json.loads((out / "manifest.json").read_text())
    states = {(run["arm"], run["seed"]): run["state"] for run in manifest["runs"]}
    expected = {"sync": "finished", "colocate_async": "refused", "separate_async": "failed", "seamless": "finished"}
    assert states == {(arm, seed): state for arm, state in expected.items() for seed in (1, 2)}
    assert {"verl", "torch", "python"} <= set(manifest["versions"]) and manifest["machine"]["cores"] > 0
    text = (out / "report.md").read_text()
    assert "is not for this model. Choose another" in text and "the engine has no memory" in text
    assert 1.2 < figure(out, "sync", "step_s") / figure(out, "seamless", "step_s") < 4
    steps = parquet.read_table(out / "steps.parquet").to_pylist()
    assert sum(row["arm"] == "seamless" for row in steps) == 8 and steps[0]["perf/total_num_tokens"] == 104
    one = next(run["command"] for run in manifest["runs"] if run["arm"] == "seamless")
    assert one[0] == str(recipe / "run.sh") and {"data.x=1", "trainer.total_training_steps=4"} <= set(one)


def test_a_baseline_that_cannot_run_here_is_said_before_the_runs_and_in_the_report(recipe: Path) -> None:
    done = compare(recipe, "--arms", "colocate_async,sync,seamless", "--seeds", "1")
    assert done.returncode == 1 and "seamless: " in done.stdout
    warning = "It was to be the baseline. The ratios are relative to sync instead."
    said = done.stderr.index("warning: colocate_async cannot run here: ")
    assert said < done.stderr.index(warning) < done.stderr.index("colocate_async, seed 1, round 1: refused")
    report = (recipe.parent / "out" / "report.md").read_text()
    assert "**Warning**: colocate_async cannot run here" in report and warning in report


def figure(out: Path, arm: str, name: str) -> float:
    rows = parquet.read_table(out / "runs.parquet").to_pylist()
    return float(min(row[name] for row in rows if row["arm"] == arm))


def test_arms_are_repeated_over_staleness_and_learning_rates(recipe: Path) -> None:
    grid = ["--arms", "sync,seamless", "--staleness", "0,4", "--learning-rates", "1e-3,5e-4", "--seeds", "1"]
    done = compare(recipe, *grid, "--steps", "6", "--target-reward", "0.3")
    assert done.returncode == 0, done.stderr
    out = recipe.parent / "out"
    runs = {row["arm"]: row for row in parquet.read_table(out / "runs.parquet").to_pylist()}
    assert list(runs) == [
        f"{arm} lr={lr}" for lr in ("1e-3", "5e-4") for arm in ("sync", "seamless s=0", "seamless s=4")
    ]
    assert [(run["permitted"], run["learning_rate"]) for run in runs.values()][1:4] == [(0, 1e-3), (4, 1e-3), (0, 5e-4)]
    for arm, length in (("sync", None), ("seamless s=0", 0.0), ("seamless s=4", 0.25)):
        assert runs[f"{arm} lr=5e-4"]["length_distance"] == length
    assert all(run["seconds_to_target"] > 0 and run["samples_to_target"] == 5 * 8 for run in runs.values())
    text = (out / "report.md").read_text()
    assert "The baseline is `sync lr=1e-3`, `sync lr=5e-4`, each for the arms of its learning rate." in text
    assert "seamless s=4 is fastest to the reward with learning rate" in done.stdout
    command = json.loads((out / "manifest.json").read_text())["runs"][-1]["command"]
    assert "seamless.max_staleness=4" in command


def test_what_is_finished_is_not_made_again_unless_it_is_another_run(recipe: Path) -> None:
    assert compare(recipe, "--arms", "sync", "--seeds", "1").returncode == 0
    done = recipe.parent / "out" / "sync-seed1-r1" / "done"
    first = done.stat().st_mtime_ns
    files = [recipe.parent / "out" / name for name in ("report.md", "report.html", "manifest.json")]
    before = [file.read_text() for file in files]
    assert compare(recipe, "--arms", "sync", "--seeds", "1").returncode == 0
    assert [file.read_text() for file in files] == before, "no run was made, so nothing new is said of one"
    assert compare(recipe, "--arms", "sync,seamless", "--seeds", "1").returncode == 0
    assert done.stat().st_mtime_ns == first
    assert compare(recipe, "--arms", "sync", "--seeds", "1", "data.x=2").returncode == 0
    second = done.stat().st_mtime_ns
    assert second > first
    with (recipe / "run.sh").open("a") as script:
        script.write("# edited\n")
    assert compare(recipe, "--arms", "sync", "--seeds", "1", "data.x=2").returncode == 0
    assert done.stat().st_mtime_ns > second


def test_methods_are_compared_at_equal_tokens(recipe: Path) -> None:
    other = "wide:seamless.x=1:actor_rollout_ref.rollout.n=4"
    options = ["--arms", f"seamless,{other}", "--validate", "1", "--seeds", "1"]
    assert compare(recipe, *options).returncode == 2, "another budget"
    done = compare(recipe, "--equal-tokens", "data.x=1", *options)
    assert done.returncode == 0, done.stderr
    text = (recipe.parent / "out" / "report.md").read_text()
    assert "## At 200 generated tokens" in text and "samples a prompt" not in text
    rows = re.findall(r"^\| (seamless|wide) \| 0.400 \| - \| .* \| ([\d.]+) \|$", text, re.MULTILINE)
    assert rows == [("seamless", "2.0"), ("wide", "4.0")]
    assert re.search(r"^wide +0.400", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_ctrl_c_or_a_closed_terminal_leaves_a_report_of_what_there_is_and_no_process(
    recipe: Path, number: signal.Signals, code: int
) -> None:
    arms = ["--arms", "sync,seamless:seamless.x=1:+hang=1", "--seeds", "1"]
    with subprocess.Popen(command(recipe, *arms), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        metrics = recipe.parent / "out" / "seamless_seamless.x_1_hang_1-seed1-r1" / "logged.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and len(metrics.read_text().splitlines()) == 2):
            assert one.poll() is None and time.monotonic() < deadline, one.communicate()
            time.sleep(0.05)
        one.send_signal(number)
        output, errors = one.communicate(timeout=120)
    assert one.returncode == code, errors
    text = (recipe.parent / "out" / "report.md").read_text()
    assert "**Interrupted**: 1 of 2 runs were not made." in text and "| sync | 1/1 |" in text
    assert (b"The report is in" in output) == (number == signal.SIGINT)
    assert [process for process in psutil.process_iter() if belongs(process, recipe)] == []


def belongs(process: psutil.Process, recipe: Path) -> bool:
    """Whether it was started for this recipe: its environment names the recipe's data."""
    try:
        return process.pid != os.getpid() and process.environ().get("DATA", "").startswith(str(recipe.parent))
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--arms", "sync,seamless:data.train_batch_size=8:seamless.a=1"], "data.train_batch_size=8: arm"),
        (["--arms", "sync,seamless:seamless.a=1:actor_rollout_ref.rollout.n=4"], "actor_rollout_ref.rollout.n=4: arm"),
        (["--arms", "colocate_async"], "none can run here: trainer.v1.trainer_mode='colocate_async'"),
        (["--arms", "colocate_async,seamless"], "only seamless can run here, which leaves nothing to compare it with"),
        (["--equal-tokens", "--validate", "1"], "--arms='sync': verl's modes do not log"),
        (["nonsense"], "unrecognized arguments: nonsense"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_run(recipe: Path, options: list[str], reason: str) -> None:
    done = compare(recipe, *options)
    assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert not (recipe.parent / "out" / "sync-seed1-r1").exists()


def test_an_unknown_job_is_refused_with_the_recipes_that_there_are(tmp_path: Path) -> None:
    done = compare(tmp_path / "no_such")
    assert done.returncode == 2 and "is no recipe and no config file" in done.stderr
    assert "arithmetic_grpo" in done.stderr
