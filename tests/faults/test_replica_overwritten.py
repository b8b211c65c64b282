"""A replica whose weights are overwritten in a training run: one line says so, and the run goes on with all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.job import AGENT, Job, check_record
from support.paths import DATA

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = 10  # some may be over before this test has read of the fault
OPTIONS = AGENT | {
    "trainer.n_gpus_per_node": 2,
    "trainer.total_training_steps": STEPS,
    "seamless.max_staleness": 0,
    "seamless.seal": "full",
    "seamless.restarts": 1,
    "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / "overwriting_loops.yaml",
    "actor_rollout_ref__rollout__agent__default_agent_loop": "overwriting",
}
FOUND = re.compile(
    r"replica-1: SealError: version (\d+), shard 0: model\.layers\.1\.mlp\.down_proj\.weight"
    r" \(from weight model\.layers\.1\.mlp\.down_proj\.weight\): not what was staged\."
    r" What fitted last: version (\d+)\. (It [\w ]+)"
)


@pytest.mark.parametrize("says", [["It loads again"], ["It loads again", "It is ended"]], ids=["once", "twice"])
def test_overwritten_weights_are_named_and_the_run_goes_on(nano: Path, tmp_path: Path, says: list[str]) -> None:
    overwritten, held = tmp_path / "loads", tmp_path / "held"
    env = {"LOADS_OVERWRITTEN": str(overwritten), "HELD_WHILE_EXISTS": str(held)}
    env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the function that overwrites
    job = Job(tmp_path, nano, OPTIONS, env).start()
    job.wait_for("step:2 ")
    (number := tmp_path / "number").write_text(str(len(says)))
    number.rename(overwritten)
    job.wait_for(says[-1])
    if says[-1] == "It is ended":  # no agent begins before it is back, so that the run does not end earlier
        held.touch()
        job.wait_for("is back after")
        held.unlink()
    steps = job.finish().metrics()
    found = FOUND.findall(job.log())
    assert [then for *_, then in found] == says
    assert all(int(fitted) == int(version) - 1 >= 1 for version, fitted, _ in found)
    assert steps.keys() == set(range(1, STEPS + 1))
    assert (steps[STEPS]["fleet/dead"], steps[STEPS]["replicas/returned"]) == (0, len(says) - 1)
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == 0
        dropped = sum(value for name, value in metrics.items() if name.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped > 0
    check_record(job, sessions=STEPS * 8 * 4)
