"""Which rank computes which sequences of a mini-batch, where what the samples of a prompt share is computed once.

Each mini-batch keeps its sequences, and each rank its number of them, so that the optimizer's steps are the same. Among
a mini-batch's ranks the samples of a prompt stay together. Where verl's own order, by length alone, leaves the busiest
rank less to compute, as with few and long prompts, that stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

SAVED, TOKENS = "shared_saved", "shared_tokens"
"""Counts of a micro-batch, as its engine reports them to verl: tokens that are not computed again, and all."""


@dataclass(frozen=True)
class RowLengths:
    """What is known of a sequence without its ids: the prompt whose sample it is, and its tokens."""

    prompt: str
    prompt_tokens: int
    tokens: int


def computed_tokens(rows: Sequence[RowLengths]) -> int:
    """The tokens that are computed for these sequences, with the prompt of each group computed once.

    A session's later sequence has what came before as its prompt, of which only the group's is known to be shared.
    """
    prompts: dict[str, int] = {}
    for row in rows:
        prompts[row.prompt] = min(row.prompt_tokens, prompts.get(row.prompt, row.prompt_tokens))
    return sum(prompts.values()) + sum(row.tokens - prompts[row.prompt] for row in rows)


def keep_together(rows: Sequence[RowLengths], order: Sequence[int], ranks: int, steps: int) -> list[int]:
    """The order in which each rank's consecutive share has its sequences of one mini-batch after the other.

    `order` is verl's, [sequences], in the same form: `ranks` shares, each with `steps` mini-batches of equal sizes.

    Raises:
        ValueError: the sequences are no multiple of those.
    """
    size, rest = divmod(len(order), ranks * steps)
    if rest:
        raise ValueError(f"{len(order)} sequences for {ranks} ranks with {steps} mini-batches each")
    parts = [[list(order[(r * steps + s) * size :][:size]) for r in range(ranks)] for s in range(steps)]
    chosen = [assign(rows, part) for part in parts]
    return list(chain.from_iterable(chosen[s][r] for r in range(ranks) for s in range(steps)))


def assign(rows: Sequence[RowLengths], given: Sequence[list[int]]) -> list[list[int]]:
    """The sequences of one mini-batch for each rank: as `given`, or with prompts kept together if that costs less."""

    def busiest(shares: Sequence[list[int]]) -> int:
        return max(computed_tokens([rows[i] for i in share]) for share in shares)

    families: dict[str, list[int]] = defaultdict(list)
    for i in sorted(chain.from_iterable(given)):
        families[rows[i].prompt].append(i)
    room = len(given[0])
    shares: list[list[int]] = [[] for _ in given]
    for family in sorted(families.values(), key=lambda own: -computed_tokens([rows[i] for i in own])):
        rest = family
        while rest:
            roomy = [share for share in shares if room - len(share) >= len(rest)]
            if roomy:
                share = min(roomy, key=lambda one: computed_tokens([rows[i] for i in one]))
            else:  # it is cut: as many as fit where most do
                share = min(shares, key=len)
            taken = rest[: room - len(share)]
            share += taken
            rest = rest[len(taken) :]
    return shares if busiest(shares) < busiest(given) else [list(share) for share in given]
