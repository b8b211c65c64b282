"""Training sequences: the arrays a trainer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from seamless_verl.trajectory.chains import Chain
from seamless_verl.trajectory.nodes import Node
from seamless_verl.trajectory.policies import Bools
from seamless_verl.trajectory.records import Segment

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
