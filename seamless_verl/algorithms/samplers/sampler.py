"""The interface of samplers: the view they read, the decision they return, and their common base. Pure.

A *prompt* is a question of the data; a *group* is the samples that it gets in one visit. A sampler says how many
samples the next prompts get, and of each group that has ended whether it is trained, gets more samples first, or is
dropped. It changes nothing else, so that the trainer and the simulator run the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from seamless_verl.algorithms.samplers.history import GroupResult, PromptHistory


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose samples have all ended; `history` is of the prompt's earlier groups.

    `first` is how many samples it had when it was reopened, None while it was not.
    """

    history: PromptHistory
    result: GroupResult
    first: int | None = None


@dataclass(frozen=True)
class SamplingView:
    """`samples` is what a prompt gets by default, `rollout.n`; `offered` are the prompts to be submitted next."""

    samples: int
    offered: tuple[PromptHistory, ...] = ()
    finished: tuple[FinishedGroup, ...] = ()


@dataclass(frozen=True)
class GroupVerdict:
    """What becomes of a finished group: `extra` samples before it is judged again, or dropped for the reason `drop`.

    With neither it is trained.
    """

    extra: int = 0
    drop: str = ""


TRAIN_IT = GroupVerdict()


@dataclass(frozen=True)
class SamplingDecision:
    """How many samples each of the offered prompts gets, 0 to leave it out; what becomes of each finished group."""

    samples: tuple[int, ...]
    groups: tuple[GroupVerdict, ...]


class Sampler(Protocol):
    """Decides who is sampled, and how often; `decide` may remember, and `state_dict` has all that it remembers."""

    def decide(self, view: SamplingView) -> SamplingDecision: ...
    def metrics(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BaseSampler:
    """Every prompt gets the default number of samples, and every group is trained.

    `OPTIONS` are the settings that its constructor takes. `REOPENS` says that it may give a group more samples,
    `VARIES` that groups are of different sizes.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    REOPENS: ClassVar[bool] = False
    VARIES: ClassVar[bool] = True

    def decide(self, view: SamplingView) -> SamplingDecision:
        samples = tuple(self._samples(view.offered, view.samples)) if view.offered else ()
        return SamplingDecision(samples, tuple(self._judge(group) for group in view.finished))

    def _samples(self, offered: Sequence[PromptHistory], default: int) -> Sequence[int]:
        return [default] * len(offered)

    def _judge(self, group: FinishedGroup) -> GroupVerdict:
        return TRAIN_IT

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
