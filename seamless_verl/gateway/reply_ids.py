"""Finds the turn that an agent names by the id of its reply.

A reply has the id that vLLM made for its request. Of a message of the Anthropic API the gateway changes the beginning;
of plain completions and responses the engine's request has a number behind it. The stored request of a turn has that
id. A retry that reads again what was generated before is a reply of another id to the same attempt.
"""

from __future__ import annotations

from collections.abc import Mapping

from seamless_verl.gateway.resumed_calls import GATEWAY_KEY
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.session import SessionRecord
from seamless_verl.trajectory.tree import PlacedTurn

ANTHROPIC, CHAT = "msg_", "chatcmpl-"
NUMBERED = {"cmpl-": "-", "resp_": "_"}
"""What is between the id of a reply and the number of its engine request."""


def find_turn(record: SessionRecord, reply_id: str, retried: Mapping[str, int]) -> str | None:
    """The turn's id; of a request for n choices that of the first one. `retried` is `Session.retried_replies`."""
    attempts = {number for made, number in retried.items() if names(reply_id, made)}
    found = [turn for turn in record.turns if _is_reply(turn, reply_id, attempts)]
    return min(found, key=_place).turn_id if found else None


def names(reply_id: str, made: str) -> bool:
    """Whether a reply of this id is one to the request for which vLLM made the id `made`."""
    if reply_id.startswith(ANTHROPIC):
        reply_id = CHAT + reply_id.removeprefix(ANTHROPIC)
    between = next((mark for beginning, mark in NUMBERED.items() if reply_id.startswith(beginning)), None)
    if between is None:
        return reply_id == made
    name, _, number = made.rpartition(between)
    return made == reply_id or (name == reply_id and number.isdecimal())


def _is_reply(turn: PlacedTurn, reply_id: str, attempts: set[int]) -> bool:
    own = turn.request.get(GATEWAY_KEY, {})
    return turn.finish is not Finish.FAILED and (
        names(reply_id, own.get("reply_id", "")) or own.get("attempt") in attempts
    )


def _place(turn: PlacedTurn) -> int:
    return int(turn.request.get(GATEWAY_KEY, {}).get("place", 0))
