"""How a run treated a session, from what the journal has of it: its record, limits, policies and what was dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seamless_verl.journal.events import GroupOutcome
from seamless_verl.journal.stored import Stage, StoredGroup, StoredSession, is_validation
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import GrammarTokens
from seamless_verl.trajectory.sequences import SequenceLimits
from seamless_verl.trajectory.session import Closed

TRAIN_ALL = "train_all"


@dataclass(frozen=True)
class Recorded:
    """How a run treated a session."""

    limits: SequenceLimits
    policy: str
    version: int  # the trainer's
    grammar: GrammarTokens
    dropped: DropReason | None = None  # why nothing was trained, if so, and if it is known
    queued: bool = False  # it waits to be trained
    advantage: tuple[float, float, float] | None = None  # the mean, the least and the greatest of its trained tokens

    def account(self, account: Account) -> Account:
        """The account of its sequences, as the run counted it."""
        return account if self.dropped is None else account.discarded(self.dropped)


def recorded(
    stored: StoredSession, policy: str | None = None, version: int | None = None, grammar: str | None = None
) -> Recorded:
    """What the journal has of it; `policy`, `version` and `grammar` are the user's own, in place of the run's."""
    limits = SequenceLimits(**stored.handing.get("limits", {}))
    details = {} if stored.group is None else stored.group.details
    if version is None:
        newest = max((segment.version for call in stored.calls for segment in call.segments), default=0)
        version = details.get("version", newest)
    why = dropped_of(stored.stage, stored.reason, stored.settings, stored.handed, stored.group)
    dropped = None if why is None else DropReason(why)
    queued = stored.outcome == "queued"
    policy = policy or details.get("policy", TRAIN_ALL)
    tokens = GrammarTokens(grammar or stored.handing.get("grammar", GrammarTokens.MASK_FORCED))
    found = None if dropped is not None else details.get("advantages", {}).get(session_number(stored.settings))
    advantage = None if found is None else (float(found[0]), float(found[1]), float(found[2]))
    return Recorded(limits, str(policy), int(version), tokens, dropped, queued, advantage)


def dropped_of(
    stage: Stage,
    reason: str | None,
    settings: Mapping[str, Any],
    end_note: Mapping[str, Any],
    group: StoredGroup | None,
) -> str | None:
    """Why nothing of a session was trained, a DropReason, if so, and if it is known.

    `end_note` is that of its hand-over's end, which may be of an earlier release.
    """
    if stage is not Stage.OPEN and end_note.get("kept") is False:
        return str(end_note.get("dropped", DropReason.SESSION))
    if is_validation(settings):
        return DropReason.VALIDATION
    if group is None:
        return None
    if group.outcome is not GroupOutcome.TRAINED:
        return DropReason.DEFERRED if group.outcome is GroupOutcome.DEFERRED else DropReason.GROUP
    if stage in (Stage.OPEN, Stage.CLOSED):  # it was trained without this one
        return DropReason.RUNNER_LOST if reason == Closed.RUNNER_LOST else DropReason.SESSION
    number = session_number(settings)
    return DropReason.PIVOT if number is not None and group.details.get("pivot") == number else None


def session_number(settings: Mapping[str, Any]) -> str | None:
    """Its number among the sessions of its prompt, as the trainer counts; None of one that no trainer asked for."""
    metadata = settings.get("metadata")
    number = metadata.get("session") if isinstance(metadata, Mapping) else None
    return number if isinstance(number, str) else None
