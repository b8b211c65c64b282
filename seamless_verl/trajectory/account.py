"""Token accounts of a session or a run: generated = trained + dropped, where each drop has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from seamless_verl.errors import IntegrityError


class DropReason(StrEnum):
    """Why a generated token is not trained."""

    STALE = "stale"  # the staleness policy masked it
    FORCED = "forced"  # it was sampled under a grammar that allowed no other token
    GRAMMAR = "grammar"  # it was sampled under a grammar, of whose tokens none are trained
    TOO_LONG = "too_long"  # it is beyond the maximum length of a sequence
    PROMPT_TOO_LONG = "prompt_too_long"
    """the context before the first token to train is as long as a sequence may be, or longer"""
    PLACEHOLDER = "placeholder"
    """it is an image's placeholder without an image, or after one, as a text may have it: no model computes the rest"""
    CANCELLED = "cancelled"  # its turn was cancelled, and no later turn replayed it: no agent acted on it
    FAILED = "failed"  # its turn failed, and no later turn replayed it: no agent acted on it
    SESSION = "session"
    """its whole session was dropped: abandoned, unreadable, or with too few others left in its group"""
    AGENT_FAILED = "agent_failed"
    """its whole session was dropped: its agent failed by itself, and `failure_reward` is null"""
    TOOL_FAILED = "tool_failed"  # its whole session was dropped: a tool or the sandbox of its agent failed
    ENGINE_FAILED = "engine_failed"
    """its whole session was dropped: the gateway or an engine failed a call of its agent"""
    EXPIRED = "expired"  # its whole session was dropped: its lifetime was over before its agent ended
    RUNNER_LOST = "runner_lost"
    """its whole session was dropped: its runner was lost, and its task began again in another session"""
    TIMED_OUT = "timed_out"
    """its whole session was dropped: its agent was ended at its time limit, or at that of its group"""
    REWARD = "reward"  # its whole session was dropped: what its score was is no finite number
    GROUP = "group"  # its group was dropped after it was handed over: too old, or filtered
    DEFERRED = "deferred"
    """its group was left over when its step had enough of them: the prompt begins again in a later step"""
    PIVOT = "pivot"  # its session was the median of its group, by which an advantage estimator measures the others
    REJECTED = "rejected"  # verl's `rollout_rs` masked it: trainer and engine give it other probabilities
    VALIDATION = "validation"  # its session was of a validation, which trains nothing


@dataclass(frozen=True)
class Account:
    """Token counts; accounts add up over sessions, groups and the run with `+`."""

    generated: int = 0
    trained: int = 0
    dropped: Mapping[DropReason, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nonzero = {reason: self.dropped[reason] for reason in DropReason if self.dropped.get(reason)}
        object.__setattr__(self, "dropped", nonzero)

    def __add__(self, other: Account) -> Account:
        reasons = self.dropped.keys() | other.dropped.keys()
        dropped = {reason: self.dropped.get(reason, 0) + other.dropped.get(reason, 0) for reason in reasons}
        return Account(self.generated + other.generated, self.trained + other.trained, dropped)

    def discarded(self, reason: DropReason) -> Account:
        """The same account with its trained tokens dropped for this reason.

        A session that is deferred is stopped in its calls: their tokens count as deferred, too, and not as cancelled.
        """
        dropped, tokens = dict(self.dropped), self.trained
        if reason is DropReason.DEFERRED:
            tokens += dropped.pop(DropReason.CANCELLED, 0)
        return Account(self.generated, 0, {**dropped, reason: dropped.get(reason, 0) + tokens})

    def with_dropped(self, tokens: int, reason: DropReason) -> Account:
        """The same account with so many of its trained tokens dropped for this reason."""
        return Account(
            self.generated, self.trained - tokens, {**self.dropped, reason: self.dropped.get(reason, 0) + tokens}
        )

    def metrics(self) -> dict[str, float]:
        """Token counts by metric name; every reason is present, also with 0."""
        dropped = {f"tokens/dropped/{reason}": float(self.dropped.get(reason, 0)) for reason in DropReason}
        return {"tokens/generated": float(self.generated), "tokens/trained": float(self.trained), **dropped}

    def check_integrity(self) -> None:
        """Raises IntegrityError unless generated = trained + dropped and no count is negative."""
        lowest = min(self.generated, self.trained, *self.dropped.values(), 0)
        if lowest < 0:
            raise IntegrityError("tokens counted below zero", 0, lowest)
        accounted = self.trained + sum(self.dropped.values())
        if accounted != self.generated:
            raise IntegrityError("tokens generated against trained and dropped", self.generated, accounted)


def drop_masked(metrics: Mapping[str, float], masked: int, reason: DropReason = DropReason.STALE) -> dict[str, float]:
    """An account's metrics with `masked` tokens counted as dropped for this reason, not as trained.

    Sessions are counted as trained when TransferQueue has them, before their tokens are masked. An account that began
    again since then may hold fewer than were masked, and is never below zero. Metrics without an account are returned
    as they are.
    """
    trained, dropped = "tokens/trained", f"tokens/dropped/{reason}"
    moved = min(masked, metrics.get(trained, 0.0))
    return {**metrics, **({trained: metrics[trained] - moved, dropped: metrics[dropped] + moved} if moved else {})}
