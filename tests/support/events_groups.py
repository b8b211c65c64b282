"""Groups of calls under a sampler, over a live run: reopened, trained or dropped, as the trainer does it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count

from seamless_verl.algorithms.samplers import EndedGroup, PromptSampling, make_sampler

PROMPTS, FIRST, MOST = 4, 4, 10  # prompts that always have a group, its samples, and the most with extra ones
RIGHT = 0.1  # the share of samples that are right
FIRST_GROUPS: tuple[Callable[[int], bool], ...] = (
    lambda sample: False,  # reopened, and dropped
    lambda sample: sample == FIRST,  # reopened, and trained
    lambda sample: sample > 0,  # trained as it is
    lambda sample: True,  # dropped as it is
)
"""Which samples are right of each prompt's first group, so that a run of few groups has every end."""
Call = Callable[[str], Awaitable[int]]


class SampledGroups:
    """DARS over calls that events happen to. Invariant: each generated token is trained, dropped, or of an open group.

    `call` makes the call of that name to its end, and returns how many tokens it has.
    """

    def __init__(self, call: Call, seed: int) -> None:
        self.call, self.seed = call, seed
        self.sampling = self.new_sampling()
        self.open: dict[str, int] = {}  # tokens by group
        self.tokens: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def new_sampling(self) -> PromptSampling:
        return PromptSampling("dars", make_sampler("dars", {"most": MOST}), samples=FIRST)

    async def prompt(self, number: int, over: asyncio.Event) -> None:
        """One group of a prompt after the other."""
        for visit in count():
            if over.is_set():
                return
            right = FIRST_GROUPS[number] if visit == 0 else None
            await self.group(f"group-{number}.{visit}", f"prompt-{number}", right)

    async def group(self, uid: str, prompt: str, right: Callable[[int], bool] | None) -> None:
        rewards, [samples], self.open[uid] = list[float](), self.sampling.choose([prompt]), 0
        while samples:
            numbers = range(len(rewards), len(rewards) + samples)
            await asyncio.gather(*(self.sample(uid, f"{uid}_{number}") for number in numbers))
            rewards += [float(self.draw(uid, number) if right is None else right(number)) for number in numbers]
            verdict = self.sampling.judge([EndedGroup(uid, prompt, tuple(rewards), len(rewards))])[uid]
            self.resume()
            samples = verdict.extra
            self.outcomes["reopened"] += bool(samples)
        outcome = "dropped" if verdict.drop else "trained"
        self.tokens[outcome] += self.open.pop(uid)
        self.outcomes[outcome] += 1
        self.sampling.keep_only(self.open)
        self.check_integrity()

    async def sample(self, uid: str, name: str) -> None:
        tokens = await self.call(name)
        self.open[uid] += tokens
        self.tokens["generated"] += tokens

    def draw(self, uid: str, number: int) -> bool:
        return random.Random(f"{self.seed} {uid}_{number} is right").random() < RIGHT

    def resume(self) -> None:
        """What a resumed trainer has, from its checkpoint: groups that are open go on with it."""
        state = json.dumps(self.sampling.state_dict())
        self.sampling = self.new_sampling()
        self.sampling.load_state_dict(json.loads(state))

    def check_integrity(self) -> None:
        """Raises unless generated = trained + dropped + open, and each judged group has one end."""
        self.sampling.check_integrity()
        ends = self.tokens["trained"] + self.tokens["dropped"] + sum(self.open.values())
        assert self.tokens["generated"] == ends
        assert self.sampling.counts["lost"] == 0
