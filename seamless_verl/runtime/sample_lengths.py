"""The lengths of a run's samples: the file `lengths.jsonl` beside its checkpoints, one JSON object a step.

    {"step": 3, "begun": 24, "lengths": {"17": [12, 40]}, "trained": [15, 17]}

A group is named by its prompt's place in the order in which prompts were begun, from 0; `begun` says how many were.
`lengths` has the response tokens of each session, tools' answers included, of the groups that ended since the line
before, and `trained` the groups that the step trained. A resumed run begins the file anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.runtime.files import JsonLines

FILE = "lengths.jsonl"


class LengthRecord:
    """Writes the file of one run.

    Invariants: a prompt keeps its place, also when it begins again. Those that are trained or dropped do not come back,
    and nothing is kept of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, int] = {}
        self._begun = 0
        self._written: dict[str, list[int]] = {}
        self._ended: dict[str, list[int]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    @classmethod
    def beside(cls, checkpoints: str) -> LengthRecord:
        return cls(Path(checkpoints) / FILE)

    def begin(self, uids: Iterable[str]) -> None:
        """Prompts whose generation begins, in order."""
        for uid in uids:
            if uid not in self._places:
                self._places[uid], self._begun = self._begun, self._begun + 1

    def begin_again(self, names: Mapping[str, str]) -> None:
        """Prompts that were deferred are begun again under other uids; `names` has these by the earlier ones."""
        self._places |= {name: self._places.pop(uid) for uid, name in names.items() if uid in self._places}
        for uid in names:
            self._written.pop(uid, None)

    def groups_ended(self, tags: Mapping[str, Mapping[str, Any]], uids: Iterable[str]) -> None:
        """Groups whose rows are in TransferQueue: `tags` by key, `<uid>_<session>_<row>`, with `response_len`."""
        found = {uid: defaultdict[str, int](int) for uid in uids}
        for key, tag in tags.items():
            uid, _, within = key.partition("_")
            if uid in found and "response_len" in tag:  # a row may be named before it is stored
                found[uid][within.partition("_")[0]] += int(tag["response_len"])
        self._ended |= {uid: list(sessions.values()) for uid, sessions in found.items() if sessions}

    def write(self, step: int, trained: Sequence[str], dropped: Sequence[str] = ()) -> None:
        """Appends the line of a step, in one write; `trained` and `dropped` are the uids of its groups."""
        self.begin([*self._ended, *trained])  # those that a checkpoint brought
        new = {uid: lengths for uid, lengths in self._ended.items() if self._written.get(uid) != lengths}
        self._written |= new
        self._ended.clear()
        by_place = sorted((self._places[uid], lengths) for uid, lengths in new.items())
        row = {
            "step": step,
            "begun": self._begun,
            "lengths": {str(place): lengths for place, lengths in by_place},
            "trained": sorted(self._places[uid] for uid in trained),
        }
        for uid in (*trained, *dropped):
            self._places.pop(uid, None)
            self._written.pop(uid, None)
        JsonLines(self.path).add(row)


@dataclass(frozen=True)
class RecordedLengths:
    """What the file has: `lengths` by a prompt's place, and the places of the groups that were trained, in order."""

    begun: int
    lengths: Mapping[int, tuple[int, ...]]
    trained: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> RecordedLengths | None:
        """None where there is no file, or nothing in it. A line that is still being written is left out."""
        rows = JsonLines(path).rows()
        lengths = {int(place): tuple(found) for row in rows for place, found in row["lengths"].items()}
        trained = tuple(place for row in rows for place in row["trained"])
        return cls(rows[-1]["begun"], lengths, trained) if rows else None
