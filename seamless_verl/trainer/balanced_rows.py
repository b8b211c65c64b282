"""Which rows of a batch each rank trains: as verl divides them, which for one rank alone are all, in order."""

from __future__ import annotations

from collections.abc import Sequence

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """verl's function of this name. It takes 20 ms to find for 128 rows that one rank gets all of them."""
    if k_partitions == 1:
        return [list(range(len(seqlen_list)))]
    divided: list[list[int]] = get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)
    return divided
