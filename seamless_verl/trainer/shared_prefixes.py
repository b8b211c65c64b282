"""Has a run's workers compute what sequences share once, and gives each rank sequences that share much."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from seamless_verl.shared_prefixes.ranks import RowLengths, computed_tokens, keep_together

logger = logging.getLogger(__name__)
SETTING = "seamless.shared_prefixes=auto"


class SharedPrefixes:
    """Owned state: whether the workers share, which they say once, when their models are built."""

    def __init__(self, groups: Iterable[Any]) -> None:
        """Asks the worker groups that can share, and says of the first that does not what is not proven."""
        able = [group for group in groups if hasattr(group, "share_prefixes")]
        found = [next((one for one in group.share_prefixes() if one), None) for group in able]
        against = next((one for one in found if one), None)
        self.active = bool(able) and against is None
        if against:
            logger.info("%s computes each sequence alone: not proven with %s", SETTING, against)
        self._reported = False

    def arrange(self, batch: Any, ranks: int, steps: int) -> None:
        """Reorders a batch that verl has balanced: the samples of a prompt go to one rank where that is less work."""
        if not self.active:
            return
        rows = [row_lengths(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True)]
        order = keep_together(rows, range(len(rows)), ranks, steps)
        batch.reorder(order)
        if not self._reported:
            self._report_saving([rows[i] for i in order], len(rows) // (ranks * steps))

    def _report_saving(self, rows: Sequence[RowLengths], size: int) -> None:
        """In one line, once, what this saves: of the first batch, as far as lengths foresee it."""
        self._reported = True
        shares = [rows[at : at + size] for at in range(0, len(rows), size)]
        computed, tokens = sum(map(computed_tokens, shares)), sum(row.tokens for row in rows)
        logger.info(
            "%s: of %s tokens of the first update %s are computed, %.0f%% less; seamless/shared/tokens_saved has what"
            " each update saves",
            *(SETTING, f"{tokens:,}", f"{computed:,}", 100 * (1 - computed / tokens)),
        )


def row_lengths(key: str, tag: dict[str, Any]) -> RowLengths:
    """Of a row of TransferQueue, whose key is `{uid}_{session}_{row}`."""
    return RowLengths(key.split("_")[0], int(tag["prompt_len"]), int(tag["seq_len"]))
