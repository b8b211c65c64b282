"""Which tokens a conversation already has: message prefixes of a session, and the ids on record for them.

An agent sends its conversation back as messages. Where they repeat an earlier request and the reply to it, the
ids of that turn are the prompt's beginning, verbatim; only what follows is rendered.

Invariants:
- A prefix ends with a reply of ours; its ids are that turn's prompt and generated ids, in order.
- Equal prefixes of equal seeds (tools and template settings, which shape the prompt's head) share one entry: the
  latest turn's.
- Ids are kept once for a chain of turns: an entry that extends another keeps its own tail only.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from seamless_verl.trajectory.messages import ASSISTANT, Message, answer, message
from seamless_verl.trajectory.records import TOKEN


@dataclass(frozen=True, eq=False, slots=True)
class RecordedPrefix:
    """Recorded ids, as the tail that follows another trunk's."""

    below: RecordedPrefix | None
    tail: array[int]
    size: int

    def ids(self) -> array[int]:
        tails = [self.tail]
        below = self.below
        while below is not None:
            tails.append(below.tail)
            below = below.below
        whole = array(TOKEN)
        for tail in reversed(tails):
            whole.extend(tail)
        return whole


@dataclass(frozen=True)
class PrefixMatch:
    """The longest recorded beginning of a conversation: its messages' count, and its ids."""

    count: int
    trunk: RecordedPrefix


class PrefixIndex:
    """The prefixes of one session."""

    def __init__(self) -> None:
        self._trunks: dict[bytes, RecordedPrefix] = {}

    def __len__(self) -> int:
        return len(self._trunks)

    def longest(self, seed: bytes, messages: Sequence[Mapping[str, Any]]) -> PrefixMatch | None:
        """What is on record for these messages; None where nothing is, or where a message holds more than text."""
        if not self._trunks or not text_only(messages):
            return None
        found = ((count, self._trunks.get(digest)) for count, digest in _prefixes(seed, messages))
        known = [(count, trunk) for count, trunk in found if trunk is not None]
        return PrefixMatch(*known[-1]) if known else None

    def add(
        self,
        seed: bytes,
        messages: Sequence[Mapping[str, Any]],
        reply: Mapping[str, Any],
        prompt_ids: array[int],
        generated_ids: array[int],
        known: PrefixMatch | None = None,
    ) -> None:
        """Keeps a turn that ended; `known` is what its prompt was built on, if anything."""
        if not text_only(messages):
            return
        below = known.trunk if known is not None and prompt_ids[: known.trunk.size] == known.trunk.ids() else None
        tail = prompt_ids[below.size if below else 0 :] + generated_ids
        trunk = RecordedPrefix(below, tail, len(prompt_ids) + len(generated_ids))
        said = answer(reply)
        whole = [*_folded(messages), (len(messages) + 1, said)]
        self._trunks[_chain(seed, [one for _, one in whole])] = trunk

    def recall(
        self, request: Mapping[str, Any], reply: Mapping[str, Any], prompt_ids: array[int], generated_ids: array[int]
    ) -> None:
        """Takes in a turn as the record keeps it, as after a restart, in the order of the turns."""
        if (messages := request.get("messages")) is None:
            return
        seed = seed_of(request.get("tools"), request.get("template", {}))
        self.add(seed, messages, reply, prompt_ids, generated_ids, self.longest(seed, messages))


def seed_of(tools: object, settings: Mapping[str, Any]) -> bytes:
    """What shapes a prompt's head besides the messages."""
    return json.dumps([tools, settings], sort_keys=True, default=str).encode()


def text_only(messages: Sequence[Mapping[str, Any]]) -> bool:
    parts = (part for entry in messages if isinstance(entry.get("content"), list) for part in entry["content"])
    return all(isinstance(part, str) or "text" in part for part in parts)


def _prefixes(seed: bytes, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, bytes]]:
    """(messages covered, digest) for each prefix that ends with an assistant's message and is not all of them."""
    digest = seed
    for count, one in _folded(messages):
        digest = _link(digest, one)
        if one.role == ASSISTANT and count < len(messages):
            yield count, digest


def _folded(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, Message]]:
    """Messages with the count up to and with each; an assistant's in a row are one, as some APIs split them."""
    folded: list[tuple[int, Message]] = []
    for count, entry in enumerate(messages, 1):
        one = message(entry)
        if folded and one.role == folded[-1][1].role == ASSISTANT:
            last = folded.pop()[1]
            one = Message(ASSISTANT, last.text + one.text, last.calls + one.calls)
        folded.append((count, one))
    return folded


def _chain(seed: bytes, messages: Sequence[Message]) -> bytes:
    digest = seed
    for one in messages:
        digest = _link(digest, one)
    return digest


def _link(digest: bytes, one: Message) -> bytes:
    # Around a reply's text APIs trim or keep white space each in its own way; what was meant is the same.
    text = one.text.strip() if one.role == ASSISTANT else one.text
    meaning = [one.role, text, [(call.name, call.meant) for call in one.calls]]
    return blake2b(digest + json.dumps(meaning).encode(), digest_size=16).digest()
