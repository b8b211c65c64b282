"""A proposer of drafts for vLLM (`speculative_config.method=custom_class`): tokens that other samples went on with.

It runs in the worker whose drafts the engine takes. The model verifies each draft, so that tokens and their
distribution are those without drafts; only how many come with a step depends on what is proposed here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.replica.suffix_store import LEAST, KeptSample, SuffixStore
from seamless_verl.rollout.engine import FIRST_PROMPT, RESUMED_TOKENS
from seamless_verl.rollout.precedence import name_of
from seamless_verl.rollout.shared_samples import SharedSample

ROOM = 1 << 20  # tokens of a store, some 200 bytes each
KEPT = 0.95  # of what was observed, when a step later
OUTLIER = 4  # times the expected step: a pause, or nothing to do, and no step
PROBE_EVERY = 16  # steps of a call whose drafts were all rejected
UNKNOWN_LOAD = 0.5
"""The chance from which a draft is worth its place in a step, until times of steps are known."""


class Acceptance:
    """The chance that the next draft is accepted, where those before it were: of what was verified lately."""

    def __init__(self, prior: Acceptance | None = None) -> None:
        self.accepted, self.rejected, self.prior = (1.0, 0.5, None) if prior is None else (0.0, 0.0, prior)

    @property
    def chance(self) -> float:
        prior = 0.0 if self.prior is None else self.prior.chance
        weight = 0.0 if self.prior is None else 1.0
        return (self.accepted + weight * prior) / (self.accepted + self.rejected + weight)

    def verified(self, drafted: int, accepted: int) -> None:
        self.accepted = KEPT * self.accepted + accepted
        self.rejected = KEPT * self.rejected + (accepted < drafted)
        if self.prior is not None:
            self.prior.verified(drafted, accepted)


def worthwhile(chance: float, load: float) -> int:
    """How many drafts are each likelier to be accepted than `load`, which each of them costs."""
    if chance < load:
        return 0
    return int(min(math.log(max(load, 1e-6)) / math.log(min(chance, 0.999)), 1 << 10))


class StepTimes:
    """Learns seconds of a decode step by its tokens: a part for the step, and a part for each token."""

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if self.weight and seconds > OUTLIER * self.y / self.weight:
            return
        observed = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        kept = (self.weight, self.x, self.y, self.xx, self.xy)
        self.weight, self.x, self.y, self.xx, self.xy = (
            KEPT * old + new for old, new in zip(kept, observed, strict=True)
        )

    def parts(self) -> tuple[float, float] | None:
        """Seconds of a step without tokens and of each token; None while steps had one size, which tells nothing."""
        spread = self.weight * self.xx - self.x * self.x
        if self.weight < 2 or spread < self.weight:
            return None
        each = max(0.0, (self.weight * self.xy - self.x * self.y) / spread)
        return max(0.0, (self.y - each * self.x) / self.weight), each

    def load(self, tokens: int) -> float:
        """The share of a step with so many tokens that grows with their number: a draft must be likelier than that to
        bring more tokens a second."""
        if (parts := self.parts()) is None:
            return UNKNOWN_LOAD
        fixed, each = parts
        return min(1.0, each * tokens / max(fixed + each * tokens, 1e-9))

    def saved(self, calls: int, drafted: int, accepted: int) -> float:
        """The seconds that so many calls would have needed for the accepted tokens, less those that the drafts took."""
        if calls == 0 or (parts := self.parts()) is None:
            return 0.0
        fixed, each = parts
        return accepted * (fixed / calls + each) - drafted * each


@dataclass
class DraftGains:
    """What drafts brought: accepted tokens that followed in a sample of the same prompt, and the engine's seconds."""

    of_prompt: int = 0
    saved_s: float = 0.0


@dataclass(eq=False)
class DraftedCall:
    """A running request: its sample, how many of its tokens are in the store, and its drafts of the last step."""

    prompt: str
    sample: KeptSample
    seen: int
    end: int  # tokens that it has at most, its prompt's included
    acceptances: tuple[Acceptance, Acceptance]  # of drafts of other prompts, and of its own
    own: bool = True
    drafted: int = 0
    idle: int = 0


class SuffixProposer:
    """vLLM's worker makes it; it proposes nothing until it has the worker's model runner.

    A step has no more tokens with drafts than `room`: an engine has memory for the logits of `max_num_seqs` tokens.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.limit = vllm_config.model_config.max_model_len
        self.room = max(vllm_config.scheduler_config.max_num_seqs, 1 + self.most)
        self.runner: Any = None
        self.store, self.times = SuffixStore(ROOM), StepTimes()
        self.calls: dict[str, DraftedCall] = {}
        self.acceptances = Acceptance(), Acceptance()
        self.gains = DraftGains()
        self.before: tuple[float, set[str]] = 0.0, set()

    def draft_for(self, runner: Any) -> None:
        """Drafts from now on for vLLM's model runner.

        Where a call of a batch is so long that the most tokens that may be drafted would have no room behind it, vLLM
        asks for no drafts, and verifies that many zeros for each call of the batch instead. Here a draft never goes
        beyond the end of its own call.
        """
        runner.effective_drafter_max_model_len = self.limit + self.most
        self.runner = runner

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls it; there is none."""

    def committed(self, version: int) -> None:
        self.store.version = version

    def learn(self, samples: Iterable[SharedSample]) -> None:
        """Adds what other engines generated to the store."""
        for one in samples:
            sample = self.store.begin(one.prompt, one.context)
            self.store.extend(one.prompt, sample, one.ids)

    def propose(
        self, sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """The drafts of each request of the batch; `sampled` has what this step brought."""
        if self.runner is None:
            return [[] for _ in sampled]
        req_ids = self.runner.input_batch.req_ids
        self._observe(req_ids, sampled)
        rows = [
            self._call(req_ids[row], int(num_tokens[row]), token_ids[row], len(new)) if new else None
            for row, new in enumerate(sampled)
        ]
        load = self.times.load(len(rows))
        if len(self.calls) > len(rows):
            for gone in self.calls.keys() - self.runner.requests.keys():
                del self.calls[gone]
        drafts, room = list[list[int]](), self.room - len(rows)
        for call in rows:
            drafts.append([] if call is None or room <= 0 else self._drafts(call, load, room))
            room -= len(drafts[-1])
        return drafts

    def _observe(self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Learns from the time since the last step, where both had the same requests and all of them decode."""
        now, running = time.perf_counter(), {req_ids[row] for row, new in enumerate(sampled) if new}
        began, requests = self.before
        self.before = now, running
        if running and running == requests and len(running) == len(sampled):
            self.times.observe(sum(1 + self.calls[name].drafted for name in running), now - began)

    def _call(self, req_id: str, num_tokens: int, token_ids: Any, brought: int) -> DraftedCall:
        """The request, with what this step brought added to the store, and what its drafts brought to the gains."""
        if (call := self.calls.get(req_id)) is None:
            call = self.calls[req_id] = self._begin(req_id, token_ids)
        elif call.drafted:
            accepted, (_, running) = min(call.drafted, brought - 1), self.before
            call.acceptances[call.own].verified(call.drafted, accepted)
            self.gains.of_prompt += accepted * call.own
            self.gains.saved_s += self.times.saved(len(running), call.drafted, accepted)
        self.store.extend(call.prompt, call.sample, token_ids[call.seen : num_tokens].tolist())
        call.seen, call.drafted = num_tokens, 0
        return call

    def _begin(self, req_id: str, token_ids: Any) -> DraftedCall:
        request = self.runner.requests[req_id]
        params = request.sampling_params
        extra = params.extra_args or {}
        begin = request.num_prompt_tokens - extra.get(RESUMED_TOKENS, 0)
        prompt = extra.get(FIRST_PROMPT) or name_of(token_ids[:begin].tobytes())
        sample = self.store.begin(prompt, token_ids[max(0, begin - LEAST) : begin].tolist())
        most = self.limit if params.max_tokens is None else request.num_prompt_tokens + params.max_tokens
        others, own = (Acceptance(prior) for prior in self.acceptances)
        return DraftedCall(prompt, sample, begin, min(self.limit, most), (others, own))

    def _drafts(self, call: DraftedCall, load: float, room: int) -> list[int]:
        counts = [worthwhile(one.chance, load) for one in call.acceptances]
        if not any(counts):
            call.idle += 1
            if call.idle % PROBE_EVERY or load > UNKNOWN_LOAD:
                return []  # a full engine does not even look
            counts = [1, 1]
        found = self.store.propose(call.sample, min(self.most, room, max(counts), call.end - call.seen - 1))
        call.own = found.own
        drafts = found.tokens[: min(counts[found.own], found.matched)]
        call.drafted = len(drafts)
        return list(drafts)
