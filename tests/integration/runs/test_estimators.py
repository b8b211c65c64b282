"""Runs with each advantage estimator of this package, of agents whose tokens are on the run's account."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import AGENT, run

from seamless_verl.journal import JournalReader
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.tools.trajectories.recorded import recorded
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.turns import turn_reward_name

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.mark.parametrize("name", ["mc_grpo", "grpo_novelty", "hgpo"])
def test_an_estimator_trains_and_every_token_is_accounted_for(nano: Path, tmp_path: Path, name: str) -> None:
    options = AGENT | {
        "algorithm__adv_estimator": name,
        "actor_rollout_ref__rollout__n": 3,
        "trainer__total_training_steps": 2,
    }
    if name == "hgpo":
        options["actor_rollout_ref__rollout__agent__default_agent_loop"] = "credited"
    steps = run(tmp_path, nano, **options).metrics()
    assert steps.keys() == {1, 2}
    # which rewards an untrained model gets is chance: a median may have none below it in all groups of a step
    ends = [metrics[f"critic/advantages/{end}"] for metrics in steps.values() for end in ("min", "max")]
    assert -3 <= min(ends) <= 0 <= max(ends) <= 3 and any(ends)
    assert any(metrics["actor/grad_norm"] > 0 for metrics in steps.values())
    recorded_ends = advantages_in(tmp_path / "checkpoints" / "trajectories.sqlite")
    assert (min(recorded_ends), max(recorded_ends)) == pytest.approx((min(ends), max(ends)), abs=1e-5)
    last = steps[2]
    dropped = {key: value for key, value in last.items() if key.startswith("tokens/dropped/")}
    assert last["tokens/generated"] == last["tokens/trained"] + sum(dropped.values())
    pivots = sum(metrics.get("seamless/tokens/masked_as_pivot", 0) for metrics in steps.values())
    assert dropped["tokens/dropped/pivot"] == pivots == pivots_in(tmp_path / "checkpoints" / "trajectories.sqlite")
    if name == "mc_grpo":
        assert pivots >= 2 * 8, "each step has eight groups, with a pivot of one token or more each"
    elif name == "grpo_novelty":
        assert pivots == 0 and last["seamless/novelty/bonus"] >= 0
    else:
        assert pivots == 0 and any(0 < metrics["seamless/hgpo/compared"] <= 1 for metrics in steps.values())
        assert last["critic/score/max"] == last["critic/score/min"] == 0, "what is learned from is the turns' alone"
        assert turn_rewards_in(tmp_path / "checkpoints" / "trajectories.sqlite") >= 2 * 3 * 8 * 2


def pivots_in(journal: Path) -> int:
    """Tokens of sessions that were left out as pivots, by what the journal says of them."""
    reader, found = JournalReader(journal), 0
    for summary in reader.sessions():
        stored = reader.read(summary.session_id)
        assert stored is not None
        how = recorded(stored)
        assembly = assemble(rebuild_record(stored, all_calls=True), TrainAll(), how.version, how.limits)
        found += how.account(assembly.account).dropped.get(DropReason.PIVOT, 0)
    return found


def advantages_in(journal: Path) -> list[float]:
    """The least and the greatest advantage of each session that was trained, by the journal."""
    stored = [JournalReader(journal).read(summary.session_id) for summary in JournalReader(journal).sessions()]
    found = [recorded(one).advantage for one in stored if one is not None]
    return [end for one in found if one is not None for end in one[1:]]


def turn_rewards_in(journal: Path) -> int:
    """The number of rewards of turns in sessions that are on record with their turns."""
    stored = [JournalReader(journal).read(summary.session_id) for summary in JournalReader(journal).sessions()]
    names = {turn_reward_name(call.call_id) for one in stored if one is not None for call in one.calls}
    return sum(name in names for one in stored if one is not None for name in one.rewards)
