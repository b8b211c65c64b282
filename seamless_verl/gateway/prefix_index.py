"""The prefix index of a session: recorded token ids of the conversations that an agent sends back.

Where messages repeat an earlier request and its reply, that turn's ids begin the new prompt, verbatim; only the
messages after it are rendered.

Invariants:
- A prefix ends with a reply of ours; its ids are the prompt ids and the generated ids of that turn, in order.
- Equal messages with equal seeds (tools and template settings, which shape the prompt's head) share one entry: the
  latest turn's. An entry that extends another holds only its own tail.
- Where none has the conversation as it is, one with an assistant's consecutive messages joined or split is found: some
  APIs split a reply, and agents continue a message that they began.
- A reply that was sent back with more text in its message is found apart, by `find_extended`: the ids on record are the
  message's beginning at most.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from seamless_verl.trajectory.images import DIGEST
from seamless_verl.trajectory.messages import ASSISTANT, Message, parse_message, reply_message
from seamless_verl.trajectory.records import TOKEN


@dataclass(frozen=True, eq=False, slots=True)
class RecordedPrefix:
    """Recorded ids: those of `parent`, then `tail`; `length` counts both."""

    parent: RecordedPrefix | None
    tail: array[int]
    length: int

    def ids(self) -> array[int]:
        tails = [self.tail]
        parent = self.parent
        while parent is not None:
            tails.append(parent.tail)
            parent = parent.parent
        ids = array(TOKEN)
        for tail in reversed(tails):
            ids.extend(tail)
        return ids

    def without_last(self, number: int) -> RecordedPrefix:
        """Without its last ids, at most as many as its own."""
        assert number <= len(self.tail), f"{number} of {len(self.tail)} ids"
        return RecordedPrefix(self.parent, self.tail[: len(self.tail) - number], self.length - number)


@dataclass(frozen=True)
class PrefixMatch:
    """The longest recorded prefix of a conversation, and the number of messages that it covers."""

    count: int
    prefix: RecordedPrefix
    rest: Sequence[int] = ()  # ids of what the agent added to the text of the last of these messages


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply of text, without white space around it; the last `generated` ids of its prefix are the reply's."""

    text: str
    reasoning: str
    generated: int
    prefix: RecordedPrefix


@dataclass(frozen=True)
class ExtendedReply:
    """A message that begins with a recorded reply's text; with it `count` messages are covered."""

    count: int
    sent: str
    reply: RecordedReply


class PrefixIndex:
    """The recorded prefixes of one session."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, RecordedPrefix] = {}
        self._joined: dict[bytes, RecordedPrefix] = {}  # by their messages with consecutive ones joined
        self._replies: dict[bytes, list[RecordedReply]] = {}  # by the messages before them

    def __len__(self) -> int:
        return len(self._prefixes)

    def find_longest(self, seed: bytes, messages: Sequence[Mapping[str, Any]]) -> PrefixMatch | None:
        """The longest recorded prefix of these messages; None without one, or when they hold more than text
        and images on record."""
        if not self._prefixes or not comparable(messages):
            return None
        forms = _forms([parse_message(entry) for entry in messages])
        digests = [list(_prefix_digests(seed, form)) for form in forms]
        matches = [
            PrefixMatch(count, known[digest])
            for known in (self._prefixes, self._joined)
            for form in digests
            for count, digest in form
            if digest in known
        ]
        return max(matches, key=lambda match: match.count, default=None)  # the first of them, the most exact

    def find_extended(self, seed: bytes, messages: Sequence[Mapping[str, Any]], covered: int) -> ExtendedReply | None:
        """The last reply, behind the first `covered` messages, that was sent back with more text in its message.

        Other messages follow it. Of several replies to one conversation it is the longest.
        """
        later = (entry.get("role") == ASSISTANT for entry in messages[covered:-1])
        if not self._replies or not any(later) or not comparable(messages):
            return None
        digest, found = seed, None
        for count, entry in enumerate(map(parse_message, messages[:-1]), 1):
            if count > covered and entry.role == ASSISTANT and not entry.calls:
                sent = entry.text.lstrip()
                replies = [reply for reply in self._replies.get(digest, ()) if sent.startswith(reply.text)]
                if replies:
                    found = ExtendedReply(count, sent, max(replies, key=lambda reply: len(reply.text)))
            digest = _extend_digest(digest, entry)
        return found

    def add(
        self,
        seed: bytes,
        messages: Sequence[Mapping[str, Any]],
        reply: Mapping[str, Any],
        prompt_ids: array[int],
        generated_ids: array[int],
        match: PrefixMatch | None = None,
    ) -> None:
        """Adds a turn that ended; `match` is the prefix that its prompt was built on, if any."""
        if not comparable(messages):
            return
        parent = match.prefix if match is not None and _begins_with(prompt_ids, match.prefix) else None
        tail = prompt_ids[parent.length if parent else 0 :] + generated_ids
        prefix = RecordedPrefix(parent, tail, len(prompt_ids) + len(generated_ids))
        exact, *joined = _forms([*(parse_message(entry) for entry in messages), reply_message(reply)])
        self._prefixes[_digest(seed, exact)] = prefix
        self._joined |= {_digest(seed, form): prefix for form in joined}
        message = exact[-1][1]
        if (text := message.text.strip()) and not message.calls:
            reasoning = str((reply.get("message") or reply).get("reasoning") or "").strip()
            recorded = RecordedReply(text, reasoning, len(generated_ids), prefix)
            self._replies.setdefault(_digest(seed, exact[:-1]), []).append(recorded)

    def add_recorded(
        self, request: Mapping[str, Any], reply: Mapping[str, Any], prompt_ids: array[int], generated_ids: array[int]
    ) -> None:
        """Adds a turn from its record, as after a restart; turns are added in their order."""
        if (messages := request.get("messages")) is None:
            return
        seed = prefix_seed(request.get("tools"), request.get("template", {}))
        self.add(seed, messages, reply, prompt_ids, generated_ids, self.find_longest(seed, messages))


def prefix_seed(tools: object, settings: Mapping[str, Any]) -> bytes:
    """What shapes a prompt's head besides the messages."""
    return json.dumps([tools, settings], sort_keys=True, default=str).encode()


def text_only(messages: Sequence[Mapping[str, Any]]) -> bool:
    parts = (part for entry in messages if isinstance(entry.get("content"), list) for part in entry["content"])
    return all(isinstance(part, str) or "text" in part for part in parts)


def comparable(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all parts are texts, or images that are named by their digests."""
    parts = (part for entry in messages if isinstance(entry.get("content"), list) for part in entry["content"])
    return all(isinstance(part, str) or "text" in part or DIGEST in part for part in parts)


def _begins_with(ids: array[int], prefix: RecordedPrefix) -> bool:
    return ids[: prefix.length] == prefix.ids()


Form = list[tuple[int, Message]]
"""A conversation's messages, each with the number of messages that are covered up to its end."""


def _prefix_digests(seed: bytes, form: Form) -> Iterator[tuple[int, bytes]]:
    """(messages covered, digest) of each prefix that ends with the last of an assistant's messages, but the whole."""
    digest = seed
    for (count, entry), (_, following) in pairwise(form):
        digest = _extend_digest(digest, entry)
        if entry.role == ASSISTANT != following.role:
            yield count, digest


def _forms(messages: Sequence[Message]) -> list[Form]:
    """The conversation as it is; and, if an assistant has consecutive messages, with these as one.

    Two texts are joined as they are. Beside a message without text, as one of calls alone, an agent may have trimmed
    the other one.
    """
    exact = list(enumerate(messages, 1))
    if not any(one.role == other.role == ASSISTANT for one, other in pairwise(messages)):
        return [exact]
    return [exact, _join(exact), _join(exact, trim=True)]


def _join(form: Form, *, trim: bool = False) -> Form:
    joined: Form = []
    for count, entry in form:
        if joined and entry.role == joined[-1][1].role == ASSISTANT:
            last = joined.pop()[1]
            text = last.text + entry.text
            if trim and not (last.text and entry.text):  # white space between two texts is what was said
                text = text.strip()
            entry = Message(ASSISTANT, text, last.calls + entry.calls)
        joined.append((count, entry))
    return joined


def _digest(seed: bytes, form: Form) -> bytes:
    digest = seed
    for _, entry in form:
        digest = _extend_digest(digest, entry)
    return digest


def _extend_digest(digest: bytes, entry: Message) -> bytes:
    # APIs differ in whether they trim the white space around a reply's text; it does not change the reply.
    text = entry.text.strip() if entry.role == ASSISTANT else entry.text
    meaning = [entry.role, text, [(call.name, call.canonical) for call in entry.calls]]
    return blake2b(digest + json.dumps(meaning).encode(), digest_size=16).digest()
