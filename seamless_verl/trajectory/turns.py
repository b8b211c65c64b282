"""The turns of a session for those who compare turns: what each one answered, and the rewards it was given itself.

The *observation* of a turn is what its agent sent that the model had not said: the messages of its request behind the
last message of the assistant before them, each as its role and content. Of a first turn that is the whole request, of a
later one the results of tools or what a user said. Ids of tool calls are left out, for they are drawn anew in each
session. Messages of the assistant at the very end, which a reply continues, are part of the observation. A request
without messages, a plain completion, is its own observation.

A reward for a turn is a reward of its session under a name of its own, `turn_reward_name`, so the journal has it as it
has the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from seamless_verl.trajectory.messages import ASSISTANT
from seamless_verl.trajectory.session import REWARD
from seamless_verl.trajectory.tree import Tree

NO_CONTENT = ("gateway", "path")  # of a stored request: no part of what the model read


@dataclass(frozen=True)
class TurnNote:
    """A turn that is in a training sequence: its place in the session, the hash of its observation, its own reward.

    Places are in the order in which turns ended.
    """

    place: int
    observation: int
    reward: float = 0.0


def turn_reward_name(turn_id: str, name: str = REWARD) -> str:
    """The name under which a session has a reward of one of its turns."""
    return f"{name}@{turn_id}"


def turn_notes(tree: Tree, trained: Iterable[str], rewards: Mapping[str, float]) -> dict[str, TurnNote]:
    """The turns of `trained`, which are those with tokens in training sequences, by id.

    `rewards` are those of the session by name. The reward of a turn without such a token goes to the last one before it
    that has some, or to the first one.
    """
    kept, given, early = set(trained), dict[str, float](), 0.0
    for turn_id in tree.turns:
        reward = rewards.get(turn_reward_name(turn_id), 0.0)
        if turn_id in kept:
            given[turn_id] = reward + early
            early = 0.0
        elif given:
            given[next(reversed(given))] += reward
        else:
            early += reward
    turns = {turn_id: tree.turns[turn_id] for turn_id in given}
    return {
        turn_id: TurnNote(turn.order, observation_of(turn.request), given[turn_id]) for turn_id, turn in turns.items()
    }


def observation_of(request: Mapping[str, Any]) -> int:
    """The hash of a request's observation, a signed number of 64 bits."""
    messages = request.get("messages")
    if messages is None:
        content: Any = {name: value for name, value in request.items() if name not in NO_CONTENT}
    else:
        content = [[entry.get("role"), entry.get("content")] for entry in messages[_observed_from(messages) :]]
    data = json.dumps(content, sort_keys=True, default=str).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)


def _observed_from(messages: list[Mapping[str, Any]]) -> int:
    at = len(messages)
    while at and messages[at - 1].get("role") == ASSISTANT:
        at -= 1
    while at and messages[at - 1].get("role") != ASSISTANT:
        at -= 1
    return at
