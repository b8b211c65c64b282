"""The call of a session, what the record keeps of it besides its tokens, and where its tokens come from.

A call may begin with tokens on record. One that a restart interrupted is continued when its retry comes, and not
before: stop strings, parsers and the form of the reply belong to the request, which only the retry brings.

An agent that was lost with its process runs again in another session. Given the same replies it makes the same calls,
so a call that asks what a recorded one asked (the prompt's ids and all sampling parameters) gets the recorded tokens
with their logprobs and versions, and is recorded anew. Where the agent differs it gets new samples.

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
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Protocol

from seamless_verl.journal import StoredCall, StoredSession
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.rollout.call import Call
from seamless_verl.trajectory.images import GATEWAY_KEY, PromptImage, images_of, stored_images
from seamless_verl.trajectory.images import KEY as IMAGES
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, tokens
from seamless_verl.trajectory.routes import Routes, joined
from seamless_verl.trajectory.tree import Node

# Under that key: the digest of what was asked; the stored response it makes; the name of its reply.
ASKED, RESPONSE, REPLY = "asked", "response", "reply"
INTERRUPTED = "interrupted"  # In the stored reply of a call that ended with the run's processes, and not by its agent
# An engine reports STOP for tool calls: they are parsed from the text, again when it is read again.
ENGINE_FINISH = {Finish.STOP: Finish.STOP, Finish.TOOL_CALLS: Finish.STOP, Finish.LENGTH: Finish.LENGTH}


@dataclass(frozen=True, slots=True)
class SessionCall(Call):
    """A call with what the recorder stores of it; a request for n choices is n calls."""

    session_id: str = ""
    digest: str = ""  # of the request's content
    request: dict[str, Any] = field(default_factory=dict)  # what the model was asked: chat messages of a conversation
    attempt: int = 0  # numbers the session's request that it belongs to; with index and key a retry finds the call
    index: int = 0  # its place in that request
    idempotency_key: str | None = None
    timed: bool = True
    response: Mapping[str, Any] | None = None  # `id`, `model`, and whether the messages begin with `instructions`
    dropped_tools: tuple[str, ...] = ()  # types of hosted tools that were left out
    replaced_media: tuple[str, ...] = ()  # kinds of images and the like that became placeholders
    reply_name: str = ""  # as in `Attempt`
    asked: str = ""  # `asked_digest` of it
    images: tuple[PromptImage, ...] = ()  # in its prompt
    files: Mapping[str, bytes] = field(default_factory=dict)  # of these, by sha256

    def stored_request(self) -> dict[str, Any]:
        """The request as it is recorded, with what finds the call again after a restart."""
        own: dict[str, Any] = {"attempt": self.attempt, "place": self.index}
        own |= {"max_tokens": self.sampling.get("max_tokens"), REPLY: self.reply_name}
        given = {
            ASKED: self.asked or None,
            "key": self.idempotency_key,
            RESPONSE: None if self.response is None else dict(self.response),
            "dropped_tools": list(self.dropped_tools) or None,
            "replaced_media": list(self.replaced_media) or None,
            IMAGES: stored_images(self.images) or None,
        }
        own |= {name: value for name, value in given.items() if value is not None}
        return {**self.request, GATEWAY_KEY: own}

    def resumed(self, stored: StoredCall) -> SessionCall:
        """The call of a retry, with the id, the prompt, the request and the token budget of the stored call."""
        budget = gateway_fields(stored).get("max_tokens", self.sampling["max_tokens"])
        kept = {"call_id": stored.call_id, "prompt_ids": stored.prompt_ids, "request": stored.request}
        kept["images"] = images_of(stored.request)  # the same ones, of the same request, where that prompt has them
        return replace(self, sampling={**self.sampling, "max_tokens": budget}, **kept)


def gateway_fields(call: StoredCall) -> dict[str, Any]:
    own: dict[str, Any] = call.request.get(GATEWAY_KEY, {})
    return own


class CallSource(Protocol):
    """Runs a call to its end, over any number of replicas and pauses; a call with `produced` continues after that."""

    def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        """The call's chunks, of which the last alone has a finish reason; closing it aborts the call in the engine."""
        ...


def asked_digest(
    prompt_ids: array[int],
    sampling: Mapping[str, Any],
    stop: Sequence[str],
    choice: int = 0,
    images: Sequence[PromptImage] = (),
) -> str:
    """Equal for calls that ask the same; prompt_ids int32 [P], `stop` strings, the number of the request's `choice`."""
    asked = [sorted(sampling.items()), list(stop), choice, *(image.digest for image in images)]
    settings = json.dumps(asked, sort_keys=True, default=str)
    return blake2b(prompt_ids.tobytes() + settings.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RecordedCall:
    """Tokens of a call on record; `finish` is how the engine ended it, None for one that is continued."""

    segments: Sequence[Segment]
    finish: Finish | None = None
    stop_reason: int | str | None = None
    prompt_end: Node | None = None  # in the tree of its session
    prompt_routes: Routes | None = None  # with its first tokens

    @classmethod
    def of(
        cls, stored: StoredCall, oldest: int, newest: int | None, prompt_end: Node | None = None
    ) -> RecordedCall | None:
        """What can be given of a stored call, of weight versions from `oldest` to `newest` (None: any); else None."""
        known = list(takewhile(lambda s: newest is None or s.version <= newest, stored.segments))
        if not known or min(segment.version for segment in known) < oldest:
            return None
        if stored.finish in ENGINE_FINISH and len(known) == len(stored.segments):
            return cls(known, ENGINE_FINISH[stored.finish], stored.reply.get("stop_reason"), prompt_end)
        given = stored.finish in ENGINE_FINISH or stored.reply.get(INTERRUPTED)
        return cls(known, prompt_end=prompt_end) if given else None

    def with_routes(self, routes_from: int) -> RecordedCall | None:
        """With those of the prompt's tokens from this one on; None if one of them, or of its own, is not on record."""
        if self.prompt_end is None or any(segment.routes is None for segment in self.segments):
            return None
        routes = joined([node.rows() for node in self.prompt_end.path_from(None) if len(node)])
        return None if routes is None else replace(self, prompt_routes=routes.part(routes_from))

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
            chunk = replace(segment.chunk(), prompt_routes=known.prompt_routes if number == 1 else None)
            if ends and number == len(known.segments):
                yield replace(chunk, finish_reason=known.finish, stop_reason=known.stop_reason)
                return
            yield chunk
        async with aclosing(self.source.stream(replace(call, produced=produced))) as chunks:
            async for chunk in chunks:
                yield chunk


def _prompt_ends(session: StoredSession) -> dict[str, Node]:
    """The end of each call's prompt in the session's tree; empty where the session has no routes."""
    if all(call.prompt_routes is None for call in session.calls):
        return {}
    return {name: turn.prompt_end for name, turn in rebuild_record(session, all_calls=True).tree.turns.items()}


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
            ends = _prompt_ends(session)
            passed = Counter(repeated)
            for asked, stored in calls:
                recorded = RecordedCall.of(stored, oldest, newest, ends.get(stored.call_id))
                if not asked or recorded is None:
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
        if call.routes_from is not None and (recorded := recorded.with_routes(call.routes_from)) is None:
            return None
        self._counts.update(calls=1, tokens=len(recorded))
        return recorded
