"""Builds turns and sessions for tests, and generates random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies as st

from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.session import SessionRecord

FINISHES = [Finish.STOP] * 6 + [Finish.LENGTH, Finish.TOOL_CALLS, Finish.CANCELLED, Finish.FAILED]


def segment(ids: Sequence[int], version: int = 0, first_logprob: float = -0.5, replica: str = "r0") -> Segment:
    """Logprobs decrease by 1/64 per token, so that neighbours' logprobs differ."""
    return Segment(tokens(ids), logprobs(first_logprob - i / 64 for i in range(len(ids))), version, replica)


def turn(
    turn_id: str,
    prompt: Sequence[int],
    generated: Sequence[int] | Sequence[Segment] = (),
    *,
    finish: Finish = Finish.STOP,
    messages: list[dict[str, Any]] | None = None,
    reply: dict[str, Any] | None = None,
) -> Turn:
    """A turn of whole segments, or of one segment of version 0."""
    segments = [part for part in generated if isinstance(part, Segment)]
    ids = [part for part in generated if isinstance(part, int)]
    request = {} if messages is None else {"messages": messages}
    return Turn(turn_id, tokens(prompt), segments or [segment(ids)], finish, request, reply or {})


def session(*turns: Turn) -> SessionRecord:
    record = SessionRecord("u", "0")
    for recorded in turns:
        record.add_turn(recorded)
    record.check_integrity()
    return record


@dataclass
class SessionModel:
    """The turns in the order in which they ended; the results of assembly are compared with these alone."""

    turns: list[Turn] = field(default_factory=list)

    def record(self) -> SessionRecord:
        return session(*self.turns)

    @property
    def generated(self) -> int:
        return sum(recorded.generated for recorded in self.turns)


@cache
def ids(low: int = 0, high: int = 5) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that equal runs are common; drawn as one text, which is quicker than one by one."""
    return st.text("012", min_size=low, max_size=high).map(lambda text: [int(digit) for digit in text])


KIND = st.sampled_from(["extend", "extend", "branch", "again", "rewrite", "new"])


def parse_runs(data: bytes) -> list[tuple[list[int], int]]:
    """Up to three runs of up to five tokens each, with their versions; the first byte is their number."""
    parts = (data[at : at + 7] for at in range(1, len(data), 7))
    runs = [([token % 3 for token in tokens[: length % 6]], version % 4) for length, version, *tokens in parts]
    return runs[: data[0] % 4]


RUNS = st.binary(min_size=22, max_size=22).map(parse_runs)  # one draw, where a list of lists takes ten


def next_prompt(draw: st.DrawFn, earlier: list[Turn]) -> list[int]:
    """Extends, branches within, samples again, rewrites, or starts anew."""
    kind = draw(KIND) if earlier else "new"
    if kind == "new":
        return draw(ids(1))
    past = draw(st.sampled_from(earlier))
    whole = [*past.prompt_ids, *past.generated_ids]
    if kind == "again":
        return list(past.prompt_ids)
    if kind == "extend":
        return whole + draw(ids(1))
    at = draw(st.integers(0, len(whole)))
    return whole[:at] + draw(ids()) + (whole[at + 1 :] if kind == "rewrite" else [])


@st.composite
def sessions(draw: st.DrawFn, most: int = 8, finishes: Sequence[Finish] = FINISHES) -> SessionModel:
    model = SessionModel()
    for number in range(draw(st.integers(1, most))):
        prompt = next_prompt(draw, model.turns) or [0]
        parts = [segment(run, version, -1.0 - number - i / 4) for i, (run, version) in enumerate(draw(RUNS))]
        model.turns.append(turn(f"t{number}", prompt, parts, finish=draw(st.sampled_from(finishes))))
    return model
