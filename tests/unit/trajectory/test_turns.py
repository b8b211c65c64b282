"""What a turn answered, and which turn gets which reward."""

from __future__ import annotations

from typing import Any

import pytest
from support.trajectory import session, turn

from seamless_verl.trajectory.turns import TurnNote, observation_of, turn_notes, turn_reward_name

ASKED = {"role": "user", "content": "q"}


def says(text: str = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str, call: str = "x") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call}


def seen(*messages: dict[str, Any]) -> int:
    return observation_of({"path": "/v1/chat/completions", "messages": list(messages)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param([ASKED, says("a"), tool("1")], [ASKED, says("b"), tool("1")], id="what the model said before"),
        pytest.param([ASKED, says(), tool("1", "x")], [ASKED, says(), tool("1", "y")], id="ids of calls"),
        pytest.param([ASKED, says(), tool("1")], [tool("2"), says(), says(), tool("1")], id="earlier observations"),
    ],
)
def test_observations_are_equal_whatever(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert seen(*one) == seen(*other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param([ASKED, says(), tool("1")], [ASKED, says(), tool("2")], id="the last result"),
        pytest.param([ASKED, says(), tool("1"), tool("2")], [ASKED, says(), tool("0"), tool("2")], id="one of two"),
        pytest.param([ASKED, says(), tool("1")], [ASKED, says(), {"role": "user", "content": "1"}], id="whose it is"),
        pytest.param([{"role": "system", "content": "s"}, ASKED], [ASKED], id="all of a first request"),
        pytest.param([ASKED, says("a")], [ASKED, says("b")], id="the beginning of a reply that is to be continued"),
        pytest.param([ASKED, says(), tool("1"), says("a")], [ASKED, says(), tool("2"), says("a")], id="before it"),
        pytest.param([{"role": "user", "content": [{"image": "i"}]}], [{"role": "user", "content": []}], id="images"),
    ],
)
def test_observations_differ_by(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert seen(*one) != seen(*other)


def test_a_plain_completion_is_its_own_observation() -> None:
    own = {"gateway": {"attempt": 1}, "path": "/v1/completions"}
    assert observation_of({"prompt": "p", **own}) == observation_of({"prompt": "p"}) != observation_of({"prompt": "q"})


def test_an_observation_is_the_same_in_every_process() -> None:
    assert seen(ASKED) == -2579135031233783548


def test_turns_have_their_places_and_their_own_rewards() -> None:
    """Of four turns the second and the fourth have no token that is trained: theirs go to the turns before."""
    record = session(
        turn("a", [1], [2], messages=[ASKED]),
        turn("b", [1, 2, 3], [4], messages=[ASKED, says(), tool("1")]),
        turn("c", [1, 2, 5], [6], messages=[ASKED, says(), tool("2")]),
        turn("d", [1, 2, 5, 6, 7], [8]),
    )
    rewards = {turn_reward_name(name): value for name, value in zip("abcd", [0.5, 1.0, 2.0, 4.0], strict=True)}
    rewards |= {"reward": 9.0, turn_reward_name("c", "speed"): 16.0, turn_reward_name("e"): 32.0}
    notes = turn_notes(record.tree, ["c", "a"], rewards)
    first, third = seen(ASKED), seen(ASKED, says(), tool("2"))
    assert notes == {"a": TurnNote(0, first, 1.5), "c": TurnNote(2, third, 6.0)}
    assert turn_notes(record.tree, ["c"], rewards)["c"].reward == 7.5, "what is before the first one is not lost"
    assert turn_notes(record.tree, [], rewards) == {}
