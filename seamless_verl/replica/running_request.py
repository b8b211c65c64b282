"""What vLLM's engine says of one request: which tokens are of which weight version, their routes, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput
from vllm.v1.engine.output_processor import RequestOutputCollector

from seamless_verl.replica.own_logprobs import HIDDEN, split_rank
from seamless_verl.trajectory.records import Finish, TopLogprobs
from seamless_verl.trajectory.routes import Routes

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.CUT}


class RouteReader:
    """Takes a request's routes from vLLM, as many as tokens leave.

    vLLM's state of a request collects them: with the first token those of the prompt's positions from the one that was
    asked for, then one with each token. It gives them with the last output alone, and not where two outputs were merged
    because nobody had read the first. The law: as many rows have come as the prompt and the tokens so far need, whether
    these have left or not. Where it does not hold, nobody knows whose a row is.
    """

    def __init__(self, state: Any, prompt_rows: int) -> None:
        """`prompt_rows` of the first ones are the prompt's own; `state` is None of a request that has ended."""
        self._arrived: list[Any] = [] if state is None else state.routed_experts_chunks
        self._state, self._taken = state, 0  # tokens that left
        self._prompt_rows: int | None = prompt_rows
        self._waiting: list[Any] = []  # rows that came before their tokens
        self._lost = False

    def take(self, count: int, completion: CompletionOutput) -> tuple[Routes | None, Routes | None]:
        """The prompt's routes, once, and those of the next tokens, at least one; None where the law did not hold."""
        ended = () if self._arrived or completion.routed_experts is None else (completion.routed_experts,)
        waiting = [*self._waiting, *self._arrived, *ended]
        self._arrived.clear()
        of_prompt, self._prompt_rows = self._prompt_rows, None
        begin, number = of_prompt or 0, count + (of_prompt or 0)
        self._taken += count
        later = 0 if self._state is None else self._state.detokenizer.num_output_tokens() - self._taken
        if self._lost or sum(map(len, waiting)) != number + later:
            self._lost, self._waiting = True, []
            return None, None
        rows = np.concatenate(waiting)
        self._waiting = [rows[number:]] if len(rows) > number else []
        return None if of_prompt is None else Routes.of(rows[:begin]), Routes.of(rows[begin:number])


@dataclass(eq=False)
class RunningRequest:
    """A request in the engine. `delivered` of its tokens have left this process. `versions` has (tokens so far, weight
    version) for every version but the current one."""

    collector: RequestOutputCollector
    top: bool = False  # whether it wants the likeliest tokens
    labels: bool = False  # whether its ranks carry grammar labels
    routes: RouteReader | None = None  # of one that asks for routes
    delivered: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)

    def spans(self, count: int, current: int) -> list[tuple[int, int, int]]:
        """The next `count` tokens by version: (begin, end, version), positions within them; at least one."""
        begin, spans = 0, []
        for upto, version in self.versions:
            end = min(count, upto - self.delivered)
            if end > begin:
                spans.append((begin, end, version))
                begin = end
        self.delivered += count
        self.versions = [(upto, version) for upto, version in self.versions if upto > self.delivered]
        return spans if begin == count and spans else [*spans, (begin, count, current)]


def finish_of(completion: CompletionOutput) -> Finish | None:
    if completion.finish_reason is None:
        return None
    return FINISHES.get(completion.finish_reason, Finish.FAILED)


def stop_reason_of(completion: CompletionOutput) -> int | str | None:
    """vLLM gives no reason for a request that it ended itself."""
    failed = finish_of(completion) is Finish.FAILED
    return "its engine ended it; the reason is in the engine's log" if failed else completion.stop_reason


def top_logprobs(sampled: int, entry: Mapping[int, Any]) -> TopLogprobs:
    """vLLM adds the sampled token to the likeliest ones; its rank says whether it is one of them."""
    ranks = {i: split_rank(row.rank)[0] for i, row in entry.items() if i != HIDDEN}
    ids = tuple(sorted(ranks, key=ranks.__getitem__))
    return TopLogprobs(ids, tuple(entry[i].logprob for i in ids), ranks[sampled])
