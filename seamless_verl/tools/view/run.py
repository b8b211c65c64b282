"""Reads a run for the page: each method answers one question from the files as they are now.

Any thread may call. What was read is kept as long as its file has not changed, so that an open page costs next to
nothing while nothing happens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from seamless_verl.errors import SeamlessError
from seamless_verl.journal import JournalReader
from seamless_verl.tools.view.folder import RunFiles
from seamless_verl.tools.view.index import JournalIndex, SessionEntry
from seamless_verl.tools.view.metrics import MetricsReader, Series, numbers_of, read_series
from seamless_verl.tools.view.sessions import GroupEntry, Page, Query, groups_of, list_groups, list_sessions
from seamless_verl.tools.view.timeline import read_lanes
from seamless_verl.tools.view.trajectory import Answer, Texts, Trajectory

KEPT = 16  # sessions whose trees are kept, and as many pictures of lanes
Key = TypeVar("Key")
Value = TypeVar("Value")
Stamp: TypeAlias = tuple[tuple[int, int], ...]


class RunView:
    """The run in `folder`; `model` is the folder of its tokenizer, by default as the run says."""

    def __init__(self, folder: Path, *, model: str | None = None) -> None:
        self.folder, self._model = folder, model
        self._lock = threading.Lock()
        self._metrics = MetricsReader(folder)
        self._indexes: dict[Path, JournalIndex] = {}
        self._stamp: Stamp = ()
        self._entries: dict[str, SessionEntry] = {}
        self._groups: list[GroupEntry] = []
        self._texts: dict[str | None, Texts] = {}
        self._lanes: dict[tuple[object, ...], Answer | None] = {}
        self._trajectories: dict[str, tuple[SessionEntry, Trajectory]] = {}

    def read_journals(self) -> None:
        """Raises JournalError if one cannot be read, and ConfigError if a newer release made it."""
        with self._lock:
            self._refresh(RunFiles.of(self.folder))

    def summary(self) -> Answer:
        """`running` is None where that is not known; `remarks` say what the page cannot show, and why."""
        with self._lock:
            files, steps = RunFiles.of(self.folder), self._metrics.steps()
            remarks = remarks_of(files, steps=len(steps))
            try:
                self._refresh(files)
            except (SeamlessError, OSError) as error:  # devices and metrics are shown all the same
                remarks.append(f"Sessions cannot be shown. {error}")
            last = steps[-1] if steps else None
            return {
                "folder": str(self.folder),
                "description": files.description,
                "running": files.running,
                "now": time.time(),
                "step": last.step if last else None,
                "metrics": numbers_of(last) if last else {},
                "journals": [str(path) for path in files.journals],
                "sessions": len(self._entries),
                "remarks": remarks,
            }

    def series(self, extra: Sequence[str] = ()) -> Series:
        with self._lock:
            return read_series(self._metrics.steps(), self._metrics.names, extra)

    def lanes(self, columns: int, last_s: float | None) -> Answer | None:
        """None while no step has ended."""
        with self._lock:
            trace = RunFiles.of(self.folder).trace
            if trace is None:
                return None
            key = (trace, stamp_of([trace]), columns, last_s)
            if key not in self._lanes:
                keep(self._lanes, key, read_lanes(trace, columns=columns, last_s=last_s))
            return self._lanes[key]

    def sessions(self, query: Query) -> Page:
        with self._lock:
            self._refresh(RunFiles.of(self.folder))
            return list_sessions(list(self._entries.values()), query)

    def groups(self, query: Query) -> Page:
        with self._lock:
            self._refresh(RunFiles.of(self.folder))
            return list_groups(self._groups, query)

    def session(self, session_id: str) -> Answer:
        """A session, and the rewards of its group by session, to compare; raises LookupError if no journal has it."""
        with self._lock:
            trajectory = self._trajectory(session_id)
            uid = trajectory.stored.uid
            group = {one.session_id: one.rewards for one in self._entries.values() if one.uid == uid}
            remarks = [trajectory.texts.missing] if trajectory.texts.missing else []
            return {"session": trajectory.view(), "group": group, "remarks": remarks}

    def tokens(self, session_id: str, number: int, start: int, count: int, revision: str) -> Answer | None:
        """Tokens of a node of the tree's `revision`, "" for any; None if the tree has changed since.

        Raises:
            LookupError: no journal has the session, or the tree no such node.
        """
        with self._lock:
            trajectory = self._trajectory(session_id)
            return trajectory.tokens(number, start, count) if revision in ("", trajectory.revision) else None

    def turn_texts(self, session_id: str, turn_id: str) -> Answer:
        """Raises LookupError if no journal has the session, or it no such turn."""
        with self._lock:
            return self._trajectory(session_id).turn_texts(turn_id)

    def _refresh(self, files: RunFiles) -> None:
        stamp = stamp_of(files.journals)
        if stamp == self._stamp:
            return
        self._indexes = {path: self._indexes.get(path) or JournalIndex(path) for path in files.journals}
        for index in self._indexes.values():
            index.refresh()
        entries = [one for index in self._indexes.values() for one in index.entries()]
        self._entries = {one.session_id: one for one in sorted(entries, key=lambda one: one.opened_at)}
        self._groups = groups_of(self._entries.values())
        self._stamp = stamp

    def _trajectory(self, session_id: str) -> Trajectory:
        """Built again only when the session has changed."""
        files = RunFiles.of(self.folder)
        self._refresh(files)
        entry = self._entries.get(session_id)
        if entry is None:
            raise LookupError(f"no session {session_id}")
        known = self._trajectories.get(session_id)
        if known is not None and known[0] == entry:
            return known[1]
        for path in files.journals:
            stored = JournalReader(path).read(session_id)
            if stored is not None:
                trajectory = Trajectory(stored, self._texts_of(files))
                keep(self._trajectories, session_id, (entry, trajectory))
                return trajectory
        raise LookupError(f"session {session_id} was deleted")

    def _texts_of(self, files: RunFiles) -> Texts:
        model = self._model or (files.description.model if files.description else None)
        if model not in self._texts:
            self._texts[model] = Texts.load(model)
        return self._texts[model]


def remarks_of(files: RunFiles, *, steps: int) -> list[str]:
    """What the page cannot show, and whether it may yet come: not of a run that has ended."""
    ended = files.running is False and (files.description is not None or steps > 0)
    journal, step = "No journal yet", "No step has ended yet, or the run kept no metrics."
    if ended:
        journal = "The run has ended, and kept no journal"
        step = "The run has ended before its first step, or kept no metrics."
    missing = [] if files.journals else [f"{journal}: sessions are on record with seamless.gateway.enabled."]
    return missing if steps else [*missing, step]


def keep(cache: dict[Key, Value], key: Key, value: Value) -> None:
    """Puts a value into a cache of `KEPT` values; the oldest one goes."""
    cache.pop(key, None)
    cache[key] = value
    if len(cache) > KEPT:
        del cache[next(iter(cache))]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Changes when one of the files does, or what SQLite wrote beside it."""
    return tuple(file_stamp(f"{path}{end}") for path in paths for end in ("", "-wal"))


def file_stamp(path: str) -> tuple[int, int]:
    """Time and size; zeros for a file that does not exist."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size
