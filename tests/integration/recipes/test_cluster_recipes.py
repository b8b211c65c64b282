"""The recipes for clusters: their configs pass for 32 and 64 devices, and their scripts do what they say on files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from omegaconf import DictConfig
from pyarrow import parquet
from support.layouts import MODELS, settings_of
from support.paths import RECIPES, child_environment
from support.recipes import load

from seamless_verl.cli.main import main
from seamless_verl.config.adopting import adopt_handover, adopt_resources
from seamless_verl.config.checks import find_problems
from seamless_verl.config.planning import plan_of
from seamless_verl.tools.plan.command import compose_config

MATH, SWE = RECIPES / "math_grpo_8b", RECIPES / "swe_agent_32b"
OF_THIS_MACHINE = ("platform", "vllm")  # what it has not installed
ROOM = " free, and the actor's part of a checkpoint takes "  # on the disk of this machine
SEARCH = "hydra.searchpath=[pkg://seamless_verl.config]"


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The variables that run.sh sets, in a temporary folder, and the agents' Python."""
    for name, value in {"DATA": tmp_path, "RUNS": tmp_path / "runs", "AGENT_ENV": tmp_path / "agents"}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "agents" / "bin").mkdir(parents=True)
    (tmp_path / "agents" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def overrides(model: str, devices: int) -> list[str]:
    return [SEARCH, f"cluster=devices_{devices}", f"actor_rollout_ref.model.path={MODELS / model}"]


def composed(recipe: Path, model: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    monkeypatch.setenv("RECIPE", str(recipe))
    config = compose_config(recipe, "config", overrides(model, devices))
    adopt_resources(config)
    return config


@pytest.mark.parametrize("devices", [32, 64])
@pytest.mark.parametrize(("recipe", "model"), [(MATH, "qwen3_8b"), (SWE, "qwen3_32b")], ids=["math", "swe"])
def test_a_config_passes(
    recipe: Path, model: str, devices: int, surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = composed(recipe, model, devices, monkeypatch)
    for name in ("train", "val"):
        parquet.write_table(pa.Table.from_pylist(row_of(recipe)), surroundings / f"{name}.parquet")
    settings = settings_of(config)
    found = [
        p for p in find_problems(settings) if p.key not in OF_THIS_MACHINE and not (p.warning and ROOM in p.reason)
    ]
    assert [str(p) for p in found] == []
    plan = plan_of(settings)
    assert plan.layout.value == "multiplexed" and len(plan.devices) == devices and not plan.unused
    assert "resident" in str(adopt_handover(config)) or recipe is SWE
    validate_config(config, need_reference_policy(config), need_critic(config))


def row_of(recipe: Path) -> list[dict[str, Any]]:
    prompt = [{"role": "user", "content": "1+1="}]
    row = {"data_source": "x", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}}
    return [{**row, "extra_info": {"index": str(i), "image": "i"}} for i in range(300)]


@pytest.mark.parametrize(("recipe", "model"), [(MATH, "qwen3_8b"), (SWE, "qwen3_32b")], ids=["math", "swe"])
def test_the_check_passes_on_a_machine_without_gpus(recipe: Path, model: str, surroundings: Path) -> None:
    arguments = ["--unmade", "--platform", "accelerator", "--config-dir", recipe, "--config-name", "config"]
    command = [sys.executable, "-m", "seamless_verl.check", *arguments, *overrides(model, 64)]
    subprocess.run(command, env=os.environ | {"RECIPE": str(recipe)}, check=True)


def test_the_plan_is_shown(surroundings: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RECIPE", str(MATH))
    arguments = ["--config-dir", str(MATH), "--config-name", "config", *overrides("qwen3_8b", 64)]
    assert main(["plan", *arguments]) == 0
    assert "multiplexed: 8 machines, 64 devices" in capsys.readouterr().out


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*/*.sh")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_are_valid_and_can_be_started(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("recipe", [MATH, SWE], ids=lambda path: path.name)
def test_ray_is_started_with_the_labels_of_a_machine(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "ray").write_text('#!/bin/sh\necho "$CUDA_DEVICE_MAX_CONNECTIONS $@"\n')
    (tmp_path / "ray").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "LABELS": "zone=b"}
    for arguments, words in ((), "1 start --head --port 6379"), (("10.0.0.1:6379",), "1 start --address 10.0.0.1:6379"):
        done = subprocess.run(
            [recipe / "start_ray.sh", *arguments], env=environment, check=True, capture_output=True, text=True
        )
        assert done.stdout.startswith(words) and "--labels zone=b" in done.stdout


def test_questions_are_kept_once(tmp_path: Path) -> None:
    source, rows = tmp_path / "rows.parquet", row_of(MATH)
    rows[7]["prompt"] = [{"role": "user", "content": "2+2="}]
    parquet.write_table(pa.Table.from_pylist(rows), source)
    command = [sys.executable, MATH / "data.py", "--out", tmp_path / "out", "--train", source, "--val", source]
    subprocess.run(command, env=os.environ | child_environment(), check=True)
    kept = parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in kept] == ["1+1=", "2+2="]
    done = subprocess.run([*command[:-1], "none"], env=os.environ | child_environment(), check=True)
    assert done.returncode == 0  # files that are there are kept


def test_the_mathematics_reward() -> None:
    (reward,) = load(MATH, "reward")
    assert reward.compute_score("math_dapo", "So it is 4.\nAnswer: 34", "34") == {"score": 1.0, "acc": 1.0}
    assert reward.compute_score("math_dapo", "Answer: 35", "34") == {"score": 0.0, "acc": 0.0}
    assert reward.compute_score("math_dapo", "no answer", "34")["score"] == 0.0


TASK = {"id": "a", "issue": "mend it", "image": "img", "folder": "/repo", "tests": "sh check.sh", "test_patch": ""}


def test_tasks_become_rows_and_a_broken_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps({**TASK, "id": str(i)}) for i in range(4)))
    command = [sys.executable, SWE / "data.py", "--tasks", file, "--out", tmp_path, "--val", "1"]
    subprocess.run(command, env=os.environ | child_environment(), check=True)
    rows = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 3 and rows[0]["extra_info"]["tests"] == "sh check.sh"
    assert "tests" not in rows[0]["prompt"][0]["content"]
    file.write_text(json.dumps({**TASK, "image": ""}))
    done = subprocess.run(command, env=os.environ | child_environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "line 1 has no image" in done.stderr


DOCKER = """#!/bin/sh
# `docker run ... -w FOLDER IMAGE timeout SECONDS bash -s`, without a container: a fresh copy of the repository
[ "$BROKEN" = yes ] && exit 125
rm -rf "$BASE/judged" && cp -r "$BASE/repository" "$BASE/judged" && cd "$BASE/judged" && exec bash -s
"""
MINI = """#!/bin/sh
# takes mini's options; submits the patch in $PATCH
cat > trajectory.json < "$PATCH"
grep -q '"image": "img"' container.yaml
"""


@pytest.mark.parametrize(
    ("line", "broken", "reward"),
    [("right", "no", 1.0), ("wrong", "no", 0.0), (None, "no", 0.0), ("right", "yes", None)],
)
def test_a_session_is_judged_in_a_fresh_copy(
    line: str | None, broken: str, reward: float | None, tmp_path: Path
) -> None:
    repository, tools = tmp_path / "repository", tmp_path / "bin"
    repository.mkdir()
    tools.mkdir()
    (repository / "answer.txt").write_text("bug\n")
    (repository / "check.sh").write_text("grep -q right answer.txt\n")
    patch = f"--- a/answer.txt\n+++ b/answer.txt\n@@ -1 +1 @@\n-bug\n+{line}\n" if line else ""
    (tmp_path / "submitted.json").write_text(json.dumps({"info": {"submission": patch}, "messages": []}))
    for name, text in {"docker": DOCKER, "mini": MINI}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {
        "PATH": f"{tools}:/bin:/usr/bin",
        "BASE": str(tmp_path),
        "PATCH": str(tmp_path / "submitted.json"),
        "BROKEN": broken,
    }
    info = {key: TASK[key] for key in ("image", "folder", "tests", "test_patch")}
    task = {"prompt": [{"role": "user", "content": "mend it"}], "extra_info": info}
    done = subprocess.run(
        [tools / "python", "-I", SWE / "episode.py"],
        input=json.dumps(task), text=True, cwd=scratch, env=environment, capture_output=True,
    )  # fmt: skip
    found = scratch / "reward.json"
    assert (json.loads(found.read_text())["reward"] if found.exists() else None) == reward, done.stderr
    assert done.returncode == (1 if reward is None else 0)
