"""Has a run's workers compute what sequences share once, and gives each rank sequences that share much."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from seamless_verl.agent_loops.row_keys import prompt_of
from seamless_verl.shared_prefixes.ranks import SAVED, TOKENS, RowLengths, computed_tokens, keep_together

logger = logging.getLogger(__name__)
SETTING = "seamless.shared_prefixes=auto"
TOKENS_SAVED = "seamless/shared/tokens_saved"
ACTOR, REFERENCE, CRITIC = "actor", "reference", "critic"  # the models whose engines may share


class SharedPrefixes:
    """Owned state: whether the actor shares, as its workers say before and after their first pass."""

    def __init__(self, groups: Mapping[str, Any]) -> None:
        """Asks the worker groups, the actor's first, and says what is not proven of those that do not share."""
        able = {id(group): group for group in groups.values() if hasattr(group, "share_prefixes")}
        self.batches, self.actor, self.active = 0, next(iter(groups.values())), False
        for group in able.values():
            found = group.share_prefixes()  # of each rank
            against = {name: next(filter(None, (of_rank[name] for of_rank in found)), None) for name in found[0]}
            for name in filter(against.get, against):
                logger.info("%s: %s computes each sequence alone: not proven with %s", SETTING, name, against[name])
            if group is self.actor:
                self.active = against[ACTOR] is None

    def arrange(self, batch: Any, ranks: int, steps: int) -> None:
        """Reorders a batch that verl has balanced: the samples of a prompt go to one rank where that is less work.

        Each of the `steps` consecutive parts of a rank's rows keeps its rows, among all ranks.
        """
        if self.active and self.batches == 1:  # the workers have compared a first pass both ways
            self.active = all(self.actor.shares_prefixes())
        self.batches += 1
        if not self.active:
            return
        rows = [row_lengths(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True)]
        if len(rows) % (ranks * steps):
            return  # of the finest mini-batches some have other sizes: verl's order stays
        order = keep_together(rows, range(len(rows)), ranks, steps)
        batch.reorder(order)
        if self.batches == 1:
            self._report_saving([rows[i] for i in order], len(rows) // (ranks * steps))

    def _report_saving(self, rows: Sequence[RowLengths], size: int) -> None:
        """In one line what this saves of the first batch, as far as lengths foresee it."""
        shares = [rows[at : at + size] for at in range(0, len(rows), size)]
        computed, tokens = sum(map(computed_tokens, shares)), sum(row.tokens for row in rows)
        logger.info(
            "%s: of %s tokens of the first update %s are to be computed, %.0f%% less; seamless/shared/tokens_saved has"
            " what each update saves",
            *(SETTING, f"{tokens:,}", f"{computed:,}", 100 * (1 - computed / tokens)),
        )


def share_of_update(metrics: dict[str, Any], model: str) -> dict[str, Any]:
    """An update's metrics as verl reduced them, with the share of its tokens that was saved in the place of counts.

    verl's means of both counts are over the same micro-batches of all ranks, so that each weighs as many as its tokens.
    """
    saved, tokens = (metrics.pop(f"{model}/{name}", 0) for name in (SAVED, TOKENS))
    return metrics | ({f"{model}/{TOKENS_SAVED}": saved / tokens} if tokens else {})


def row_lengths(key: str, tag: dict[str, Any]) -> RowLengths:
    """Of a row of TransferQueue, by its key and its tag."""
    return RowLengths(prompt_of(key), int(tag["prompt_len"]), int(tag["seq_len"]))
