"""Which leaf path trains which generated token.

Invariants:
- A turn's token counts as unused when its turn was cancelled or failed and no later prompt replays it: no agent
  acted on it. An unused token is in no chain; every other generated token is in exactly one.
- At each fork the first child with something to train carries the chain on, the others begin chains of their own.
  So who came first keeps what is shared, and a later fork never takes tokens away from an earlier path.
- A chain's nodes follow each other; within it every generated token is its own. It ends with a generated one.

Training sequences: the arrays a trainer reads.

Training sequences of a session's tree, and the account of what is not in them.

Invariant: generated = trained + dropped, token by token; no token is trained in two sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from seamless_verl.errors import ConfigError
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import Bools, TokenPolicy, TokenView
from seamless_verl.trajectory.records import Finish, Segment
from seamless_verl.trajectory.tree import Node, Tree

UNFINISHED = {Finish.CANCELLED: DropReason.CANCELLED, Finish.FAILED: DropReason.FAILED}


@dataclass(frozen=True, eq=False)
class Chain:
    """One leaf path: `prompt` nodes from the root to the first token it trains, `response` nodes from there on."""

    leaf_id: str
    prompt: list[Node]
    response: list[Node]


@dataclass(frozen=True, eq=False)
class Partition:
    """All generated nodes of a tree: in `chains`, or in `unused` with the reason."""

    chains: list[Chain]
    unused: list[tuple[Node, DropReason]]


def partition(tree: Tree) -> Partition:
    """Linear in the number of nodes, plus each chain's path to the root."""
    nodes = list(tree.nodes())
    replayed = _replayed(tree, nodes)
    unused: list[tuple[Node, DropReason]] = []
    live: set[Node] = set()
    for node in reversed(nodes):
        reason = _unused(tree, node, replayed)
        if reason is not None:
            unused.append((node, reason))
        elif node.segment is not None or any(child in live for child in node.children):
            live.add(node)
    heads = [node for node in nodes if node in live and node is not _first(node.parent, live)]
    ids = _leaf_ids(tree)
    return Partition([_chain(head, live, ids) for head in _with_root_path(heads, tree, live)], unused[::-1])


def _with_root_path(heads: list[Node], tree: Tree, live: set[Node]) -> list[Node]:
    first = _first(tree.root, live)
    return heads if first is None else [first, *heads]


def _replayed(tree: Tree, nodes: list[Node]) -> set[Node]:
    """Nodes that some turn's prompt passes through."""
    passed = {turn.prompt_end for turn in tree.turns.values()}
    for node in reversed(nodes):
        if node in passed and node.parent is not None:
            passed.add(node.parent)
    return passed


def _unused(tree: Tree, node: Node, replayed: set[Node]) -> DropReason | None:
    if node.segment is None or node in replayed:
        return None
    return UNFINISHED.get(tree.turns[node.turn_id].finish)


def _first(node: Node | None, live: set[Node]) -> Node | None:
    return next((child for child in node.children if child in live), None) if node else None


def _chain(head: Node, live: set[Node], leaf_ids: dict[Node, str]) -> Chain:
    own = [head]
    while (child := _first(own[-1], live)) is not None:
        own.append(child)
    start = next(i for i, node in enumerate(own) if node.segment is not None)
    leaf = own[-1]
    while leaf.children:
        leaf = leaf.children[0]
    above = head.parent.up_to(None) if head.parent else []
    return Chain(leaf_ids[leaf], above + own[:start], own[start:])


def _leaf_ids(tree: Tree) -> dict[Node, str]:
    """The first turn that ends at each node where one does; every leaf is such a node."""
    return {turn.end: turn_id for turn_id, turn in reversed(tree.turns.items())}


Ints: TypeAlias = NDArray[np.int32]
CONTEXT = -1  # the weight version of a token that no weights produced


@dataclass(frozen=True)
class Span:
    """Where a turn's generated tokens of one version stand in a response: [start, stop)."""

    turn_id: str
    version: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """One leaf path, from its first generated token of its own as response, what precedes as prompt.

    prompt_ids int32 [P]; response_ids int32 [R]; response_mask uint8 [R], 1 to train; rollout_log_probs
    float32 [R] in nats, 0 for context; weight_version int32 [R], -1 for context. A response begins and
    ends with a generated token. Generated tokens with mask 0 (stale) keep logprob and version.
    `leaf_id` is the turn that ends at the leaf; `spans` tell the response's generated runs in order.
    """

    leaf_id: str
    prompt_ids: Ints
    response_ids: Ints
    response_mask: NDArray[np.uint8]
    rollout_log_probs: NDArray[np.float32]
    weight_version: Ints
    spans: tuple[Span, ...]

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """Turns that generated tokens of the response, in order."""
        return tuple(dict.fromkeys(span.turn_id for span in self.spans))

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.response_mask))


def sequence(chain: Chain, keep: Bools) -> TrainingSequence:
    """The chain's sequence with its response cut to the length of `keep`, bool [R], which becomes its mask."""
    nodes, size = chain.response, len(keep)
    logprobs = [_logprobs(node) for node in nodes]
    return TrainingSequence(
        chain.leaf_id,
        _ids(chain.prompt),
        _ids(nodes)[:size],
        keep.astype(np.uint8),
        np.concatenate(logprobs)[:size],
        weight_versions(nodes)[:size],
        tuple(spans(nodes, size)),
    )


def spans(nodes: Sequence[Node], size: int) -> list[Span]:
    """The generated runs among the first `size` tokens; neighbours of one turn and version are one run."""
    runs: list[Span] = []
    start = 0
    for node in nodes:
        stop = min(start + len(node), size)
        if node.segment is not None and start < stop:
            last = runs[-1] if runs else None
            if last and (last.turn_id, last.version, last.stop) == (node.turn_id, node.segment.version, start):
                runs[-1] = Span(last.turn_id, last.version, last.start, stop)
            else:
                runs.append(Span(node.turn_id, node.segment.version, start, stop))
        start += len(node)
    return runs


def _ids(nodes: Sequence[Node]) -> Ints:
    return np.concatenate([np.zeros(0, np.int32), *(np.asarray(node.ids) for node in nodes)])


def _logprobs(node: Node) -> NDArray[np.float32]:
    segment: Segment | None = node.segment
    return np.zeros(len(node), np.float32) if segment is None else np.asarray(segment.logprobs)


def weight_versions(nodes: Sequence[Node]) -> Ints:
    """Int32 [T]: each token's weight version, -1 for context."""
    versions = [node.segment.version if node.segment else CONTEXT for node in nodes]
    return np.repeat(np.asarray(versions, np.int32), [len(node) for node in nodes])


@dataclass(frozen=True)
class SequenceLimits:
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


NO_LIMITS = SequenceLimits()


@dataclass(frozen=True)
class Assembly:
    """What of a session is trained, and where the rest went."""

    sequences: list[TrainingSequence]
    account: Account


@dataclass(frozen=True, eq=False)
class ChainDecision:
    """What becomes of a chain: its tokens within the limits, which of them are trained, why the others are not."""

    chain: Chain
    keep: Bools
    dropped: Counter[DropReason]


class HasTree(Protocol):
    """A session."""

    @property
    def tree(self) -> Tree: ...


def assemble(
    source: Tree | HasTree, policy: TokenPolicy, trainer_version: int, limits: SequenceLimits = NO_LIMITS
) -> Assembly:
    """One training sequence for each leaf path that has tokens to train, in the order of the tree.

    Each generated token is in the response of exactly one leaf path (see `chains`), before the limits
    cut its end and the policy masks what is stale in what is left.
    """
    tree = source if isinstance(source, Tree) else source.tree
    parts = partition(tree)
    dropped: Counter[DropReason] = Counter()
    for node, reason in parts.unused:
        dropped[reason] += len(node)
    fates = [decide_chain(chain, policy, trainer_version, limits) for chain in parts.chains]
    for fate in fates:
        dropped += fate.dropped
    sequences = [sequence(fate.chain, fate.keep) for fate in fates if fate.keep.any()]
    account = Account(tree.generated, sum(one.trained for one in sequences), dropped)
    account.check_integrity()
    return Assembly(sequences, account)


def decide_chain(
    chain: Chain, policy: TokenPolicy, trainer_version: int, limits: SequenceLimits = NO_LIMITS
) -> ChainDecision:
    """Applies the limits, then the policy to what they leave."""
    nodes = chain.response
    versions = weight_versions(nodes)
    generated: Bools = np.repeat([node.segment is not None for node in nodes], [len(node) for node in nodes])
    total = int(np.count_nonzero(generated))
    if limits.max_prompt is not None and sum(map(len, chain.prompt)) > limits.max_prompt:
        return ChainDecision(chain, generated[:0], Counter({DropReason.PROMPT_TOO_LONG: total}))
    within = np.flatnonzero(generated[: limits.max_response])
    kept = int(within[-1]) + 1
    view = TokenView(versions[:kept], generated[:kept], trainer_version)
    keep = policy.decide(view)
    assert not (keep & ~view.generated).any(), "a policy may train generated tokens only"
    stale = len(within) - int(np.count_nonzero(keep))
    return ChainDecision(chain, keep, Counter({DropReason.TOO_LONG: total - len(within), DropReason.STALE: stale}))
