"""The weight version of every token, also in conversations that an agent loop joins from several generations."""

from __future__ import annotations

import gc
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
    from seamless_verl.agent_loops.rows import VersionedOutput
    from seamless_verl.data_plane.actor import Generated

    versions = Versions()
    kept: dict[str, Any] = {}
    for made in ([3, 3], [3, 4, 4]):
        versions.extend(made)
        turn = output_of(Generated([1] * len(made), [0.0] * len(made), made, "stop"), versions)
        kept = kept or dict(turn.extra_fields)
    found = VersionedOutput.of(output([1, 1, 0, 0, 1, 1, 1], **kept)).as_dict()["weight_version"].tolist()
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
