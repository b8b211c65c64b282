"""One session for the page: its tree with what was trained of each node, its turns, its drift, its tokens as text.

Answers are plain values by the names that the page reads (`assets/session.js`).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from seamless_verl.journal.stored import StoredSession, rebuild_record
from seamless_verl.tools.trajectories.drift import Cause, Drift, find_drifts
from seamless_verl.tools.trajectories.recorded import Recorded, recorded
from seamless_verl.trajectory.policies import parse_policy
from seamless_verl.trajectory.sequences import assemble, mask_chain, split_into_chains
from seamless_verl.trajectory.tree import Node, Tree

Answer: TypeAlias = dict[str, Any]
MAX_TOKENS = 4000  # of one answer
FILE = "tokenizer.json"
INCOMPLETE = "\ufffd"  # what decoders give for a character that lacks some of its bytes
LEAD = 6  # tokens decoded before each one: some are written differently at the beginning of a text
CAUSES = {
    Cause.TEMPLATE: "the messages are the same, and were rendered differently",
    Cause.RETOKENIZATION: "the text is the same, and was split into other tokens",
    Cause.COMPACTION: "the agent shortened the conversation, or replaced it with a summary",
    Cause.AGENT_EDIT: "the agent changed, removed or added a message",
    Cause.TOOL_CALL_RESERIALIZATION: "the agent wrote the same tool arguments as other JSON text",
}


@dataclass(frozen=True)
class Texts:
    """`tokenizer` is one of the package tokenizers, None if there is none; then `missing` says why."""

    tokenizer: Any = None
    missing: str = ""

    @classmethod
    def load(cls, model: str | None) -> Texts:
        """The tokenizer of a model's folder, or of a model that the cache of transformers has."""
        if model is None:
            return cls(missing="The run's folder does not name its model. Give the folder with --model.")
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            return cls(missing="Tokens have no text here: the package tokenizers is not installed.")
        path = Path(model) / FILE
        if not Path(model).is_dir():  # a model's public name, if it was downloaded before
            with suppress(ModuleNotFoundError, ValueError):  # ValueError: it is no name of a model
                found = importlib.import_module("huggingface_hub").try_to_load_from_cache(model, FILE)
                path = Path(found) if isinstance(found, str) else path
        if not path.is_file():
            return cls(missing=f"Tokens have no text: {model} has no {FILE} here. Give a folder with --model.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises nothing more special
            return cls(missing=f"Tokens have no text: {path} cannot be read: {error}")

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, special tokens included; "" without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """The text of each token after those `before` it. A character of several tokens is the last one's."""
        if self.tokenizer is None:
            return [""] * len(ids)
        lead = list(before[-LEAD:])
        whole = [*lead, *ids]
        begin, done, pieces = 0, len(lead), list[str]()
        for end in range(len(lead) + 1, len(whole) + 1):
            read, text = self.decode(whole[begin:done]), self.decode(whole[begin:end])
            if text.endswith(INCOMPLETE) and end - done < LEAD and end < len(whole):
                pieces.append("")
                continue
            if done == len(lead):
                read = read.rstrip(INCOMPLETE)  # the bytes that it lacks may follow
            pieces.append(text[len(read) :])
            begin, done = max(begin, done - LEAD), end
        return pieces


class Trajectory:
    """A session as stored at one moment, with its tree; built once for all questions about it.

    `revision` changes with the tree.
    """

    def __init__(self, stored: StoredSession, texts: Texts) -> None:
        self.stored, self.texts = stored, texts
        self.run: Recorded = recorded(stored)
        self.tree: Tree = rebuild_record(stored, all_calls=True).tree
        self.nodes = list(self.tree.nodes())
        self.numbers = {node: number for number, node in enumerate(self.nodes)}
        self.masks, self.dropped, self.sequences = masks_of(self.tree, self.run)
        self.revision = f"{len(stored.calls)}.{self.tree.generated}.{stored.stage}.{stored.outcome}"

    def view(self) -> Answer:
        """The whole session but its tokens; `policy` and `version` are those by which tokens count as trained."""
        stored, run = self.stored, self.run
        decode = None if self.texts.tokenizer is None else self.texts.decode
        account = run.account(
            assemble(self.tree, parse_policy(run.policy), run.version, run.limits, run.grammar).account
        )
        return {
            "session_id": stored.session_id,
            "uid": stored.uid,
            "revision": self.revision,
            "stage": str(stored.stage),
            "reason": stored.reason,
            "outcome": stored.outcome,
            "opened_at": stored.opened_at,
            "validation": stored.validation,
            "rewards": stored.rewards,
            "advantage": run.advantage,  # mean, least and greatest of its trained tokens
            "policy": run.policy,
            "version": run.version,
            "generated": account.generated,
            "trained": account.trained,
            "dropped": {str(reason): count for reason, count in account.dropped.items()},
            "nodes": self._nodes(),
            "turns": [self._turn(turn_id) for turn_id in self.tree.turns],
            "drifts": [self._drift(drift) for drift in find_drifts(self.tree, decode=decode)],
            "refused": [f"{one.status} {one.path}: {one.message}" for one in stored.refused],
        }

    def tokens(self, number: int, start: int, count: int) -> Answer:
        """Tokens of a node, `MAX_TOKENS` at most; raises LookupError if there is no such node.

        `logprobs` and `grammar` are empty of context, `mask` is 1 for a token that is trained.
        """
        if not 0 <= number < len(self.nodes):
            raise LookupError(f"node {number} of {len(self.nodes)}")
        node = self.nodes[number]
        stop = min(start + min(count, MAX_TOKENS), len(node))
        ids, segment = self.tree.image_keys.restored(node.ids[start:stop]), node.segment
        mask = self.masks.get(node)
        return {
            "number": number,
            "start": start,
            "total": len(node),
            "ids": ids.tolist(),
            "texts": self.texts.pieces(ids, self._before(node, start)),
            "logprobs": [] if segment is None else [round(value, 5) for value in segment.logprobs[start:stop]],
            "mask": [] if mask is None else mask[start:stop].astype(int).tolist(),
            "grammar": [] if segment is None else list(segment.grammar[start:stop]),
        }

    def turn_texts(self, turn_id: str) -> Answer:
        """The request of a turn and its reply, as the journal has them; raises LookupError if there is no such turn."""
        turn = self.tree.turns[turn_id]
        return {"turn_id": turn_id, "request": turn.request, "reply": turn.reply}

    def _before(self, node: Node, start: int) -> Sequence[int]:
        """The last tokens before this one of the node, of its parents where it has too few."""
        before, above = node.ids[max(0, start - LEAD) : start], node.parent
        while len(before) < LEAD and above is not None:
            before, above = above.ids[-(LEAD - len(before)) :] + before, above.parent
        return self.tree.image_keys.restored(before)

    def _nodes(self) -> list[Answer]:
        """Runs of tokens: context, or generated with one weight version by one replica.

        `parent` is None below the root, `start` the place of the first token on its path. `dropped` says why tokens are
        not trained, each with its count. `sequence` is the turn that ends there, if its training sequence does.
        """
        starts: dict[Node, int] = {self.tree.root: 0}
        nodes = []
        for number, node in enumerate(self.nodes):
            assert node.parent is not None
            starts[node] = starts[node.parent] + len(node.parent)
            segment, mask = node.segment, self.masks.get(node)
            nodes.append(
                {
                    "number": number,
                    "parent": self.numbers.get(node.parent),
                    "start": starts[node],
                    "tokens": len(node),
                    "turn_id": node.turn_id,
                    "version": None if segment is None else segment.version,
                    "replica": "" if segment is None else segment.replica,
                    "trained": 0 if mask is None else int(mask.sum()),
                    "dropped": self.dropped.get(node, {}),
                    "mean_logprob": None if segment is None else float(np.mean(np.asarray(segment.logprobs))),
                    "sequence": self.sequences.get(node, ""),
                }
            )
        return nodes

    def _turn(self, turn_id: str) -> Answer:
        """One call: `prompt` tokens were read, `new` of them new; `end` is the number of the node where it ends."""
        turn = self.tree.turns[turn_id]
        return {
            "turn_id": turn_id,
            "finish": str(turn.finish),
            "prompt": sum(map(len, turn.prompt_end.path_from(None))),
            "new": sum(map(len, turn.prompt_end.path_from(turn.match_end))),
            "generated": turn.generated,
            "end": self.numbers.get(turn.end),
        }

    def _drift(self, drift: Drift) -> Answer:
        """Where a turn left the record: why, in words, and the first few tokens that were recorded and replayed."""
        return {
            "turn_id": drift.turn_id,
            "recorded_turn_id": drift.recorded_turn_id,
            "at_token": drift.at_token,
            "cause": str(drift.cause),
            "text": CAUSES[drift.cause],
            "lost_tokens": drift.lost_tokens,
            "kept_tokens": drift.kept_tokens,
            "recorded": self.texts.decode(drift.recorded_ids) or str(list(drift.recorded_ids)),
            "replayed": self.texts.decode(drift.replayed_ids) or str(list(drift.replayed_ids)),
        }


Masks = dict[Node, NDArray[np.bool_]]
Dropped = dict[Node, dict[str, int]]


def masks_of(tree: Tree, run: Recorded) -> tuple[Masks, Dropped, dict[Node, str]]:
    """Of each generated node: which tokens are trained, bool [tokens], and the counts of the others by reason.

    The last is the turn of each training sequence, by the node where it ends.
    """
    chains, left_out = split_into_chains(tree)
    masks: Masks = {node: np.zeros(len(node), bool) for node, _ in left_out}
    dropped: Dropped = {node: {str(reason): len(node)} for node, reason in left_out}
    sequences: dict[Node, str] = {}
    policy = parse_policy(run.policy)
    for chain in chains:
        decision = mask_chain(chain, policy, run.version, run.limits, run.grammar)
        whole: NDArray[np.bool_] = np.zeros(sum(map(len, chain.response)), bool)
        if run.dropped is None:
            whole[: len(decision.mask)] = decision.mask
        reasons = decision.dropped if run.dropped is None else Counter({run.dropped: len(whole)})
        start = 0
        for node in chain.response:
            if node.segment is not None:
                masks[node] = whole[start : start + len(node)]
                left = int((~masks[node]).sum())  # the reasons are the chain's, and so may be several for a node
                names = [str(reason) for reason, count in reasons.items() if count]
                dropped[node] = {" or ".join(names): left} if left and names else {}
            start += len(node)
        if whole.any():
            sequences[chain.response[-1]] = chain.leaf_id
    return masks, dropped, sequences
