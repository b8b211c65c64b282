"""Calls that begin with tokens on record: a retry's after a restart, and those of an agent that begins again.

A call that a restart interrupted is continued when its retry comes, not at the restart: stop strings, reply parsers and
the form of the reply belong to the request, which only the retry brings, and an agent that died never retries.

An agent that was lost with its process runs again from its beginning, in another session. Given the same replies it
makes the same calls. So a call of the new session that asks what a call of the lost one asked gets the recorded tokens,
with the logprobs and the weight versions under which they were generated, and is recorded as a call of its own. A
recorded call without an end is continued. What is asked is the prompt's token ids with all sampling parameters; ids of
tool calls, which each reply has anew, are in the request and not in most prompts. A recorded call is a sample for
exactly this prompt, so nothing need be known of the agent: where it differs it gets new samples.

Invariants:
- A recorded call answers one call.
- Tokens of weights outside of the versions that the session may have are not given, nor what followed them.
- What an agent's end may have cut, such as a call that it cancelled, is not given: it would favour long replies.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from seamless_verl.gateway.calls import ASKED, CallSource, SessionCall, gateway_fields
from seamless_verl.journal import StoredCall, StoredSession
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, tokens

INTERRUPTED = "interrupted"  # In the stored reply of a call that ended with the run's processes, and not by its agent
# An engine reports STOP for tool calls: they are parsed from the text, again when it is read again.
ENGINE_FINISH = {Finish.STOP: Finish.STOP, Finish.TOOL_CALLS: Finish.STOP, Finish.LENGTH: Finish.LENGTH}


def asked_digest(prompt_ids: array[int], sampling: Mapping[str, Any], stop: Sequence[str], choice: int = 0) -> str:
    """Equal for calls that ask the same; prompt_ids int32 [P], `stop` are the stop strings.

    `choice` is its number in a request for several: they keep their order.
    """
    settings = json.dumps([sorted(sampling.items()), list(stop), choice], sort_keys=True, default=str)
    return blake2b(prompt_ids.tobytes() + settings.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def resume_call(call: SessionCall, stored: StoredCall) -> SessionCall:
    """The call of a retry, with the id, the prompt, the request and the token budget of the stored call."""
    budget = gateway_fields(stored).get("max_tokens", call.sampling["max_tokens"])
    return replace(
        call,
        call_id=stored.call_id,
        prompt_ids=stored.prompt_ids,
        sampling={**call.sampling, "max_tokens": budget},
        request=stored.request,
    )


@dataclass(frozen=True)
class RecordedCall:
    """Tokens of a call on record; `finish` is how the engine ended it, None for one that is continued."""

    segments: Sequence[Segment]
    finish: Finish | None = None
    stop_reason: int | str | None = None

    @classmethod
    def of(cls, stored: StoredCall, oldest: int, newest: int | None) -> RecordedCall | None:
        """What can be given of a stored call, of weights of the versions from `oldest` to `newest`; None for nothing.

        Without `newest` every newer version may be given.
        """
        known = list(takewhile(lambda s: newest is None or s.version <= newest, stored.segments))
        if not known or min(segment.version for segment in known) < oldest:
            return None
        if stored.finish in ENGINE_FINISH and len(known) == len(stored.segments):
            return cls(known, ENGINE_FINISH[stored.finish], stored.reply.get("stop_reason"))
        return cls(known) if stored.finish in ENGINE_FINISH or stored.reply.get(INTERRUPTED) else None

    def __len__(self) -> int:
        return sum(map(len, self.segments))


@dataclass(frozen=True)
class RecordedSource:
    """A CallSource for one call: the recorded tokens, then, if the recorded call had no end, those of `source`."""

    recorded: RecordedCall
    source: CallSource

    async def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        known, produced = self.recorded, tokens(())
        # A reader finds a stop string in the text, and ends there.
        ends = known.finish is not None and not isinstance(known.stop_reason, str)
        for number, segment in enumerate(known.segments, 1):
            produced.extend(segment.ids)
            if ends and number == len(known.segments):
                yield replace(segment.chunk(), finish_reason=known.finish, stop_reason=known.stop_reason)
                return
            yield segment.chunk()
        async with aclosing(self.source.stream(replace(call, produced=produced))) as chunks:
            async for chunk in chunks:
                yield chunk


class RepeatableCalls:
    """The calls of a lost session that its successor may make again; counts those that it does, and their tokens.

    Owned state: the recorded calls that no call has been answered with, by what they asked, oldest first.
    """

    def __init__(
        self, sessions: Sequence[tuple[StoredSession, int | None]], *, oldest: int, counts: Counter[str]
    ) -> None:
        """Of the lost session, then of the one that it had begun again, and so on: what each had not repeated.

        Each comes with the newest version of its tokens that may be given, None for any.
        """
        self._counts = counts
        self._left: defaultdict[str, deque[RecordedCall]] = defaultdict(deque)
        repeated: Counter[str] = Counter()
        for session, newest in sessions:
            calls = [(str(gateway_fields(stored).get(ASKED, "")), stored) for stored in session.calls]
            passed = Counter(repeated)
            for asked, stored in calls:
                if not asked or (recorded := RecordedCall.of(stored, oldest, newest)) is None:
                    continue
                if passed[asked] > 0:
                    passed[asked] -= 1
                else:
                    self._left[asked].append(recorded)
            repeated.update(asked for asked, _ in calls)

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    def take(self, call: SessionCall) -> RecordedCall | None:
        """The first call on record that asked what this one does; each is given once."""
        if not self._left.get(call.asked):
            return None
        recorded = self._left[call.asked].popleft()
        in_grammar = bool(call.sampling.get("structured_outputs"))  # its state is not on record
        if call.sampling.get("logprobs") or (in_grammar and recorded.finish is None):  # nor are the likeliest tokens
            return None
        self._counts.update(calls=1, tokens=len(recorded))
        return recorded
