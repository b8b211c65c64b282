"""A forward pass of Megatron's GPT over a forest, and what it gives each sequence, in verl's nested shape.

The forest goes through the model as one packed sequence. Three things of the model depend on the order of tokens, and
each learns of the forest: attention by `ForestParams`, rotary embeddings by the rows' positions, and the output layer,
which projects what an edge leaves alone. All else of a dense model is computed for each token by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from seamless_verl.shared_prefixes.layout import Forest, Ints


@dataclass
class ForestParams(PackedSeqParams):
    """What attention is told of packed tokens, where these are a forest's rows."""

    forest: Forest | None = None

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """For one kernel over all segments: the rows whose keys each sees, one segment's behind another's, int64; and
        where the queries and the keys of each begin, [segments + 1], int32."""
        assert self.forest is not None
        device = self.cu_seqlens_q.device
        bounds = (np.cumsum([0, *lengths]) for lengths in (self.forest.lengths, self.forest.seen_lengths))
        queries, keys = (on_device(one, device).int() for one in bounds)
        return on_device(self.forest.seen, device), queries, keys

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> ForestParams:
        """Rotary embeddings are computed for as many positions as the longest sequence has."""
        bounds = torch.tensor([0, len(forest.tokens)], dtype=torch.int32, device=device)
        return cls(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=forest.longest,
            max_seqlen_kv=forest.longest, forest=forest,
        )  # fmt: skip


def edge_logits(model: Any, gpt: Any, forest: Forest, edges: Ints, device: torch.device) -> Tensor:
    """The logits that predict the tokens of these edges, [1, edges, vocabulary / tp].

    `model` is called; `gpt` is the GPTModel in it, whose rotary embeddings and output layer learn of the forest. A
    stage of a pipeline that is not the last returns what the next one takes.
    """
    with projecting(gpt, on_device(forest.sources[edges], device)):
        output = passed(model, gpt, forest, device)
    return output[:, : len(edges)] if gpt.post_process else output


def row_values(model: Any, gpt: Any, forest: Forest, device: torch.device) -> Tensor:
    """What a value model says of each row, [1, rows]; of a stage before the last its output, like `edge_logits`."""
    output = passed(model, gpt, forest, device)
    return output[:, : len(forest.tokens), 0] if gpt.post_process else output


def passed(model: Any, gpt: Any, forest: Forest, device: torch.device) -> Tensor:
    """The model's output for the rows, filled up to what ranks share: [1, rows or what is projected, size]."""
    rows = forest.padded(split_by(gpt))
    with positions_of_rows(gpt, rows, device):
        return model(  # type: ignore[no-any-return]
            input_ids=on_device(rows.tokens, device)[None], position_ids=None, attention_mask=None,
            packed_seq_params=ForestParams.of(rows, device),
        )  # fmt: skip


def split_by(gpt: Any) -> int:
    """Over how many ranks hidden states are split by rows: those of sequence parallelism."""
    return get_tensor_model_parallel_world_size() if gpt.config.sequence_parallel else 1


@contextmanager
def positions_of_rows(gpt: Any, forest: Forest, device: torch.device) -> Iterator[None]:
    """Give each row the rotary embedding of its position on its path: [rows, 1, 1, size].

    Megatron takes an embedding that has as many rows as there are packed tokens for one of each token.
    """
    positions = on_device(forest.positions, device)

    def of_rows(module: Any, inputs: Any, embedding: Tensor) -> Tensor:
        return embedding.index_select(0, positions)

    hook = gpt.rotary_pos_emb.register_forward_hook(of_rows)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def projecting(gpt: Any, rows: Tensor) -> Iterator[None]:
    """Have the output layer, if this stage has it, project these rows of the hidden states and no others.

    Those are [rows of the forest, 1, size]. Where ranks have a part of the rows each, the output layer gathers them: so
    each rank takes its part of what is projected, filled up with the first row, which the caller cuts off.
    """
    if not gpt.post_process:
        yield
        return
    ranks = split_by(gpt)
    if ranks > 1:
        filled = torch.cat([rows, rows.new_zeros(-len(rows) % ranks)])
        rows = filled.chunk(ranks)[get_tensor_model_parallel_rank()]

    def of_rows(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0] if ranks == 1 else gather_from_sequence_parallel_region(inputs[0])
        return hidden.index_select(0, rows), *inputs[1:]

    hook = gpt.output_layer.register_forward_pre_hook(of_rows)
    try:
        yield
    finally:
        hook.remove()


def unpack_edges(values: Tensor, forest: Forest, edges: Ints) -> Tensor:
    """What was computed on these edges, [1, edges], for each sequence: nested [sequences, its tokens].

    A token has the value of the edge that it leaves by, 0 if that is none of these. The last one leaves by none. verl
    has the value there for the next sequence's first token, which no loss reads: it is behind the last response token.
    """
    known = torch.cat([values[0], values.new_zeros(1)])  # behind all edges is the one of none
    places = np.full(len(forest.edges), len(edges))
    places[edges] = np.arange(len(edges))
    rows = [
        known.index_select(0, on_device(places[own], values.device, *([len(edges)] if len(path) else [])))
        for path, own in zip(forest.paths, forest.edge_paths, strict=True)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def unpack_rows(values: Tensor, forest: Forest) -> Tensor:
    """What was computed of rows, [1, rows], for each sequence: nested [sequences, its tokens]."""
    rows = [values[0].index_select(0, on_device(path, values.device)) for path in forest.paths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def on_device(ints: Ints, device: torch.device, *more: int) -> Tensor:
    """The array, and what is to follow it, as a tensor of int64."""
    return torch.tensor([*ints.tolist(), *more], dtype=torch.int64, device=device)
