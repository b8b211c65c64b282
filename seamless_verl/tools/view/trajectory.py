"""One session for the page: its tree with what was trained of each node, its turns, its drift, and its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seamless_verl.journal.protocol import StoredSession
from seamless_verl.journal.recorded import Recorded, parse_policy, recorded
from seamless_verl.journal.recovery import rebuild_record
from seamless_verl.tools.view.texts import LEAD, Texts
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.drift import Cause, Decode, Drift, find_drifts
from seamless_verl.trajectory.sequences import assemble, mask_chain, split_into_chains
from seamless_verl.trajectory.session import SessionRecord
from seamless_verl.trajectory.tree import Node, Tree

MAX_TOKENS = 4000  # of one answer
CAUSES = {
    Cause.TEMPLATE: "the messages are the same, and were rendered differently",
    Cause.RETOKENIZATION: "the text is the same, and was split into other tokens",
    Cause.COMPACTION: "the agent shortened the conversation, or replaced it with a summary",
    Cause.AGENT_EDIT: "the agent changed, removed or added a message",
    Cause.TOOL_CALL_RESERIALIZATION: "the agent wrote the same tool arguments as other JSON text",
}


@dataclass(frozen=True)
class NodeView:
    """A run of tokens: context, or generated with one weight version by one replica.

    `number` counts the tree's nodes, `parent` is None below the root. `start` is the place of its first token on its
    path. `version` is None of context. `trained` tokens are; `dropped` says why others are not, each with its count.
    `sequence` is the turn that ends there, if its training sequence does.
    """

    number: int
    parent: int | None
    start: int
    tokens: int
    turn_id: str
    version: int | None
    replica: str
    trained: int
    dropped: Mapping[str, int]
    mean_logprob: float | None
    sequence: str


@dataclass(frozen=True)
class TurnView:
    """One call: `prompt` tokens were read, `new` of them new; `end` is the number of the node where it ends."""

    turn_id: str
    finish: str
    prompt: int
    new: int
    generated: int
    end: int | None


@dataclass(frozen=True)
class DriftView:
    """Where a turn left the record; `text` says why in words, `recorded` and `replayed` are the first few tokens."""

    turn_id: str
    recorded_turn_id: str
    at_token: int
    cause: str
    text: str
    lost_tokens: int
    kept_tokens: int
    recorded: str
    replayed: str


@dataclass(frozen=True)
class SessionDetail:
    """`revision` changes with the tree. `policy` and `version` are those by which tokens count as trained.

    `advantage` is the mean, the least and the greatest of its trained tokens.
    """

    session_id: str
    uid: str
    revision: str
    stage: str
    reason: str | None
    outcome: str
    opened_at: float
    validation: bool
    rewards: Mapping[str, float]
    advantage: tuple[float, float, float] | None
    policy: str
    version: int
    generated: int
    trained: int
    dropped: Mapping[str, int]
    nodes: Sequence[NodeView]
    turns: Sequence[TurnView]
    drifts: Sequence[DriftView]
    refused: Sequence[str]


@dataclass(frozen=True)
class TokensView:
    """Tokens `start` to before `start + len(ids)` of a node of `total`; `logprobs` and `grammar` are empty of context.

    `mask` is 1 for a token that is trained.
    """

    number: int
    start: int
    total: int
    ids: list[int]
    texts: list[str]
    logprobs: list[float]
    mask: list[int]
    grammar: list[int]


@dataclass(frozen=True)
class TurnTexts:
    """The request of a turn and its reply, as the journal has them."""

    turn_id: str
    request: dict[str, Any]
    reply: dict[str, Any]


class Trajectory:
    """A session as stored at one moment, with its tree; built once for all questions about it."""

    def __init__(self, stored: StoredSession, texts: Texts) -> None:
        self.stored, self.texts = stored, texts
        self.record: SessionRecord = rebuild_record(stored, all_calls=True)
        self.run: Recorded = recorded(stored)
        self.tree: Tree = self.record.tree
        self.nodes = list(self.tree.nodes())
        self.numbers = {node: number for number, node in enumerate(self.nodes)}
        self.masks, self.dropped, self.sequences = masks_of(self.tree, self.run)
        self.revision = f"{len(stored.calls)}.{self.tree.generated}.{stored.stage}.{stored.outcome}"

    def view(self) -> SessionDetail:
        stored, run = self.stored, self.run
        account = run.account(
            assemble(self.tree, parse_policy(run.policy), run.version, run.limits, run.grammar).account
        )
        return SessionDetail(
            stored.session_id,
            stored.uid,
            self.revision,
            str(stored.stage),
            stored.reason,
            stored.outcome,
            stored.opened_at,
            stored.validation,
            stored.rewards,
            run.advantage,
            run.policy,
            run.version,
            account.generated,
            account.trained,
            {str(reason): count for reason, count in account.dropped.items()},
            self._nodes(),
            [self._turn(turn_id) for turn_id in self.tree.turns],
            [self._drift(drift) for drift in find_drifts(self.tree, decode=self._decode)],
            [f"{one.status} {one.path}: {one.message}" for one in stored.refused],
        )

    def tokens(self, number: int, start: int, count: int) -> TokensView:
        """Tokens of a node, `MAX_TOKENS` at most; raises LookupError if there is no such node."""
        if not 0 <= number < len(self.nodes):
            raise LookupError(f"node {number} of {len(self.nodes)}")
        node = self.nodes[number]
        stop = min(start + min(count, MAX_TOKENS), len(node))
        ids, segment = node.ids[start:stop], node.segment
        mask = self.masks.get(node)
        return TokensView(
            number,
            start,
            len(node),
            ids.tolist(),
            self.texts.pieces(ids, self._before(node, start)),
            [] if segment is None else [round(value, 5) for value in segment.logprobs[start:stop]],
            [] if mask is None else mask[start:stop].astype(int).tolist(),
            [] if segment is None else list(segment.grammar[start:stop]),
        )

    def turn_texts(self, turn_id: str) -> TurnTexts:
        """Raises LookupError if there is no such turn."""
        turn = self.tree.turns[turn_id]
        return TurnTexts(turn_id, turn.request, turn.reply)

    @property
    def _decode(self) -> Decode | None:
        return None if self.texts.tokenizer is None else self.texts.decode

    def _before(self, node: Node, start: int) -> Sequence[int]:
        """The last tokens before this one of the node, of its parents where it has too few."""
        before, above = node.ids[max(0, start - LEAD) : start], node.parent
        while len(before) < LEAD and above is not None:
            before, above = above.ids[-(LEAD - len(before)) :] + before, above.parent
        return before

    def _nodes(self) -> list[NodeView]:
        starts: dict[Node, int] = {self.tree.root: 0}
        views = []
        for number, node in enumerate(self.nodes):
            assert node.parent is not None
            starts[node] = starts[node.parent] + len(node.parent)
            segment, mask = node.segment, self.masks.get(node)
            views.append(
                NodeView(
                    number,
                    self.numbers.get(node.parent),
                    starts[node],
                    len(node),
                    node.turn_id,
                    None if segment is None else segment.version,
                    "" if segment is None else segment.replica,
                    0 if mask is None else int(mask.sum()),
                    self.dropped.get(node, {}),
                    None if segment is None else float(np.mean(np.asarray(segment.logprobs))),
                    self.sequences.get(node, ""),
                )
            )
        return views

    def _turn(self, turn_id: str) -> TurnView:
        turn = self.tree.turns[turn_id]
        new = sum(map(len, turn.prompt_end.path_from(turn.match_end)))
        prompt = sum(map(len, turn.prompt_end.path_from(None)))
        return TurnView(turn_id, str(turn.finish), prompt, new, turn.generated, self.numbers.get(turn.end))

    def _drift(self, drift: Drift) -> DriftView:
        return DriftView(
            drift.turn_id,
            drift.recorded_turn_id,
            drift.at_token,
            str(drift.cause),
            CAUSES[drift.cause],
            drift.lost_tokens,
            drift.kept_tokens,
            self.texts.decode(drift.recorded_ids) or str(list(drift.recorded_ids)),
            self.texts.decode(drift.replayed_ids) or str(list(drift.replayed_ids)),
        )


Masks = dict[Node, NDArray[np.bool_]]
Dropped = dict[Node, dict[str, int]]


def masks_of(tree: Tree, run: Recorded) -> tuple[Masks, Dropped, dict[Node, str]]:
    """Of each generated node: which tokens are trained, bool [tokens], and the counts of the others by reason.

    The last is the turn of each training sequence, by the node where it ends.
    """
    parts = split_into_chains(tree)
    masks: Masks = {node: np.zeros(len(node), bool) for node, _ in parts.dropped}
    dropped: Dropped = {node: {str(reason): len(node)} for node, reason in parts.dropped}
    sequences: dict[Node, str] = {}
    policy = parse_policy(run.policy)
    for chain in parts.chains:
        decision = mask_chain(chain, policy, run.version, run.limits, run.grammar)
        whole: NDArray[np.bool_] = np.zeros(sum(map(len, chain.response)), bool)
        if run.dropped is None:
            whole[: len(decision.mask)] = decision.mask
        reasons = decision.dropped if run.dropped is None else Counter({run.dropped: len(whole)})
        start = 0
        for node in chain.response:
            if node.segment is not None:
                masks[node] = whole[start : start + len(node)]
                dropped[node] = reasons_of(masks[node], reasons)
            start += len(node)
        if whole.any():
            sequences[chain.response[-1]] = chain.leaf_id
    return masks, dropped, sequences


def reasons_of(mask: NDArray[np.bool_], reasons: Counter[DropReason]) -> dict[str, int]:
    """Why tokens of a node are not trained: the reasons of its chain, of which the counts are the chain's."""
    left = int((~mask).sum())
    names = [str(reason) for reason, count in reasons.items() if count]
    return {" or ".join(names): left} if left and names else {}
