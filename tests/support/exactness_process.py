"""Loss and gradients of Megatron's GPT over a forest, and those of each sequence by itself.

Run as `python -c "from support.exactness_process import main; main()" float64 kept|recomputed FOLDER`, in a process of
its own, since adaptations of Megatron stay in one. It writes one line of JSON: for each drawn batch the relative
differences of the loss and of every parameter's gradient.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seamless_verl.shared_prefixes.forward import edge_logits, unpack_edges
from seamless_verl.shared_prefixes.layout import build_forest
from support.drawn_forests import drawn_tree
from support.small_gpt import one_rank, packed_logits, small_gpt

HOST = torch.device("cpu")
IDS = 64
BATCHES = 8
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def drawn_batch(seed: int) -> list[list[int]]:
    """Trees to depth 6, a sequence twice, one that is a prefix of another, and one token."""
    rng = random.Random(seed)
    found = [s for _ in range(3) for s in drawn_tree(rng, 6, IDS)][:24]
    found += [[rng.randrange(IDS) for _ in range(9)]]
    found += [found[0], found[-1][:5], [found[-1][0]]]
    return [sequence for sequence in found if sequence]


def weighed(logprobs: list[Tensor], entropies: list[Tensor], sequences: list[list[int]]) -> Tensor:
    """A loss in which each token of each sequence has a weight of its own, positive or negative."""
    generator = torch.Generator().manual_seed(1)
    loss = logprobs[0].new_zeros(())
    for sequence, logprob, entropy in zip(sequences, logprobs, entropies, strict=True):
        weights = torch.randn(2, len(sequence) - 1, generator=generator, dtype=torch.float64).to(logprob.dtype)
        loss = loss + (weights[0] * logprob[: len(sequence) - 1] + weights[1] * entropy[: len(sequence) - 1]).sum()
    return loss / sum(map(len, sequences))


def terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs of the labels and entropies, [...] of logits [..., vocabulary]."""
    every = logits.log_softmax(-1)
    return every.gather(-1, labels[..., None])[..., 0], -(every.exp() * every).sum(-1)


def alone(model: torch.nn.Module, sequences: list[list[int]]) -> Tensor:
    rows = [
        terms(logits[:-1], torch.tensor(sequence[1:], dtype=torch.int64))
        for sequence, logits in zip(sequences, packed_logits(model, sequences), strict=True)
    ]
    return weighed([row[0] for row in rows], [row[1] for row in rows], sequences)


def shared(model: torch.nn.Module, sequences: list[list[int]]) -> Tensor:
    forest = build_forest(sequences)
    assert forest.saved > 0
    edges = np.arange(len(forest.edges))
    logits = edge_logits(model, model, forest, edges, HOST)
    assert logits.shape[:2] == (1, len(forest.edges))
    logprobs, entropies = (unpack_edges(x, forest, edges) for x in terms(logits, torch.tensor(forest.labels)[None]))
    return weighed(list(logprobs.unbind()), list(entropies.unbind()), sequences)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def difference(one: Tensor, other: Tensor) -> float:
    return float(((one - other).norm() / one.norm()).detach())


def main() -> None:
    dtype, kept, folder = sys.argv[1:]
    with one_rank(Path(folder)):
        model = small_gpt(getattr(torch, dtype), **(RECOMPUTED if kept == "recomputed" else {}))
        found = []
        for seed in range(BATCHES):
            sequences = drawn_batch(seed)
            expected, measured = alone(model, sequences), shared(model, sequences)
            wanted, gradient = gradients(model, expected), gradients(model, measured)
            apart = {name: difference(wanted[name], gradient[name]) for name in wanted}
            found.append({"loss": difference(expected, measured), **apart})
    sys.stdout.write(json.dumps(found) + "\n")
