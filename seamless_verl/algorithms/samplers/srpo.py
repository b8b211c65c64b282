"""`seamless.sampler.name=srpo`: prompts that the model has learned are left out.

History resampling of SRPO (arXiv 2504.14286): at an epoch's end the prompts of which all samples were right are left
out; those with mixed samples, and those of which all were wrong, stay. Without `threshold` such a prompt is left out of
the next epoch and offered again in the one after it: a policy that forgets it is asked again. With `threshold`, prompts
of which a share as large, or larger, of the last group was right are left out for good; 0.9 is ScaleRL's (arXiv
2510.13786).

An epoch is counted for each prompt by itself: it is decided when the data offers the prompt again. A group that still
runs then has no result yet, and leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from seamless_verl.algorithms.samplers.sampler import PromptHistory, Sampler


class Srpo(Sampler):
    """Owned state: for each prompt that was left out, after how many groups it was last.

    `for_good` has those that were left out with a threshold, with the pass rate that reached it. Without a threshold
    one is left out of an epoch alone, which says nothing of the time after a resume with one.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("threshold",)
    VARIES: ClassVar[bool] = False

    def __init__(self, *, threshold: float | None = None) -> None:
        self.threshold = threshold
        self.left_out: dict[str, int] = {}
        self.for_good: dict[str, float] = {}

    def _samples(self, offered: Sequence[PromptHistory], default: int) -> Sequence[int]:
        leaves_out = self._leaves_out_once if self.threshold is None else self._leaves_out_for_good
        return [0 if history.groups and leaves_out(history) else default for history in offered]

    def _leaves_out_once(self, history: PromptHistory) -> bool:
        self.for_good.pop(history.prompt, None)
        groups = len(history.groups)
        if not history.groups[-1].all_right or self.left_out.get(history.prompt) == groups:
            return False
        self.left_out[history.prompt] = groups
        return True

    def _leaves_out_for_good(self, history: PromptHistory) -> bool:
        assert self.threshold is not None
        rate = history.groups[-1].pass_rate
        if rate < self.threshold:
            return self.for_good.get(history.prompt, 0.0) >= self.threshold  # left out before this group had ended
        self.left_out[history.prompt] = len(history.groups)
        self.for_good[history.prompt] = rate
        return True

    def metrics(self) -> dict[str, float]:
        return {"seamless/sampler/prompts_left_out": float(len(self.left_out))}

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": dict(self.left_out), "for_good": dict(self.for_good)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An older checkpoint does not say who was left out for good: its prompts are judged by their last groups."""
        self.left_out = {str(prompt): int(groups) for prompt, groups in state["left_out"].items()}
        self.for_good = {str(prompt): float(rate) for prompt, rate in state.get("for_good", {}).items()}
