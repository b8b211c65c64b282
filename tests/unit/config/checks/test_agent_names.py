"""Which loop a prompt gets is known before a run: a name that no loop has is refused, an unused loop is warned of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import Table, parquet
from support.config import ROW, assert_refused, refused, tiny_plain

from seamless_verl.config import preflight
from seamless_verl.config.checks.agents import AGENT, DEFAULT, LOOPS

CALLABLE = "seamless_verl.agent_loops.loops.CallableAgentLoop"
TRAIN, VAL = "data.train_files", "data.val_files"
ON = "seamless.gateway.enabled=true"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agent.py").write_text("async def run(task, endpoint): ...\n")
    loop = {"name": "mine", "_target_": CALLABLE, "agent": "agent.py:run"}
    (tmp_path / "loops.yaml").write_text(yaml.safe_dump([loop]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, names: Sequence[str | None] | None, *overrides: str, key: str = TRAIN) -> dict[str, Any]:
    """A run with the loop `mine`, and data whose rows name these loops in turn; None: without the column."""
    tree = tiny_plain(folder, ON, f"{LOOPS}=loops.yaml", *overrides)
    column = {"agent_name": [names[i % len(names)] for i in range(64)]} if names else {}
    file = folder / "named.parquet"
    parquet.write_table(Table.from_pydict({**{name: [value] * 64 for name, value in ROW.items()}, **column}), file)
    tree["data"][key.removeprefix("data.")] = str(file)
    return tree


def warnings(tree: dict[str, Any], **how: bool) -> list[str]:
    return preflight(tree, devices=1, accelerator=False, **how)


def test_a_name_that_no_loop_has(folder: Path) -> None:
    for key in (TRAIN, VAL):
        tree = config(folder, ["mine", "mine", "nothere", "tool_agent"], f"{DEFAULT}=mine", key=key)
        file = str(folder / "named.parquet")
        assert_refused(tree, key, file, "There are single_turn_agent, tool_agent, mine. Correct the data, or name")
        (problem,) = refused(tree)
        assert "column agent_name has 'nothere' in row 2 (from 0)" in problem.reason
    assert_refused(config(folder, ["mime"]), TRAIN, file, "Did you mean mine? There are single_turn_agent,")


def test_a_column_of_categories_is_read_and_one_of_lists_left_to_the_run(folder: Path) -> None:
    tree = config(folder, ["mine", "nothere"], f"{DEFAULT}=mine")
    file = folder / "named.parquet"
    table = parquet.read_table(file)
    at = table.schema.get_field_index("agent_name")
    parquet.write_table(table.set_column(at, "agent_name", table["agent_name"].dictionary_encode()), file)
    (problem,) = refused(tree)
    assert "column agent_name has 'nothere' in row 1 (from 0)" in problem.reason
    parquet.write_table(table.set_column(at, "agent_name", [[["mine"]] * len(table)]), file)
    preflight(tree, devices=1, accelerator=False)


def test_loops_that_an_imported_module_registers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = config(folder, ["nothere"])
    assert refused(tree)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_package")
    assert not [warning for warning in warnings(tree) if "agent_name" in warning]


def test_each_name_is_said_once_and_not_too_many(folder: Path) -> None:
    names = [problem.reason.split("'")[1] for problem in refused(config(folder, ["a", "b", "a", "mine"]))]
    assert names == ["a", "b"]
    assert len(refused(config(folder, [f"loop_of_{i}" for i in range(64)]))) == 4


def test_a_row_without_a_name_runs_no_loop(folder: Path) -> None:
    tree = config(folder, ["mine", None], f"{DEFAULT}=mine")
    assert_refused(tree, TRAIN, str(folder / "named.parquet"), "Write one into each row (single_turn_agent, tool_agent")
    assert "no value in row 1" in refused(tree)[0].reason


def test_names_are_left_to_code_that_may_know_others(folder: Path) -> None:
    for own in (f"{AGENT}.agent_loop_manager_class=my.Manager", "actor_rollout_ref.model.external_lib=my.lib"):
        assert warnings(config(folder, ["nothere"], own)) == []
    (warning,) = warnings(config(folder, ["mine", "nothere"], "data.train_max_samples=8"))
    assert "'nothere' in row 1" in warning


@pytest.mark.parametrize("names", [None, ["mine"], ["tool_agent", "mine"]])
def test_a_loop_of_the_users_that_runs(folder: Path, names: list[str] | None) -> None:
    assert warnings(config(folder, names, *([f"{DEFAULT}=mine"] if names is None else []))) == []


def test_no_default_and_no_column(folder: Path) -> None:
    (warning,) = warnings(config(folder, None))
    assert warning.startswith(f"{DEFAULT}='single_turn_agent': ") and "has no column agent_name" in warning
    assert f"no prompt runs a loop of {LOOPS} (mine). Set {DEFAULT}=mine, or write mine into" in warning
    assert warnings(config(folder, None), unmade=True) == []


def test_the_column_wins_over_the_default(folder: Path) -> None:
    (warning,) = warnings(config(folder, ["tool_agent"], f"{DEFAULT}=mine"))
    assert warning.startswith(f"{TRAIN}=") and f"has tool_agent, and wins over {DEFAULT}=mine" in warning
    assert f"Write mine into the data's column agent_name, or remove the column and set {DEFAULT}=mine" in warning
    (same,) = warnings(config(folder, ["single_turn_agent"]))
    assert "has single_turn_agent, and wins over" in same


def test_data_that_shows_no_columns_brings_no_warning(folder: Path) -> None:
    (folder / "train.jsonl").write_text("{}\n")
    tree = config(folder, None)
    tree["data"]["train_files"] = [tree["data"]["train_files"], str(folder / "train.jsonl")]
    assert warnings(tree) == []


@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        ("agent {question} {prompt_file} {session} {uid} {index} {prompt} {data_source} {{nothere}}", None),
        ("agent {reward_model.ground_truth} {extra_info}", None),
        ("agent {nothere}", "{nothere} is not a column of data.train_files="),
        (["agent", "--", "{nothere.x}", 3], "{nothere.x} is not a column of data.train_files="),
        ("agent {agent_name}", "{agent_name} is not a column of data.train_files="),
        ("agent {reward_model.style} {reward_model.truth}", "is not a field of the column reward_model of data."),
    ],
)
def test_fields_of_a_command(folder: Path, command: object, lacks: str | None) -> None:
    entry = {"name": "mine", "_target_": CALLABLE.replace("Callable", "Command"), "command": command}
    other = {**entry, "name": "other", "command": "agent {of_other_data}"}
    tree = config(folder, ["mine"])
    (folder / "loops.yaml").write_text(yaml.safe_dump([entry, other]))
    found = warnings(tree)
    assert len(found) == (lacks is not None) and warnings(tree, unmade=True) == []
    assert lacks is None or (lacks in found[0] and found[0].startswith(f"{LOOPS}[0].command="))


def test_fields_of_a_folder(folder: Path) -> None:
    """Those that only the command line has are none of its."""
    entry = {"name": "mine", "_target_": CALLABLE.replace("Callable", "Command"), "command": "true"}
    tree = config(folder, ["mine"])
    (folder / "loops.yaml").write_text(yaml.safe_dump([{**entry, "folder": "repos/{question}"}]))
    (warning,) = warnings(tree)
    assert warning.startswith(f"{LOOPS}[0].folder='repos/{{question}}': {{question}} is not a column")
