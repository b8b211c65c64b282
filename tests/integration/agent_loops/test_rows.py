"""The weight version and the turn of every token, also in conversations that an agent loop joins of generations."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

pytestmark = pytest.mark.integration
GENERATED = "generated_versions"


def output(mask: list[int], **extra: Any) -> AgentLoopOutput:
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    ids = list(range(len(mask)))
    metrics = AgentLoopMetrics()
    return AgentLoopOutput(
        prompt_ids=[1], response_ids=ids, response_mask=mask, num_turns=2, metrics=metrics, extra_fields=extra
    )


def test_a_loop_of_several_turns_has_the_version_of_each_token() -> None:
    """As verl's tool agent loop does it: the first turn's fields are kept, and a tool's tokens are in between."""
    from seamless_verl.agent_loops.llm_client import Versions, output_of
    from seamless_verl.agent_loops.rows import versions_of
    from seamless_verl.data_plane.settings import Generated

    versions = Versions()
    kept: dict[str, Any] = {}
    for made in ([3, 3], [3, 4, 4]):
        versions.extend(made)
        turn = output_of(Generated([1] * len(made), [0.0] * len(made), made, "stop"), versions)
        kept = kept or dict(turn.extra_fields)
    found = versions_of(output([1, 1, 0, 0, 1, 1, 1], **kept))
    assert found == [3, 3, -1, -1, 3, 4, 4]


@pytest.mark.parametrize(
    ("mask", "extra", "expected"),
    [
        pytest.param([1, 0, 1], {"weight_version": [2, -1, 5]}, [2, -1, 5], id="a session's column"),
        pytest.param([1, 0, 1], {GENERATED: [2, 5, 5, 5]}, [2, -1, 5], id="cut at the longest response"),
        pytest.param([1, 0, 1], {GENERATED: [4], "min_global_steps": 4}, [4, -1, 4], id="the rest is of the oldest"),
        pytest.param([1, 1], {}, [-1, -1], id="no version"),
    ],
)
def test_a_token_without_a_version_has_the_oldest(mask: list[int], extra: dict[str, Any], expected: list[int]) -> None:
    from seamless_verl.agent_loops import rows

    assert rows.GENERATED_VERSIONS == GENERATED
    assert rows.versions_of(output(mask, **extra)) == expected


def test_versions_are_dropped_with_their_conversation() -> None:
    from seamless_verl.agent_loops.llm_client import SeamlessClient, Versions

    versions = SeamlessClient.conversations.setdefault("a", Versions([1]))
    assert SeamlessClient.conversations["a"] is versions
    del versions
    gc.collect()
    assert "a" not in SeamlessClient.conversations


def test_each_token_has_its_turn_in_a_session_with_a_branch() -> None:
    """The second row begins behind what the first turn generated, and its turn is the session's second."""
    from support.trajectory import session, turn

    from seamless_verl.agent_loops.rows import outputs_of, turns_of
    from seamless_verl.data_plane.finished_sessions import FinishedSession
    from seamless_verl.trajectory.policies import TrainAll
    from seamless_verl.trajectory.sequences import assemble
    from seamless_verl.trajectory.turns import turn_notes, turn_reward_name

    asked: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    again = [*asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": "sure?"}]
    other = [*asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": "no?"}]
    record = session(
        turn("a", [1], [2, 3], messages=asked),
        turn("b", [1, 2, 3, 4], [5], messages=other),
        turn("c", [1, 2, 3, 6, 7], [8, 9], messages=again),
        turn("d", [1, 2, 3, 4, 5, 6, 7], [8], messages=again),
    )
    rewards = {turn_reward_name("a"): 0.5, turn_reward_name("c"): -1.0}
    sequences = assemble(record, TrainAll(), 0).sequences
    notes = turn_notes(record.tree, "abcd", rewards)
    finished = FinishedSession(sequences, {}, 4, trained_turns=notes)
    assert not any("turn" in made.extra_fields for made in outputs_of(finished, 1.0, 0))
    rows = [turns_of(made) for made in outputs_of(finished, 1.0, 0, of_turns=True)]
    a, b, c, d = (notes[name].observation for name in "abcd")
    assert len({a, b, c}) == 3 and c == d
    assert [row["turn"].tolist() for row in rows] == [[0, 0, -1, 1, -1, -1, 3], [2, 2]]
    assert [row["observation"].tolist() for row in rows] == [[a, a, 0, b, 0, 0, d], [c, c]]
    assert [row["turn_reward"].tolist() for row in rows] == [[0.5, 0.5, 0, 0, 0, 0, 0], [-1, -1]]


def test_a_row_may_be_written_with_its_old_logprobs() -> None:
    from seamless_verl.agent_loops.rows import has_old_logprobs, rows_of, with_old_logprobs

    worker: Any = SimpleNamespace(
        compares_turns=False,
        _compute_multi_modal_inputs=lambda *_: {},
        _compute_position_ids=lambda ids, *_: ids,
    )
    made, without = output([1, 1]), output([1])
    made.response_logprobs = [-0.5, -1.5]
    rows = rows_of([made, without], worker, {"uid": "a", "session_id": 0, "global_steps": 1})
    assert not any(has_old_logprobs(row.tag) or "old_log_probs" in row.columns for row in rows)
    written, lacking = map(with_old_logprobs, rows)
    assert written.columns["old_log_probs"].tolist() == [-0.5, -1.5] and has_old_logprobs(written.tag)
    assert lacking == rows[1], "it has no logprobs"
    assert not has_old_logprobs(written.tag | {"is_padding": True}), "verl's padding has the tag of the first row"


def test_a_conversation_of_verls_own_loops_is_one_turn() -> None:
    from seamless_verl.agent_loops.rows import turns_of

    columns = turns_of(output([1, 0, 1]))
    assert columns["turn"].tolist() == [0, -1, 0]
    assert columns["observation"].tolist() == [0, 0, 0] and columns["turn_reward"].tolist() == [0.0, 0.0, 0.0]


def test_a_conversation_of_verls_own_loops_keeps_the_routes_of_what_it_repeats() -> None:
    """As verl's tool agent loop uses it: the last turn's routes are those of the whole conversation."""
    from support.routes import marks, rows_of

    from seamless_verl.agent_loops.llm_client import Versions, output_of
    from seamless_verl.data_plane.settings import Generated

    def made(ids: list[int], *rows: int) -> Generated:
        return Generated(ids, [0.0] * len(ids), [1] * len(ids), "stop", rows_of(*rows) if rows else None)

    versions = Versions()
    assert versions.routes_from([1, 2, 3]) == 1
    versions.add([1, 2, 3], made([10, 11], 2, 3, 10, 11), versions.known(1))
    for prompt, first in (([1, 2, 3, 10, 11, 4], 5), ([1, 2, 3, 10, 9], 4), ([1, 2], 2), ([5], 1)):
        assert versions.routes_from(prompt) == first
    later, known = made([12], 104, 112), versions.known(5)
    versions.add([7], made([8], 8), versions.known(1))  # by another call, while this one runs
    versions.add([1, 2, 3, 10, 11, 4], later, known)
    assert marks(output_of(later, versions).routed_experts) == [2, 3, 10, 11, 104, 112]
    with pytest.raises(ValueError, match="routes were asked for"):
        versions.add([1, 2, 3], made([10]), versions.known(1))
    plain = Versions()
    plain.add([1], made([2]), None)
    assert output_of(made([2]), plain).routed_experts is None


def test_a_row_has_verls_column_of_routes_and_a_row_without_them_has_none() -> None:
    """verl fills up the last position, whose route is in no forward pass."""
    import numpy as np
    import torch

    routed = output([1, 1, 1])
    routed.routed_experts = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    column = routed.as_dict()["routed_experts"]
    assert column.dtype == torch.int16 and column.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]], [[0, 0]]]
    assert "routed_experts" not in output([1, 1, 1]).as_dict()
