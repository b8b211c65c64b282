"""Training sequences of a session's tree: which leaf path trains which generated token, as arrays for a trainer.

`assemble` splits the tree into chains, one per leaf path that trains something, applies limits and staleness policy
to each, and makes the arrays.

Invariants:
- generated = trained + dropped, token by token, and no token is trained in two sequences.
- A turn's token is dropped if its turn was cancelled or failed and no later prompt replays it: no agent used it.
  Such a token is in no chain; every other generated token is in the response of exactly one chain.
- At each fork the first child with something to train continues the chain, and the others begin chains of their own.
  The earlier path keeps what is shared, so a later fork never takes tokens away from an earlier path.
- A chain's nodes follow each other, and it ends with a generated node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from seamless_verl.errors import ConfigError
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.images import ImageKeys
from seamless_verl.trajectory.policies import BoolArray, GrammarTokens, TokenPolicy, TokenView
from seamless_verl.trajectory.records import Finish, Grammar
from seamless_verl.trajectory.routes import RouteArray, joined
from seamless_verl.trajectory.session import SessionRecord
from seamless_verl.trajectory.tree import Node, Tree, concat_ids

IntArray: TypeAlias = NDArray[np.int32]
CONTEXT_VERSION = -1  # the weight version of a token that was not generated
UNFINISHED = {Finish.CANCELLED: DropReason.CANCELLED, Finish.FAILED: DropReason.FAILED}


@dataclass(frozen=True)
class SequenceLimits:
    """Maximum length of a sequence in tokens, prompt and response together; None is no limit.

    Where a sequence's prompt ends depends on where its branch begins, so prompt and response have no limits of their
    own: what a late branch has more in its prompt, it has less in its response.

    Raises:
        ConfigError: the limit is below 2.
    """

    max_sequence: int | None = None

    def __post_init__(self) -> None:
        if self.max_sequence is not None and self.max_sequence < 2:
            reason = "a sequence has a token of prompt and one of response"
            raise ConfigError("max_sequence", self.max_sequence, reason, "Give 2 or more, or leave it out")


NO_LIMITS = SequenceLimits()


@dataclass(frozen=True)
class Span:
    """The place of a turn's generated tokens of one version in a response: [start, stop)."""

    turn_id: str
    version: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """One leaf path: its response begins at the first generated token of its own; all before that is the prompt.

    prompt_ids int32 [P]; response_ids int32 [R]; response_mask uint8 [R], 1 to train; rollout_log_probs
    float32 [R] in nats, 0 for context; weight_version int32 [R], -1 for context; grammar uint8 [R], a `Grammar`, 0 for
    context. A response begins and ends with a generated token. Generated tokens with mask 0 keep logprob and version.
    `leaf_id` is the turn that ends at the leaf; `spans` are the response's generated runs in order. `routes`
    [P + R - 1, layers, experts] are the experts chosen at all positions but the last, None unless all are on record.
    `images` are the digests of the images whose placeholders are in prompt and response, in their order.
    """

    leaf_id: str
    prompt_ids: IntArray
    response_ids: IntArray
    response_mask: NDArray[np.uint8]
    rollout_log_probs: NDArray[np.float32]
    weight_version: IntArray
    grammar: NDArray[np.uint8]
    spans: tuple[Span, ...]
    routes: RouteArray | None = None
    images: tuple[str, ...] = ()

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns that generated tokens of the response, in order."""
        return tuple(dict.fromkeys(span.turn_id for span in self.spans))

    @property
    def trained(self) -> int:
        """The number of tokens to train."""
        return int(np.count_nonzero(self.response_mask))


@dataclass(frozen=True)
class Assembly:
    """A session's training sequences, and the account of all its generated tokens."""

    sequences: list[TrainingSequence]
    account: Account


def assemble(
    source: Tree | SessionRecord,
    policy: TokenPolicy,
    trainer_version: int,
    limits: SequenceLimits = NO_LIMITS,
    grammar: GrammarTokens = GrammarTokens.MASK_FORCED,
) -> Assembly:
    """One training sequence per leaf path that has tokens to train, in the order of the tree.

    Each generated token that is not dropped belongs to exactly one response. The limits cut a response's end first;
    then tokens of grammars are masked, and then the policy masks the stale tokens of the remainder.
    """
    tree = source if isinstance(source, Tree) else source.tree
    chains, left_out = split_into_chains(tree)
    dropped: Counter[DropReason] = Counter()
    for node, reason in left_out:
        dropped[reason] += len(node)
    decisions = [mask_chain(chain, policy, trainer_version, limits, grammar) for chain in chains]
    for decision in decisions:
        dropped += decision.dropped
    made = [(decision.chain, decision.mask) for decision in decisions if decision.mask.any()]
    sequences = [_make_sequence(chain, mask, tree.image_keys) for chain, mask in made]
    account = Account(tree.generated, sum(sequence.trained for sequence in sequences), dropped)
    account.check_integrity()
    return Assembly(sequences, account)


@dataclass(frozen=True, eq=False)
class Chain:
    """One leaf path: `prompt` nodes from the root to the first token it trains, `response` nodes from there on.

    `sound` tokens of the response are before a placeholder that no image has, None if there is none: where placeholders
    and images do not agree, the trainer's model fails.
    """

    leaf_id: str
    prompt: list[Node]
    response: list[Node]
    sound: int | None = None

    @property
    def prompt_length(self) -> int:
        return sum(map(len, self.prompt))


def split_into_chains(tree: Tree) -> tuple[list[Chain], list[tuple[Node, DropReason]]]:
    """All generated nodes of a tree: in the response of one of the chains, or dropped, with the reason.

    The cost is linear in the number of nodes, plus each chain's path to the root.
    """
    nodes = list(tree.nodes())
    replayed = _replayed_nodes(tree, nodes)
    dropped: list[tuple[Node, DropReason]] = []
    trainable: set[Node] = set()  # generated and not dropped, or above such a node
    for node in reversed(nodes):
        reason = _drop_reason(tree, node, replayed)
        if reason is not None:
            dropped.append((node, reason))
        elif node.segment is not None or any(child in trainable for child in node.children):
            trainable.add(node)
    heads = _chain_heads(tree, nodes, trainable)
    leaf_ids = _leaf_ids(tree)
    chains = [_make_chain(head, trainable, leaf_ids) for head in heads]
    return [_checked(chain, tree.image_keys) for chain in chains], dropped[::-1]


def _replayed_nodes(tree: Tree, nodes: list[Node]) -> set[Node]:
    """The nodes on the path of some turn's prompt."""
    replayed = {turn.prompt_end for turn in tree.turns.values()}
    for node in reversed(nodes):
        if node in replayed and node.parent is not None:
            replayed.add(node.parent)
    return replayed


def _drop_reason(tree: Tree, node: Node, replayed: set[Node]) -> DropReason | None:
    if node.segment is None or node in replayed:
        return None
    return UNFINISHED.get(tree.turns[node.turn_id].finish)


def _chain_heads(tree: Tree, nodes: list[Node], trainable: set[Node]) -> list[Node]:
    """The first node of each chain: the root's first trainable child, and at forks all but the first."""
    first = _first_child(tree.root, trainable)
    forks = [node for node in nodes if node in trainable and node is not _first_child(node.parent, trainable)]
    return forks if first is None else [first, *forks]


def _first_child(node: Node | None, trainable: set[Node]) -> Node | None:
    return next((child for child in node.children if child in trainable), None) if node else None


def _leaf_ids(tree: Tree) -> dict[Node, str]:
    """The first turn that ends at each node where a turn ends; every leaf is such a node."""
    return {turn.end: turn_id for turn_id, turn in reversed(tree.turns.items())}


def _make_chain(head: Node, trainable: set[Node], leaf_ids: dict[Node, str]) -> Chain:
    nodes = [head]
    while (child := _first_child(nodes[-1], trainable)) is not None:
        nodes.append(child)
    start = next(i for i, node in enumerate(nodes) if node.segment is not None)
    leaf = nodes[-1]
    while leaf.children:
        leaf = leaf.children[0]
    above = head.parent.path_from(None) if head.parent else []
    return Chain(leaf_ids[leaf], above + nodes[:start], nodes[start:])


def _checked(chain: Chain, keys: ImageKeys) -> Chain:
    place = keys.first_without_image(concat_ids([*chain.prompt, *chain.response]))
    return chain if place is None else replace(chain, sound=max(0, place - chain.prompt_length))


@dataclass(frozen=True, eq=False)
class ChainDecision:
    """Which tokens of a chain's response are trained, and why the others are not.

    `mask` is bool [R], true to train; it ends where the limits cut the response.
    """

    chain: Chain
    mask: BoolArray
    dropped: Counter[DropReason]


def mask_chain(
    chain: Chain,
    policy: TokenPolicy,
    trainer_version: int,
    limits: SequenceLimits = NO_LIMITS,
    grammar: GrammarTokens = GrammarTokens.MASK_FORCED,
) -> ChainDecision:
    """Applies the limits, then `grammar` and the policy to what they leave.

    `grammar` does not mask the last token of a response in which it leaves others to train.
    """
    nodes = chain.response
    versions = _weight_versions(nodes)
    generated: BoolArray = np.repeat([node.segment is not None for node in nodes], [len(node) for node in nodes])
    total = int(np.count_nonzero(generated))
    room = None if limits.max_sequence is None else limits.max_sequence - chain.prompt_length
    if room is not None and room <= 0:
        return ChainDecision(chain, generated[:0], Counter({DropReason.PROMPT_TOO_LONG: total}))
    within = np.flatnonzero(generated[:room])
    sound = within if chain.sound is None else within[within < chain.sound]
    rest = Counter({DropReason.TOO_LONG: total - len(within), DropReason.PLACEHOLDER: len(within) - len(sound)})
    if not len(sound):
        return ChainDecision(chain, generated[:0], rest)
    size = int(sound[-1]) + 1  # a response ends with a generated token
    labels = _grammar(nodes)[:size]
    trainable = generated[:size] & ~grammar.forbids(labels)
    if trainable.any():
        trainable[-1] = True  # it gets verl's reward, which some advantage estimators would not see where it is masked
    masked = labels[generated[:size] & ~trainable]
    forced = int(np.count_nonzero(masked == Grammar.FORCED))
    view = TokenView(versions[:size], trainable, trainer_version)
    mask = policy.decide(view)
    assert not (mask & ~view.generated).any(), "a policy may train generated tokens only"
    dropped = {
        DropReason.FORCED: forced,
        DropReason.GRAMMAR: len(masked) - forced,
        DropReason.STALE: len(sound) - len(masked) - int(np.count_nonzero(mask)),
    }
    return ChainDecision(chain, mask, rest + Counter(dropped))


def _make_sequence(chain: Chain, mask: BoolArray, keys: ImageKeys) -> TrainingSequence:
    """The chain's sequence; its response is cut to the length of the mask, bool [R]."""
    nodes, size = chain.response, len(mask)
    prompt, response = concat_ids(chain.prompt), concat_ids(nodes)[:size]
    return TrainingSequence(
        chain.leaf_id,
        np.asarray(keys.restored(prompt)),
        np.asarray(keys.restored(response)),
        mask.astype(np.uint8),
        np.concatenate([_logprobs(node) for node in nodes])[:size],
        _weight_versions(nodes)[:size],
        _grammar(nodes)[:size],
        tuple(_find_spans(nodes, size)),
        _routes([*chain.prompt, *nodes], chain.prompt_length + size),
        keys.digests(prompt) + keys.digests(response),
    )


def _find_spans(nodes: Sequence[Node], size: int) -> list[Span]:
    """The generated runs among the first `size` tokens; adjacent runs of one turn and version are merged."""
    spans: list[Span] = []
    start = 0
    for node in nodes:
        stop = min(start + len(node), size)
        if node.segment is not None and start < stop:
            last = spans[-1] if spans else None
            if last and (last.turn_id, last.version, last.stop) == (node.turn_id, node.segment.version, start):
                spans[-1] = Span(last.turn_id, last.version, last.start, stop)
            else:
                spans.append(Span(node.turn_id, node.segment.version, start, stop))
        start += len(node)
    return spans


def _logprobs(node: Node) -> NDArray[np.float32]:
    return np.zeros(len(node), np.float32) if node.segment is None else np.asarray(node.segment.logprobs)


def _routes(nodes: Sequence[Node], size: int) -> RouteArray | None:
    """The experts chosen at the positions before the last of the first `size` tokens, [size - 1, layers, experts].

    A token's row is that of the position before it, so that the first row, of the first token, is none.
    """
    rows = joined([node.rows() for node in nodes if len(node)])
    return None if rows is None else rows.array()[1:size]


def _grammar(nodes: Sequence[Node]) -> NDArray[np.uint8]:
    """Uint8 [T]: each token's `Grammar`, NONE for context."""
    labels = (node.segment.grammar if node.segment and node.segment.grammar else bytes(len(node)) for node in nodes)
    return np.frombuffer(b"".join(labels), np.uint8)


def _weight_versions(nodes: Sequence[Node]) -> IntArray:
    """Int32 [T]: each token's weight version, -1 for context."""
    versions = [node.segment.version if node.segment else CONTEXT_VERSION for node in nodes]
    return np.repeat(np.asarray(versions, np.int32), [len(node) for node in nodes])


def why_untrained(tree: Tree, limits: SequenceLimits, keys: str = "max_sequence") -> str:
    """Says in one sentence why `assemble` makes no sequence of a tree; `keys` names the settings of the limit."""
    if not tree.turns:
        return "no call of its agent was answered"
    if not tree.generated:
        return f"its {len(tree.turns)} calls generated no token"
    chains, dropped = split_into_chains(tree)
    if chains and limits.max_sequence is not None:
        shortest = min(chain.prompt_length for chain in chains)
        if shortest >= limits.max_sequence:
            return (
                f"its prompt of {shortest} tokens leaves no room for a response in the {limits.max_sequence} tokens "
                f"of a training sequence ({keys}). Raise that, or shorten the prompt"
            )
    if chains and all(chain.sound == 0 for chain in chains):
        return (
            "a text before its first token to train has the placeholder of an image, such as <|image_pad|>, and no "
            "image for it. Keep such marks out of the texts that its agent sends"
        )
    if chains:
        return (
            "a grammar (JSON schema, required or strict tool) was in force for all its tokens, and "
            "seamless.tokens.grammar trains none of them. Set seamless.tokens.grammar=train_all to train them"
        )
    reasons = Counter(str(reason) for _, reason in dropped)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"none of its {len(tree.turns)} calls finished ({counts})"
