"""Sums of two digits, `a+b=`, in one turn. A model with random weights learns them by the partial rewards."""

import random
import re

import verifiers.v1 as vf

REACH = 3
"""A number at this distance from the sum, or a larger one, earns no more than any number."""


class SumsConfig(vf.TasksetConfig):
    count: int = 256
    seed: int = 0


class Sum(vf.TaskData):
    answer: int


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward
    async def close(self, trace: vf.Trace) -> float:
        """1 for the sum; for another number 0.1, and up to 0.3 near the sum; a little less for a long reply."""
        reply = trace.last_reply or ""
        found = re.match("[0-9]{1,4}", reply)
        if found is None:
            return 0.0
        off = abs(int(found[0]) - self.data.answer)
        brevity = 0.2 / len(reply)
        return 0.8 + brevity if off == 0 else 0.1 + 0.2 * max(0.0, 1 - off / REACH) + brevity / 2

    @vf.metric
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.answer))


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        draw = random.Random(self.config.seed)
        for _ in range(self.config.count):
            total = draw.randint(0, 9)
            first = draw.randint(0, total)
            yield SumTask(Sum(prompt=f"{first}+{total - first}=", answer=total), self.config.task)


__all__ = ["SumsTaskset"]
