"""Sequences of random trees, for tests of what they share."""

from __future__ import annotations

import random


def drawn_tree(rng: random.Random, depth: int, ids: int) -> list[list[int]]:
    """Sequences of one random tree: branches may be empty, and a path may end at any node."""
    own = [rng.randrange(ids) for _ in range(rng.choice((0, 1, 1, 3, 9)))]
    found = [own] if depth == 0 or rng.random() < 0.3 else []
    for _ in range(rng.randrange(4) if depth else 0):
        found += [own + rest for rest in drawn_tree(rng, depth - 1, ids)]
    return found
