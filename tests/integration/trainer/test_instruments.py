"""Entropy and the difference to the engine, measured in the update: as a forward pass before it would have them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import child_environment

pytestmark = pytest.mark.integration
COMMAND = ("-W", "ignore", "-c", "from support.instruments_process import main; main()")
LENGTHS = [30, 41, 22, 35]
OF_A_FORWARD_PASS = {
    *("actor/entropy", "training/rollout_logprob_diff_max", "training/rollout_actor_probs_pearson_corr"),
    *(f"training/rollout_probs_diff_{name}" for name in ("valid", "max", "mean", "std")),
    *(f"rollout_corr/{name}" for name in ("training_ppl", "training_log_ppl", "kl", "k3_kl", "rollout_ppl")),
    *(f"rollout_corr/{name}" for name in ("rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max")),
    *(f"rollout_corr/{name}" for name in ("log_ppl_diff_min", "ppl_ratio", "chi2_token", "chi2_seq")),
    *(f"seamless/agreement/{kind}/{name}" for kind in ("plain", "grammar") for name in ("tokens", "mean", "max")),
}
"""verl's 19 without `bypass_mode`, and ours."""


def result_of(nano: Path, folder: Path, case: dict[str, int]) -> Any:
    """What the first rank that has the loss found, of two."""
    whole = {"model": str(nano / "model"), "out": str(folder), "world": 2, "lengths": LENGTHS} | case
    (folder / "case.json").write_text(json.dumps(whole))
    ranks = [
        subprocess.Popen(
            [sys.executable, *COMMAND, str(folder / "case.json"), str(rank)], env=child_environment(),
            stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    return json.loads(next(iter(sorted(folder.glob("rank*.json")))).read_text())


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {}], ids=["tp2", "pp2", "dp2"])
def test_an_update_measures_what_a_forward_pass_does(nano: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    found = result_of(nano, tmp_path, layout)
    metrics, (agreement, entropy, correlation) = found["metrics"], found["expected"]
    assert metrics.keys() - found["unmeasured"].keys() == OF_A_FORWARD_PASS
    for name, value in agreement.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3), name
    assert metrics["actor/entropy"] == pytest.approx(entropy, rel=2e-2), "of a quarter of the tokens"
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(correlation, abs=0.1)
    assert 0 < metrics["actor/entropy"] < 6


def test_a_student_learns_the_teachers_most_likely_tokens(nano: Path, tmp_path: Path) -> None:
    """verl's top-k loss, which its engine calls with the logits within the forward pass, here in two parts."""
    updates = result_of(nano, tmp_path, {"tp": 2, "distils": 8})
    losses = [metrics["actor/distillation/loss"] for metrics in updates]
    assert losses[-1] < 0.9 * losses[0] and all(metrics["actor/grad_norm"] > 0 for metrics in updates)
