"""Rewritten history is distinguished from branches, and its cause from other causes.

Conversations are rendered by a template with one token for each character.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from support.trajectory import SessionModel, segment, session, sessions, turn

from seamless_verl.tools.trajectories.drift import Cause, Drift, find_drifts
from seamless_verl.trajectory.records import Turn, tokens

Chat = list[dict[str, Any]]
MERGED = {0x10FFFE: "ab"}  # one token for two characters, beside their own
SUMMARY = "We looked at three files and the fault is in the second."


def decode(ids: Sequence[int]) -> str:
    return "".join(MERGED.get(i) or chr(i) for i in ids)


def message_of(role: str, text: str, *calls: str) -> dict[str, Any]:
    """A message; `calls` are the JSON texts of arguments."""
    functions = [{"type": "function", "function": {"name": "run", "arguments": text}} for text in calls]
    return {"role": role, "content": text} | ({"tool_calls": functions} if functions else {})


SYSTEM, ASK = message_of("system", "Be good."), message_of("user", "Find the fault.")


def body(message: dict[str, Any]) -> str:
    return message["content"] + "".join(f"({c['function']['arguments']})" for c in message.get("tool_calls", ()))


def render(chat: Chat, end: str = "$") -> list[int]:
    text = "".join(f"<{message['role'][0]}>{body(message)}{end}" for message in chat) + "<a>"
    return [ord(character) for character in text]


def call(turn_id: str, chat: Chat, reply: dict[str, Any], *, prompt: list[int] | None = None) -> Turn:
    ids = [ord(character) for character in body(reply) + "$"]
    return turn(turn_id, prompt or render(chat), ids, messages=chat, reply=reply)


def drift_of(*turns: Turn, with_text: bool = True) -> Drift | None:
    """The last turn's drift; the turns before it must have none."""
    drifts = find_drifts(session(*turns).tree, decode=decode if with_text else None)
    assert [drift.turn_id for drift in drifts] in ([], [turns[-1].turn_id])
    return drifts[0] if drifts else None


def cause_of(*turns: Turn, with_text: bool = True) -> Cause | None:
    drift = drift_of(*turns, with_text=with_text)
    return drift.cause if drift else None


FOUND = message_of("assistant", "abacus")
FIRST = call("a", [SYSTEM, ASK], FOUND)
RESULT = message_of("tool", "one file")
THEN = message_of("assistant", "Now the second one.")
SECOND = call("b", [SYSTEM, ASK, FOUND, RESULT], THEN)
LONG = [SYSTEM, ASK, FOUND, RESULT, THEN, message_of("tool", "two files")]


def test_a_verbatim_replay_is_no_drift() -> None:
    assert drift_of(FIRST, SECOND, call("c", LONG, message_of("assistant", "x"))) is None


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([SYSTEM, ASK], id="sampled again"),
        pytest.param([SYSTEM, ASK, FOUND, RESULT], id="sampled again later"),
        pytest.param([SYSTEM, ASK, FOUND, message_of("tool", "another result")], id="another result"),
        pytest.param([message_of("system", "Be quick."), ASK], id="another agent"),
        pytest.param(
            [message_of("system", "Be quick."), message_of("user", f"Check: {SUMMARY}")], id="an agent that is told"
        ),
        pytest.param([message_of("user", "Hello")], id="no system prompt"),
        pytest.param(
            [SYSTEM, message_of("user", "Look at one file only.")], id="a sub-agent with the same system prompt"
        ),
        pytest.param(
            [SYSTEM, message_of("user", "Q"), message_of("assistant", "A"), message_of("user", "R")],
            id="its own examples",
        ),
        pytest.param(
            [SYSTEM, *[message_of("user", "Q")] * 4, THEN, ASK, RESULT], id="a longer one with an equal reply"
        ),
    ],
)
def test_branches_are_no_drift(other: Chat) -> None:
    third = call("c", LONG, message_of("assistant", SUMMARY))
    assert drift_of(FIRST, SECOND, third, call("d", other, message_of("assistant", "Yes."))) is None


def test_a_word_that_was_also_a_reply_is_no_summary() -> None:
    third = call("c", LONG, message_of("assistant", "Done."))
    aside = call("d", [SYSTEM, message_of("user", "Is it Done.")], message_of("assistant", "Yes."))
    assert drift_of(FIRST, SECOND, third, aside) is None


@pytest.mark.parametrize("last", [RESULT, message_of("tool", "another result")])
def test_a_return_to_an_earlier_point_by_another_template_is_drift(last: dict[str, Any]) -> None:
    chat = [SYSTEM, ASK, FOUND, last]
    third = call("c", LONG, message_of("assistant", "Done."))
    assert cause_of(FIRST, SECOND, third, call("d", chat, THEN, prompt=render(chat, "$\n"))) is Cause.TEMPLATE


def test_the_numbers_say_where_and_how_much() -> None:
    edited = [SYSTEM, ASK, FOUND, message_of("tool", "two"), THEN, ASK]
    drift = drift_of(FIRST, SECOND, call("c", edited, THEN))
    assert drift is not None
    prompt = "<s>Be good.$<u>Find the fault.$<a>abacus$<t>"
    assert (drift.turn_id, drift.recorded_turn_id, drift.at_token) == ("c", "b", len(prompt))
    assert decode(drift.recorded_ids) == "one file$<a>Now " and decode(drift.replayed_ids) == "two$<a>Now the s"
    assert drift.lost_tokens == len("Now the second one.$") and drift.kept_tokens == len("abacus$")
    assert drift.cause is Cause.AGENT_EDIT


def test_dropped_reasoning_is_the_template() -> None:
    thinking = replace(FIRST, segments=[segment([ord(c) for c in "hm, abacus$"])])
    assert cause_of(thinking, SECOND) is Cause.TEMPLATE


def test_another_separator_is_the_template() -> None:
    chat = [SYSTEM, ASK, FOUND, RESULT]
    assert cause_of(FIRST, call("b", chat, THEN, prompt=render(chat, "$\n"))) is Cause.TEMPLATE


def test_a_trimmed_reply_is_the_template_even_inside_the_run() -> None:
    spaced = replace(FIRST, segments=[segment([ord(c) for c in "abacus  $"])])
    assert cause_of(spaced, SECOND) is Cause.TEMPLATE


@pytest.mark.parametrize("with_text", [True, False])
def test_other_tokens_for_the_same_text(with_text: bool) -> None:
    prompt = render([SYSTEM, ASK, FOUND, RESULT])
    at = decode(prompt).index("abacus")
    merged = [*prompt[:at], 0x10FFFE, *prompt[at + 2 :]]
    assert decode(merged) == decode(prompt)
    drifted = call("b", [SYSTEM, ASK, FOUND, RESULT], THEN, prompt=merged)
    assert cause_of(FIRST, drifted, with_text=with_text) is (Cause.RETOKENIZATION if with_text else Cause.TEMPLATE)
    halves = replace(FIRST, segments=[segment([ord("a"), ord("b"), ord("a"), ord("b"), ord("$")])])
    replayed = [*render([SYSTEM, ASK]), ord("a"), ord("b"), 0x10FFFE, ord("$"), ord("<")]
    again = call("b", [SYSTEM, ASK, message_of("assistant", "abab"), RESULT], THEN, prompt=replayed)
    known = replace(halves, reply=message_of("assistant", "abab"))
    assert cause_of(known, again, with_text=with_text) is Cause.RETOKENIZATION


def test_without_messages_text_still_distinguishes_tokenization_from_an_edit() -> None:
    ids = [ord(c) for c in "Q:"]
    first = turn("a", ids, [ord(c) for c in "ab."])
    assert cause_of(first, turn("b", [*ids, 0x10FFFE, ord("."), ord("!")])) is Cause.RETOKENIZATION
    assert cause_of(first, turn("b", [*ids, ord("a"), ord("c"), ord(".")])) is Cause.AGENT_EDIT
    assert cause_of(first, turn("b", [ord("R"), ord(":")])) is None


def bytes_to_text(ids: Sequence[int]) -> str:
    """Tokens of one byte, and one of two; `$` is not shown."""
    return b"".join(b"ab" if i == 0x1000 else bytes([i]) for i in ids).decode(errors="replace").replace("$", "")


@pytest.mark.parametrize(
    ("recorded", "replayed", "cause"),
    [
        pytest.param(b"\xc3\xa9!", b"\xc3\xa8!", Cause.AGENT_EDIT, id="parted within a character"),
        pytest.param(b"ab\xc3", [0x1000], Cause.RETOKENIZATION, id="cut within a character"),
        pytest.param(b"$", b"no$", Cause.AGENT_EDIT, id="nothing to see in what was lost"),
    ],
)
def test_text_is_judged_by_whole_characters(recorded: bytes, replayed: Sequence[int], cause: Cause) -> None:
    record = session(turn("a", list(b"Q:"), list(recorded)), turn("b", [*b"Q:", *replayed, *b"R:"]))
    assert [drift.cause for drift in find_drifts(record.tree, decode=bytes_to_text)] == [cause]


def test_the_same_arguments_as_other_json_text() -> None:
    mine, theirs = '{"path": "x", "n": 1}', '{"n":1,"path":"x"}'
    first = call("a", [SYSTEM, ASK], message_of("assistant", "", mine))
    assert cause_of(first, call("b", [SYSTEM, ASK, message_of("assistant", "", theirs), RESULT], THEN)) is (
        Cause.TOOL_CALL_RESERIALIZATION
    )
    other = json.dumps({"n": 2, "path": "x"})
    assert (
        cause_of(first, call("b", [SYSTEM, ASK, message_of("assistant", "", other), RESULT], THEN)) is Cause.AGENT_EDIT
    )


@pytest.mark.parametrize(
    "short",
    [
        pytest.param([SYSTEM, ASK, message_of("user", "Earlier: one file."), ASK], id="a summary in the middle"),
        pytest.param([SYSTEM, ASK, THEN, message_of("tool", "two files")], id="the middle left out"),
        pytest.param([SYSTEM, message_of("user", "Go on."), THEN, ASK], id="a window with a later reply"),
        pytest.param([SYSTEM, message_of("user", f"So far: {SUMMARY}")], id="a summary the model wrote"),
    ],
)
def test_a_shortened_conversation_is_compaction(short: Chat) -> None:
    third = call("c", LONG, message_of("assistant", SUMMARY))
    assert cause_of(FIRST, SECOND, third, call("d", short, message_of("assistant", "Done."))) is Cause.COMPACTION


@pytest.mark.parametrize(
    "edited",
    [
        pytest.param([SYSTEM, ASK, message_of("assistant", "abaci"), RESULT], id="a reply rewritten"),
        pytest.param([SYSTEM, ASK, message_of("user", "Try again.")], id="a reply left out"),
        pytest.param([message_of("system", "It is noon."), ASK, FOUND, RESULT], id="a clock in the system prompt"),
    ],
)
@pytest.mark.parametrize("with_text", [True, False])
def test_a_changed_conversation_is_an_edit(edited: Chat, with_text: bool) -> None:
    assert cause_of(FIRST, call("b", edited, THEN), with_text=with_text) is Cause.AGENT_EDIT


def test_of_several_samples_the_one_that_was_carried_on_is_named() -> None:
    other = call("a2", [SYSTEM, ASK], message_of("assistant", "zebra"))
    chat = [SYSTEM, ASK, FOUND, RESULT]
    drift = drift_of(FIRST, other, call("b", chat, THEN, prompt=render(chat, "$\n")))
    assert drift is not None and drift.recorded_turn_id == "a"


@settings(max_examples=200, deadline=None)
@given(sessions())
def test_drift_is_found_at_the_token_that_differs(model: SessionModel) -> None:
    by_id = {recorded.turn_id: recorded for recorded in model.turns}
    order = list(by_id)
    for drift in find_drifts(session(*model.turns).tree):
        past, recorded = by_id[drift.recorded_turn_id], by_id[drift.turn_id]
        path, at = past.prompt_ids + past.generated_ids, drift.at_token
        assert order.index(past.turn_id) < order.index(recorded.turn_id) and path[:at] == recorded.prompt_ids[:at]
        assert path[at : at + 16] == tokens(drift.recorded_ids)
        assert recorded.prompt_ids[at : at + 16] == tokens(drift.replayed_ids)
        assert path[at] != recorded.prompt_ids[at] and 0 < drift.lost_tokens <= len(path) - at


@settings(max_examples=200, deadline=None)
@given(sessions())
def test_what_comes_later_changes_no_turns_drift(model: SessionModel) -> None:
    record, known = session(), []
    for recorded in model.turns:
        record.add_turn(recorded)
        drifts = find_drifts(record.tree, decode=decode)
        assert drifts[: len(known)] == known and {drift.turn_id for drift in drifts[len(known) :]} <= {recorded.turn_id}
        known = drifts
