"""How a run treated a session, from what the journal has of it: its record, limits, policies and what was dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamless_verl.errors import ConfigError
from seamless_verl.journal.events import GroupOutcome
from seamless_verl.journal.stored import Stage, StoredSession
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import GrammarTokens, TokenPolicy, make_policy
from seamless_verl.trajectory.sequences import SequenceLimits
from seamless_verl.trajectory.session import Closed

TRAIN_ALL = "train_all"


def newest_version(stored: StoredSession) -> int:
    """The newest weight version that generated tokens of the session; 0 if there are none."""
    return max((segment.version for call in stored.calls for segment in call.segments), default=0)


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
        version = details.get("version", newest_version(stored))
    number = session_number(stored)
    dropped = None
    if stored.stage is not Stage.OPEN and stored.handed.get("kept") is False:
        dropped = DropReason(stored.handed.get("dropped", DropReason.SESSION))
    elif stored.validation:
        dropped = DropReason.VALIDATION
    elif stored.group is not None and stored.group.outcome is not GroupOutcome.TRAINED:
        dropped = DropReason.DEFERRED if stored.group.outcome is GroupOutcome.DEFERRED else DropReason.GROUP
    elif stored.group is not None and stored.stage in (Stage.OPEN, Stage.CLOSED):  # it was trained without this one
        dropped = DropReason.RUNNER_LOST if stored.reason == Closed.RUNNER_LOST else DropReason.SESSION
    elif number is not None and details.get("pivot") == number:
        dropped = DropReason.PIVOT
    queued = stored.outcome == "queued"
    policy = policy or details.get("policy", TRAIN_ALL)
    tokens = GrammarTokens(grammar or stored.handing.get("grammar", GrammarTokens.MASK_FORCED))
    found = None if dropped is not None else details.get("advantages", {}).get(number)
    advantage = None if found is None else (float(found[0]), float(found[1]), float(found[2]))
    return Recorded(limits, str(policy), int(version), tokens, dropped, queued, advantage)


def session_number(stored: StoredSession) -> str | None:
    """Its number among the sessions of its prompt, as the trainer counts; None of one that no trainer asked for."""
    metadata = stored.settings.get("metadata")
    number = metadata.get("session") if isinstance(metadata, Mapping) else None
    return number if isinstance(number, str) else None


def parse_policy(text: str) -> TokenPolicy:
    """The policy of `NAME` or `NAME:k`; raises ConfigError with the way out."""
    name, colon, bound = text.partition(":")
    if not colon:
        return make_policy(name)
    if not bound.isdecimal():
        way_out = "Give a whole number of versions, 0 or more, as in mask_older_than:1"
        raise ConfigError("--policy", text, f"{bound!r} is no bound", way_out)
    policy = make_policy(name, int(bound))
    if not policy.bounded:
        raise ConfigError("--policy", text, f"{name} takes no bound", f"Give {name} alone, or a policy with a bound")
    return policy
