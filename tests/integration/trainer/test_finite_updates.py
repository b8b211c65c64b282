"""Numbers that are not finite never become weights, in whatever column, loss or gradient they are, and on any rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import child_environment

pytestmark = pytest.mark.integration
COMMAND = ("-W", "ignore", "-c", "from support.finite_process import main; main()")
SAMPLE = "The worst is prompt u1, session 0, row 0"
THREE = ["gradient", "large", "gradient"]


def trained(
    folder: Path,
    model: Path,
    faults: list[str],
    *,
    world: int = 2,
    critic: bool = False,
    guarded: bool = True,
    **more: Any,
) -> tuple[list[dict[str, Any]], str]:
    """What each rank found after an update with each of these faults, '' is none; and what they logged."""
    folder.mkdir()
    case = {"model": str(model), "out": str(folder), "faults": faults, "world": world, "critic": critic}
    (folder / "case.json").write_text(json.dumps(case | {"guarded": guarded} | more))
    ranks = [
        subprocess.Popen(
            [sys.executable, *COMMAND, str(folder / "case.json"), str(rank)], env=child_environment(),
            stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)], "".join(outputs)


@pytest.mark.parametrize(
    ("layout", "columns", "critic"),
    [({}, ["advantages", "old_log_probs"], False), ({"pp": 2}, ["advantages"], False), ({"tp": 2}, ["returns"], True)],
    ids=["dp2", "pp2", "critic-tp2"],
)
def test_what_is_not_finite_makes_no_step_on_any_rank(
    nano: Path, tmp_path: Path, layout: dict[str, int], columns: list[str], critic: bool
) -> None:
    """One rank has it: a data parallel one, the last stage, or that of a part of a weight. Between are good updates."""
    faults = ["", *columns, "", "loss", "", "gradient", "", *THREE]
    ranks, log = trained(tmp_path / "run", nano / "model", faults, critic=critic, **layout)
    assert [rank["looks"] for rank in ranks] == [[True, False]] * 2, "of the weights, on all ranks, for one's NaN"
    for rank in ranks:
        updates = rank["updates"]
        assert [update["moved"] for update in updates] == [not fault for fault in faults]
        assert all(update["finite"] for update in updates)
        rates = [1e-3 * (1 - 0.1 * number) for number in range(1, len(faults))]
        assert [update["lr"] for update in updates[:-1]] == pytest.approx(rates), "its schedule counts updates"
        assert [bool(update["error"]) for update in updates] == [False] * (len(faults) - 1) + [True]
        assert [update["skipped"] for update in updates[:-1]] in (
            [int(bool(fault)) for fault in faults[:-1]],
            [None] * (len(faults) - 1),
        ), "a rank without the loss reports nothing"
        assert "That was the update number 3 in a row. Nothing of these steps is in the weights" in updates[-1]["error"]
    lines = [line for line in log.splitlines() if "made no optimizer step, for its" in line]
    assert len(lines) == len([fault for fault in faults if fault]), "one rank says it"
    assert all(f"The {'critic' if critic else 'actor'} made" in line for line in lines)
    for line, column in zip(lines, columns, strict=False):
        assert f"for its loss is not finite. {SAMPLE}: its {column} has nan at place 2" in line
    assert f"for its loss is not finite. {SAMPLE}: its loss is not finite" in lines[len(columns)]
    assert "for its gradient norm is not finite. No sample's columns or loss are the cause" in lines[-3]
    if not critic:
        assert f"The largest advantage, 1e+30, is that of {SAMPLE.removeprefix('The worst is ')}" in lines[-2]


def test_what_was_left_out_left_nothing_behind(nano: Path, tmp_path: Path) -> None:
    """After it the weights are those of a run that never had it: no gradient, moment or count of it is left."""
    (good,), _ = trained(tmp_path / "good", nano / "model", ["", ""], world=1, decay="constant")
    (bad,), _ = trained(tmp_path / "bad", nano / "model", ["", "gradient", "loss", ""], world=1, decay="constant")
    assert bad["updates"][-1] == good["updates"][-1] != good["updates"][0]


def test_an_update_of_three_epochs_without_a_step_counts_once(nano: Path, tmp_path: Path) -> None:
    faults = ["advantages", "advantages", "", "advantages", ""]
    (rank,), _ = trained(tmp_path / "run", nano / "model", faults, world=1, epochs=3)
    assert [update["moved"] for update in rank["updates"]] == [not fault for fault in faults]
    assert [update["skipped"] for update in rank["updates"]] == [3 * bool(fault) for fault in faults]


def test_without_the_guard_one_number_is_in_every_weight(nano: Path, tmp_path: Path) -> None:
    (rank,), _ = trained(tmp_path / "run", nano / "model", ["", "advantages"], world=1, guarded=False)
    assert [update["finite"] for update in rank["updates"]] == [True, False], "the tests above could not fail"


@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
def test_a_mini_batch_without_a_token_to_train_moves_nothing_and_ends_no_run(
    nano: Path, tmp_path: Path, critic: bool
) -> None:
    """However many follow one another: it is no number that is not finite, and the next ones have tokens."""
    faults = ["", *["masked"] * 4, ""]
    ranks, log = trained(tmp_path / "run", nano / "model", faults, critic=critic)
    for rank in ranks:
        assert [update["moved"] for update in rank["updates"]] == [not fault for fault in faults]
        assert [update["error"] for update in rank["updates"]] == [""] * len(faults)
        assert [update["skipped"] for update in rank["updates"]] == [0, 1, 1, 1, 1, 0]
    assert log.count("its mini-batch has no token to train") == 4 and "The worst is" not in log
