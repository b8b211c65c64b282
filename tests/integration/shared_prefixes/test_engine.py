"""verl's Megatron engine with its own loss: what sequences share computed once, against each sequence by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.paths import child_environment

from seamless_verl.shared_prefixes.ranks import SAVED, TOKENS

pytestmark = pytest.mark.integration
GROUPS = {"prompts": [24, 3, 40, 16], "samples": 4, "answer": 9, "ids": 256, "tokens": 4096, "updates": 2}


def ranks_of(folder: Path, model: Path, **more: Any) -> list[dict[str, Any]]:
    """What both engines computed, on each rank."""
    case = {"model": str(model), "out": str(folder), "dtype": "float32", **GROUPS, **more}
    (folder / "case.json").write_text(json.dumps(case))
    command = [sys.executable, "-W", "ignore", "-c", "from support.sharing_process import main; main()"]
    begun = [
        subprocess.Popen(
            [*command, str(folder / "case.json"), str(rank)],
            env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(case.get("world", 1))
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in begun]
    assert not any(process.returncode for process in begun), "\n".join(said)[-4000:]
    (folder / "said.txt").write_text("\n".join(said))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(len(begun))]


def engines(folder: Path, model: Path, **more: Any) -> dict[str, Any]:
    return ranks_of(folder, model, **more)[0]


def assert_equal(alone: dict[str, Any], shared: dict[str, Any]) -> None:
    """Outputs, losses, gradients and weights are the same but for the order of summation."""
    assert shared["obstacle"] is None and shared["sharing"]
    assert alone["outputs"].keys() == shared["outputs"].keys()
    for name, rows in alone["outputs"].items():
        for row, other in zip(rows, shared["outputs"][name], strict=True):
            assert row.shape == other.shape
            read = row.shape[0] - 1 if name == "values" else GROUPS["answer"]
            torch.testing.assert_close(row[-read - 1 : -1], other[-read - 1 : -1], rtol=1e-5, atol=1e-5, msg=name)
            assert not other[: -read - 1].any(), "no logits are made of prompts"
    for one, other in zip(alone["updates"], shared["updates"], strict=True):
        for number in one.keys() & {"loss", "gradient"}:
            # terms of the size of 1 and of either sign cancel in a loss
            assert other[number] == pytest.approx(one[number], rel=1e-5, abs=1e-6)
    for name, weight in alone["updates"][-1]["weights"].items():
        # Adam divides by the root of the mean square: a gradient that is noise, such as of an id that few tokens have,
        # moves its weight as far as any other. Gradients themselves are compared in test_exactness.py.
        differs = ~torch.isclose(weight, shared["updates"][-1]["weights"][name], rtol=1e-4, atol=1e-4)
        assert float(differs.double().mean()) < 1e-4, name


def test_two_updates_and_all_outputs_are_those_of_each_sequence_alone(nano: Path, tmp_path: Path) -> None:
    found = engines(tmp_path, nano / "model")
    assert_equal(found["alone"], found["shared"])
    assert found["alone"]["outputs"].keys() == {"log_probs", "entropy", "sum_pi_squared"}
    tokens = sum(4 * (prompt + 9) for prompt in GROUPS["prompts"])
    for one, other in zip(found["alone"]["updates"], found["shared"]["updates"], strict=True):
        assert one["gradient"] > 0
        assert other["metrics"][TOKENS] == [tokens]
        assert other["metrics"][SAVED] == [pytest.approx(3 * sum(GROUPS["prompts"]), abs=0.01 * tokens)]
        assert SAVED not in one["metrics"]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=["alone", "sequence_parallel", "pipeline"])
def test_a_critic_says_the_same_of_each_token(nano: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    world = max([1, *layout.values()])
    for rank in ranks_of(tmp_path, nano / "model", model_type="value_model", world=world, **layout):
        assert_equal(rank["alone"], rank["shared"])
        assert rank["alone"]["outputs"].keys() <= {"values"}


def test_a_model_that_reads_positions_otherwise_is_found_before_the_first_pass(nano: Path, tmp_path: Path) -> None:
    (rank,) = ranks_of(tmp_path, nano / "model", misread=True, updates=1)
    assert rank["shared"]["obstacle"] is None and not rank["shared"]["sharing"]
    one, other = (rank[name]["updates"][0] for name in ("alone", "shared"))
    assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())
    assert "seamless.shared_prefixes=auto computes each sequence alone" in (tmp_path / "said.txt").read_text()


def test_micro_batches_keep_groups_whole_and_count_what_they_compute(nano: Path, tmp_path: Path) -> None:
    """Of at most 100 computed tokens: of groups of 60, 39, 76 and 52 two fit together."""
    found = engines(tmp_path, nano / "model", tokens=100, shuffled=True)
    assert_equal(found["alone"], found["shared"])
    for other in found["shared"]["updates"]:
        assert sorted(other["metrics"][SAVED]) == sorted([3 * (24 + 3), 3 * 40, 3 * 16])
        assert sorted(other["metrics"][TOKENS]) == sorted([4 * (33 + 12), 4 * 49, 4 * 25])


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}],
    ids=["two_data_ranks", "sequence_parallel", "pipeline", "sequence_parallel_in_a_pipeline"],
)
def test_ranks_compute_what_they_compute_of_each_sequence_alone(
    nano: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Where data is split, the ranks need different numbers of micro-batches."""
    world = max(2, layout.get("tp", 1) * layout.get("pp", 1))
    found = ranks_of(tmp_path, nano / "model", tokens=100, world=world, **layout)
    for rank in found:
        assert_equal(rank["alone"], rank["shared"])
    trained = [rank["shared"]["updates"] for rank in found if "metrics" in rank["shared"]["updates"][0]]
    assert trained
    for updates in trained:
        saved, tokens = (updates[0]["metrics"][name] for name in (SAVED, TOKENS))
        assert any(some > 0.3 * of for some, of in zip(saved, tokens, strict=True))


def test_micro_batches_in_which_nothing_is_shared_are_verls_own(nano: Path, tmp_path: Path) -> None:
    found = engines(tmp_path, nano / "model", samples=1, updates=1)
    one, other = (found[name]["updates"][0] for name in ("alone", "shared"))
    assert other["metrics"][SAVED] == [0]
    assert other["metrics"][TOKENS] == [sum(prompt + 9 for prompt in GROUPS["prompts"])]
    assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"lora": {"rank": 4, "alpha": 8}, "megatron_bridge": True}, "adapters"),
        ({"transformer": {"attention_dropout": 0.1}}, "dropout"),
        ({"transformer": {"window_size": [8, 0]}}, "a sliding window"),
        ({"transformer": {"softmax_type": "off-by-one"}}, "attention with sinks"),
    ],
    ids=["adapters", "dropout", "sliding_window", "sinks"],
)
def test_what_is_not_proven_is_named_and_computed_as_ever(
    nano: Path, tmp_path: Path, more: dict[str, Any], named: str
) -> None:
    found = engines(tmp_path, nano / "model", updates=1, **more)
    assert found["shared"]["obstacle"] == named
    assert SAVED not in found["shared"]["updates"][0]["metrics"]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Of the weights after the last update."""
    weights = [torch.cat([w.flatten() for w in found["updates"][-1]["weights"].values()]) for found in (one, other)]
    return float((weights[0] - weights[1]).norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ten_updates_stay_as_near_as_those_of_permuted_sequences(nano: Path, tmp_path: Path, dtype: str) -> None:
    """Of which only the order of summation differs too, if at fewer places. And the backward pass keeps less."""
    found = engines(tmp_path, nano / "model", dtype=dtype, updates=10, engines=3, counts=True)
    noise, seen = (distance(found["alone"], found[name]) for name in ("permuted", "shared"))
    sys.stdout.write(f"{dtype}: {seen:.3g} apart, {noise:.3g} if permuted\n")
    assert 0 < seen < 10 * noise  # seen: 2.7 and 6.2 in fp32, 1.5 in bf16
    kept = {name: found[name]["updates"][-1]["kept"] for name in ("alone", "shared")}
    sys.stdout.write(f"{dtype}: kept for the backward pass {kept}\n")
    assert kept["shared"] < 0.7 * kept["alone"]


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.parametrize(
    ("case", "least"),
    [
        ({"prompts": [512], "samples": 8, "answer": 64}, 1.5),  # seen: 2.4 to 3.8; 4.5 is the ratio of the tokens
        ({"prompts": [64], "samples": 8, "answer": 120}, 1.0),  # 30% shared; seen: 1.35 and 1.5
        ({"header": 320, "prompts": [40, 60], "samples": 8, "answer": 150}, 1.5),  # agents of one system prompt
    ],
    ids=["long_prompts", "short_prompts", "agents"],
)
def test_an_update_takes_less_time(nano: Path, tmp_path: Path, case: dict[str, Any], least: float) -> None:
    found = engines(tmp_path, nano / "model", dtype="bfloat16", tokens=8192, updates=6, **case)
    seconds = {name: median(one["seconds"] for one in found[name]["updates"][1:]) for name in ("alone", "shared")}
    sys.stdout.write(f"{case}: {seconds}, {seconds['alone'] / seconds['shared']:.2f} times as fast\n")
    assert seconds["alone"] > least * seconds["shared"]
