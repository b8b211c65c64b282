"""Lists of sessions and of groups: filtered, sorted and cut into pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.tools.view.index import SessionEntry
from seamless_verl.trajectory.session import Closed

PAGE = 50
MAX_PAGE = 500
FAILED = frozenset(Closed) - {Closed.FINISHED, Closed.LIMIT}


def reward_of(session: SessionEntry) -> float | None:
    """The reward that is trained: the one of that name, else the only one that is not of a turn, `NAME@SESSION.N`."""
    whole = [value for name, value in session.rewards.items() if f"@{session.session_id}." not in name]
    return session.rewards.get("reward", whole[0] if len(whole) == 1 else None)


def outcome_kind(outcome: str) -> str:
    """The outcome without the step."""
    return "trained" if outcome.startswith("step ") else outcome


@dataclass(frozen=True)
class Query:
    """Which sessions or groups, in which order, and which page of them, counted from 0; "" leaves a filter out.

    `text` begins the session's id or the prompt's; `kind` is one of `KINDS`. Groups are filtered by text and outcome.
    """

    text: str = ""
    stage: str = ""
    outcome: str = ""
    reason: str = ""
    dropped: str = ""
    kind: str = ""
    sort: str = "newest"
    page: int = 0
    size: int = PAGE

    @classmethod
    def of(cls, given: Mapping[str, str], sorts: Iterable[str]) -> Query:
        """The query of an address, in one of these orders; raises ConfigError for a parameter that cannot be meant."""
        texts = {name: given.get(name, "") for name in ("text", "stage", "outcome", "reason", "dropped", "kind")}
        sort, size = given.get("sort") or "newest", number("size", given.get("size"), PAGE)
        for name, value, choices in (("sort", sort, sorts), ("kind", texts["kind"], ("", *KINDS))):
            if value not in choices:
                raise ConfigError(name, value, "is unknown", f"Give one of {', '.join(filter(None, choices))}")
        if not 1 <= size <= MAX_PAGE:
            raise ConfigError("size", size, f"a page has 1 to {MAX_PAGE} rows", f"Leave it out for {PAGE}")
        return cls(**texts, sort=sort, page=number("page", given.get("page"), 0), size=size)

    def takes(self, one: SessionEntry) -> bool:
        return (
            (not self.text or one.session_id.startswith(self.text) or one.uid.startswith(self.text))
            and self.stage in ("", str(one.stage))
            and self.outcome in ("", outcome_kind(one.outcome), one.outcome)
            and self.reason in ("", one.reason)
            and self.dropped in ("", one.dropped)
            and (not self.kind or KINDS[self.kind](one))
        )

    def takes_group(self, one: GroupEntry) -> bool:
        wanted = self.outcome in ("", outcome_kind(one.outcome), one.outcome)
        return wanted and (not self.text or one.uid.startswith(self.text))

    def cut(self, rows: Sequence[Any], total: int, counts: Mapping[str, Mapping[str, int]]) -> Page:
        """The page of the `rows` that pass the filters, of `total`."""
        first = self.page * self.size
        return Page(rows[first : first + self.size], total, len(rows), self.page, self.size, counts)


def number(name: str, text: str | None, default: int) -> int:
    """A whole number, 0 or more; raises ConfigError for other text."""
    if not text:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(name, text, "is no whole number from 0 on", f"Leave it out for {default}")
    return int(text)


def is_failed(one: SessionEntry) -> bool:
    return one.reason in FAILED or one.outcome == "dropped"


KINDS: Mapping[str, Callable[[SessionEntry], bool]] = {
    "several_versions": lambda one: one.versions is not None and one.versions[0] != one.versions[1],
    "several_replicas": lambda one: len(one.replicas) > 1,
    "failed": is_failed,
    "training": lambda one: not one.validation,
    "validation": lambda one: one.validation,
}


def ascending(value: float | None) -> float:
    return math.inf if value is None else value


SORTS: Mapping[str, Callable[[SessionEntry], Any]] = {
    "newest": lambda one: -one.opened_at,
    "oldest": lambda one: one.opened_at,
    "longest": lambda one: -one.tokens,
    "most_calls": lambda one: -one.calls,
    "lowest_logprob": lambda one: ascending(one.mean_logprob),
    "lowest_reward": lambda one: ascending(reward_of(one)),
    "highest_reward": lambda one: ascending(None if (reward := reward_of(one)) is None else -reward),
}


@dataclass(frozen=True)
class Page:
    """A page of `rows`; `matching` of `total` pass the filters. `counts` says how many there are by filter's value."""

    rows: Sequence[Any]
    total: int
    matching: int
    page: int
    size: int
    counts: Mapping[str, Mapping[str, int]]


def list_sessions(entries: Sequence[SessionEntry], query: Query) -> Page:
    found = sorted(filter(query.takes, entries), key=SORTS[query.sort])
    counts = {
        "stage": Counter(str(one.stage) for one in entries),
        "outcome": Counter(outcome_kind(one.outcome) for one in entries),
        "reason": Counter(one.reason for one in entries if one.reason),
        "dropped": Counter(one.dropped for one in entries if one.dropped),
        "kind": {name: sum(map(is_kind, entries)) for name, is_kind in KINDS.items()},
    }
    return query.cut(found, len(entries), counts)


@dataclass(frozen=True)
class GroupEntry:
    """The sessions of one prompt; rewards are those of the sessions that have one, `outcome` that of most of them."""

    uid: str
    opened_at: float
    outcome: str
    validation: bool
    sessions: int
    failed: int
    tokens: int
    longest: int
    rewards: tuple[float, ...]
    mean_reward: float | None
    spread: float | None
    versions: tuple[int, int] | None


GROUP_SORTS: Mapping[str, Callable[[GroupEntry], Any]] = {
    "newest": lambda one: -one.opened_at,
    "oldest": lambda one: one.opened_at,
    "longest": lambda one: -one.longest,
    "failed": lambda one: -one.failed,
    "lowest_reward": lambda one: ascending(one.mean_reward),
    "largest_spread": lambda one: -(one.spread or 0.0),
}


def groups_of(entries: Iterable[SessionEntry]) -> list[GroupEntry]:
    """The groups, in the order of their first sessions."""
    members: dict[str, list[SessionEntry]] = {}
    for one in entries:
        members.setdefault(one.uid, []).append(one)
    return [group_of(uid, sessions) for uid, sessions in members.items()]


def group_of(uid: str, sessions: Sequence[SessionEntry]) -> GroupEntry:
    rewards = tuple(reward for one in sessions if (reward := reward_of(one)) is not None)
    versions = [version for one in sessions if one.versions for version in one.versions]
    return GroupEntry(
        uid,
        min(one.opened_at for one in sessions),
        Counter(one.outcome for one in sessions).most_common(1)[0][0],
        sessions[0].validation,
        len(sessions),
        sum(map(is_failed, sessions)),
        sum(one.tokens for one in sessions),
        max(one.tokens for one in sessions),
        rewards,
        sum(rewards) / len(rewards) if rewards else None,
        max(rewards) - min(rewards) if rewards else None,
        (min(versions), max(versions)) if versions else None,
    )


def list_groups(groups: Sequence[GroupEntry], query: Query) -> Page:
    found = sorted(filter(query.takes_group, groups), key=GROUP_SORTS[query.sort])
    counts = {"outcome": Counter(outcome_kind(one.outcome) for one in groups)}
    return query.cut(found, len(groups), counts)
