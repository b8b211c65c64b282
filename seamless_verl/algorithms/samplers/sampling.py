"""Runs a sampler: asks it before prompts are submitted and when groups end, and keeps what it must know. Pure.

The trainer and the simulator both use it. Owned state: the prompts' histories, the sampler, the groups that were
reopened and have not ended again, and those in the queue that have ended for good. A checkpoint has all of it.

Invariants:
- A group is judged when its samples have ended, and again only after it was reopened. Its result enters the history
  once, with the verdict that ends it.
- Groups judged = trained + dropped + reopened + lost, where a lost one was reopened and left the queue before it ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any

from seamless_verl.algorithms.samplers.sampler import (
    FinishedGroup,
    GroupResult,
    GroupVerdict,
    PromptHistories,
    Sampler,
    SamplingView,
)
from seamless_verl.errors import ConfigError, IntegrityError

SUCCESS = "seamless.sampler.success"
LEVELS = ("none", "hard", "middle", "easy")
"""Names of groups by their pass rate: 0, up to 1/4, up to 3/4, above."""


@dataclass(frozen=True)
class EndedGroup:
    """The group `uid` of a prompt, all of whose samples have ended, with the reward of each that has one.

    `next_session` is above the numbers of the sessions that it has rows of.
    """

    uid: str
    prompt: str
    rewards: tuple[float, ...]
    next_session: int


@dataclass(frozen=True)
class Reopened:
    """A group that runs again: `first` samples have ended, `extra` more are to end, in sessions from `next_session`."""

    first: int
    extra: int
    next_session: int


class PromptSampling:
    """`samples` is what a prompt gets by default; a reward of `success` or more is right, None takes it as it is."""

    def __init__(self, name: str, sampler: Sampler, *, samples: int, success: float | None = None) -> None:
        self.name, self.sampler, self.samples, self.success = name, sampler, samples, success
        self.histories = PromptHistories()
        self.reopened: dict[str, Reopened] = {}
        self.final: dict[str, GroupVerdict] = {}  # of groups that ended for good, while they are in the queue
        self.counts: Counter[str] = Counter()
        self._given: list[int] = []  # samples of prompts since the last metrics
        self._levels: defaultdict[str, list[int]] = defaultdict(list)  # samples of groups by level, since then
        self._passed: list[float] = []  # pass rates of groups, since then

    def choose(self, prompts: Sequence[str]) -> list[int]:
        """How many samples each of these prompts gets, in their order; 0 leaves it out."""
        offered = tuple(self.histories.of(prompt) for prompt in prompts)
        chosen = list(self.sampler.decide(SamplingView(self.samples, offered=offered)).samples)
        assert len(chosen) == len(prompts) and min(chosen, default=0) >= 0
        self._given += [number for number in chosen if number]
        self.counts["left_out"] += chosen.count(0)
        return chosen

    def judge(self, ended: Sequence[EndedGroup]) -> dict[str, GroupVerdict]:
        """By uid what becomes of these groups; of those that ended for good before, what was decided then.

        Raises:
            ConfigError: a reward is not from 0 to 1, and `success` is not set.
        """
        new = [group for group in ended if group.uid not in self.final]
        results = [GroupResult.of(map(self.outcome, group.rewards)) for group in new]
        finished = tuple(
            FinishedGroup(self.histories.of(group.prompt), result, self._first(group.uid))
            for group, result in zip(new, results, strict=True)
        )
        verdicts = self.sampler.decide(SamplingView(self.samples, finished=finished)).groups if new else ()
        for group, result, verdict in zip(new, results, verdicts, strict=True):
            self._apply(group, result, verdict)
        return {group.uid: self.final[group.uid] for group in ended if group.uid in self.final} | {
            group.uid: verdict for group, verdict in zip(new, verdicts, strict=True) if verdict.extra
        }

    def outcome(self, reward: float) -> float:
        """A reward as an outcome from 0 to 1."""
        if self.success is not None:
            return float(reward >= self.success)
        if not 0 <= reward <= 1:  # also of NaN
            reason = f"a session has the reward {reward}, which is no pass rate from 0 to 1"
            way_out = f"Set {SUCCESS} to the least reward of a right answer"
            raise ConfigError(SUCCESS, None, reason, way_out)
        return reward

    def keep_only(self, uids: Collection[str]) -> None:
        """Forgets groups that are no longer in the queue."""
        for uid in [uid for uid in self.reopened if uid not in uids]:
            del self.reopened[uid]
            self.counts["lost"] += 1
        self.final = {uid: verdict for uid, verdict in self.final.items() if uid in uids}

    def dropped(self) -> dict[str, str]:
        """Groups in the queue that are not to be trained, and why."""
        return {uid: verdict.drop for uid, verdict in self.final.items() if verdict.drop}

    def metrics(self) -> dict[str, float]:
        """Since the last call, and totals since the run was started; checks the conservation of groups."""
        self.check_integrity()
        found = {f"seamless/sampler/{name}": float(self.counts[name]) for name in (*COUNTED, "left_out")}
        if self._given:
            spread = {"mean": fmean(self._given), "min": min(self._given), "max": max(self._given)}
            found |= {f"seamless/sampler/samples/{name}": value for name, value in spread.items()}
        if self._passed:
            found["seamless/sampler/pass_rate"] = fmean(self._passed)
        found |= {f"seamless/sampler/samples_of/{level}": fmean(sizes) for level, sizes in self._levels.items()}
        self._given, self._passed, self._levels = [], [], defaultdict(list)
        return {name: float(value) for name, value in found.items()} | self.sampler.metrics()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every group that was judged has one end, or runs again."""
        ends = self.counts["trained"] + self.counts["dropped"] + self.counts["lost"] + len(self.reopened)
        if self.counts["judged"] != ends:
            raise IntegrityError("groups judged = trained + dropped + reopened + lost", self.counts["judged"], ends)

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sampler": self.sampler.state_dict(),
            "histories": self.histories.state_dict(),
            "reopened": {uid: astuple(one) for uid, one in self.reopened.items()},
            "final": {uid: one.drop for uid, one in self.final.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint; what another sampler remembered is not used, the histories are."""
        self.histories.load_state_dict(state["histories"])
        self.reopened = {str(uid): Reopened(*map(int, parts)) for uid, parts in state["reopened"].items()}
        self.final = {str(uid): GroupVerdict(drop=str(reason)) for uid, reason in state["final"].items()}
        dropped = len(self.dropped())
        ends = {"dropped": dropped, "trained": len(self.final) - dropped}
        self.counts.update(ends, judged=len(self.reopened) + len(self.final))
        if state["name"] == self.name:
            self.sampler.load_state_dict(state["sampler"])

    def _first(self, uid: str) -> int | None:
        return self.reopened[uid].first if uid in self.reopened else None

    def _apply(self, group: EndedGroup, result: GroupResult, verdict: GroupVerdict) -> None:
        if group.uid in self.reopened:
            del self.reopened[group.uid]
            assert not verdict.extra, "a group is reopened once"
        else:
            self.counts["judged"] += 1
        if verdict.extra:
            self.reopened[group.uid] = Reopened(result.samples, verdict.extra, group.next_session)
            self.counts.update({"reopened": 1, "extra_samples": verdict.extra})
            return
        self.final[group.uid] = verdict
        self.counts["dropped" if verdict.drop else "trained"] += 1
        self.histories.add(group.prompt, result)
        self._passed.append(result.pass_rate)
        self._levels[level_of(result.pass_rate)].append(result.samples)


COUNTED = ("judged", "trained", "dropped", "reopened", "extra_samples", "lost")


def level_of(pass_rate: float) -> str:
    """Which of LEVELS a pass rate is."""
    if pass_rate == 0:
        return LEVELS[0]
    return LEVELS[1] if pass_rate <= 0.25 else LEVELS[2] if pass_rate <= 0.75 else LEVELS[3]
