"""Training sequences of a session's tree, and the account of what is not in them.

Invariant: generated = trained + dropped, token by token; no token is trained in two sequences.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from seamless_verl.errors import ConfigError
from seamless_verl.trajectory.account import Account, Reason
from seamless_verl.trajectory.chains import Chain, partition
from seamless_verl.trajectory.policies import Bools, Policy, View
from seamless_verl.trajectory.sequences import TrainingSequence, sequence, weight_versions
from seamless_verl.trajectory.tree import Tree


@dataclass(frozen=True)
class Limits:
    """Longest prompt and response in tokens; None is no limit.

    Raises:
        ConfigError: a limit under 1.
    """

    max_prompt: int | None = None
    max_response: int | None = None

    def __post_init__(self) -> None:
        for key, value in (("max_prompt", self.max_prompt), ("max_response", self.max_response)):
            if value is not None and value < 1:
                raise ConfigError(key, value, "no sequence is that short", "Give 1 or more, or leave it out")


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Assembly:
    """What of a session is trained, and where the rest went."""

    sequences: list[TrainingSequence]
    account: Account


@dataclass(frozen=True, eq=False)
class Fate:
    """What becomes of a chain: its tokens within the limits, which of them are trained, why the others are not."""

    chain: Chain
    keep: Bools
    dropped: Counter[Reason]


class HasTree(Protocol):
    """A session."""

    @property
    def tree(self) -> Tree: ...


def assemble(source: Tree | HasTree, policy: Policy, trainer_version: int, limits: Limits = NO_LIMITS) -> Assembly:
    """One training sequence for each leaf path that has tokens to train, in the order of the tree.

    Each generated token is in the response of exactly one leaf path (see `chains`), before the limits
    cut its end and the policy masks what is stale in what is left.
    """
    tree = source if isinstance(source, Tree) else source.tree
    parts = partition(tree)
    dropped: Counter[Reason] = Counter()
    for node, reason in parts.unused:
        dropped[reason] += len(node)
    fates = [decided(chain, policy, trainer_version, limits) for chain in parts.chains]
    for fate in fates:
        dropped += fate.dropped
    sequences = [sequence(fate.chain, fate.keep) for fate in fates if fate.keep.any()]
    account = Account(tree.generated, sum(one.trained for one in sequences), dropped)
    account.check_integrity()
    return Assembly(sequences, account)


def decided(chain: Chain, policy: Policy, trainer_version: int, limits: Limits = NO_LIMITS) -> Fate:
    """Applies the limits, then the policy to what they leave."""
    nodes = chain.response
    versions = weight_versions(nodes)
    generated: Bools = np.repeat([node.segment is not None for node in nodes], [len(node) for node in nodes])
    total = int(np.count_nonzero(generated))
    if limits.max_prompt is not None and sum(map(len, chain.prompt)) > limits.max_prompt:
        return Fate(chain, generated[:0], Counter({Reason.PROMPT_TOO_LONG: total}))
    within = np.flatnonzero(generated[: limits.max_response])
    kept = int(within[-1]) + 1
    view = View(versions[:kept], generated[:kept], trainer_version)
    keep = policy.decide(view)
    assert not (keep & ~view.generated).any(), "a policy may train generated tokens only"
    stale = len(within) - int(np.count_nonzero(keep))
    return Fate(chain, keep, Counter({Reason.TOO_LONG: total - len(within), Reason.STALE: stale}))
