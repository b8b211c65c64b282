"""Measures in the actor's update what verl measures in the forward pass before it, where `bypass_mode` leaves that out.

Those are verl's `actor/entropy` and its metrics of how far the engine's logprobs are from the trainer's, under the same
names. The difference is taken in the first mini-batch of an update, whose policy is still the one that the forward pass
would have had. The entropy is that of one in EVERY tokens, of at most SAMPLE of a micro-batch, without a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
from verl.utils.debug.metrics import calculate_debug_metrics

from seamless_verl.trainer.token_mask import difference_sums, with_means

SEEN_ENTROPY = "seen_entropy"
"""A model output beside verl's, as its others are: float32 by token, in nats, and UNSEEN where it is not measured."""
UNSEEN = -1.0
EVERY, SAMPLE = 4, 512
"""Their softmax in float32 is 300 MB with a vocabulary of 150,000 on one tensor-parallel rank."""
OWN_NAMES = ("training/", "rollout_corr/", "seamless/")
"""How names begin before which verl puts none; it puts `actor/` before whatever an actor's worker reports."""


def measure_entropy(engine: Any, asked: Callable[[], bool]) -> None:
    """Makes verl's Megatron engine return SEEN_ENTROPY while `asked`, unless it is to compute all entropies itself."""
    process = getattr(engine, "_lm_head_logits_processor", None)
    if process is None:
        return

    def processed(logits: Any, label: Any, temperature: Any, *, calculate_entropy: bool, **arguments: Any) -> Any:
        # Before verl's own: it divides the logits by the temperature in place, and then takes their exponentials there.
        seen = {SEEN_ENTROPY: sampled_entropy(logits, temperature)} if asked() and not calculate_entropy else {}
        return process(logits, label, temperature, calculate_entropy=calculate_entropy, **arguments) | seen

    engine._lm_head_logits_processor = processed


@torch.no_grad()
def sampled_entropy(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Of evenly spaced tokens, from logits [1 or rows, tokens, vocabulary / TP] and temperatures, float32 of the first
    two sizes; UNSEEN for the other tokens. All tensor-parallel ranks call it together."""
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy

    flat, warmth = logits.reshape(-1, logits.shape[-1]), temperature.reshape(-1, 1)
    step = max(EVERY, math.ceil(len(flat) / SAMPLE))
    found = torch.full((len(flat),), UNSEEN, dtype=torch.float32, device=logits.device)
    found[::step] = vocab_parallel_entropy(flat[::step].float() / warmth[::step].clamp(min=1e-8))
    return found.view(logits.shape[:2])


@dataclass
class Instruments:
    """Collects over the micro-batches of one mini-batch, on one rank; `metrics` are of what it was given."""

    rows: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    entropies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add_rows(self, trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> None:
        """Logprobs of both, the mask, and the `Grammar` of each token, [rows, response] each."""
        self.rows.append((trainer.detach(), engine, mask.bool(), labels))

    def add_entropy(self, entropy: torch.Tensor, mask: torch.Tensor) -> None:
        """SEEN_ENTROPY, or verl's own, [rows, response]; the mean weighs a micro-batch by its trained tokens."""
        trained = mask.bool()
        seen = trained & (entropy != UNSEEN)
        mean = (entropy.detach().float() * seen).sum() / seen.sum().clamp(min=1)
        self.entropies.append((mean, trained.sum() * seen.any()))

    def metrics(self, dp_size: int) -> dict[str, list[float]]:
        """For verl, which takes the mean over data-parallel ranks, and the largest or smallest of names that say so."""
        found = self._differences(dp_size) if self.rows else {}
        if tokens := sum(float(weight) for _, weight in self.entropies):
            found["entropy"] = sum(float(mean * weight) for mean, weight in self.entropies) / tokens
        return {name: [value] for name, value in found.items()}

    def _differences(self, dp_size: int) -> dict[str, float]:
        width = max(mask.shape[1] for _, _, mask, _ in self.rows)
        columns = zip(*self.rows, strict=True)
        trainer, engine, mask, labels = (
            torch.cat([pad(part, (0, width - part.shape[1])) for part in column]) for column in columns
        )
        # verl's mean over ranks of these is the sum over them; so a rank without trained tokens gives its zeros
        sums = difference_sums(trainer[mask], engine[mask], labels[mask])
        found: dict[str, Any] = {name: value if "max" in name else value * dp_size for name, value in sums.items()}
        some = mask.any(dim=-1)
        if not some.any():
            return found
        by_verl = {"old_log_probs": trainer, "rollout_log_probs": engine, "response_mask": mask, "responses": mask}
        found |= calculate_debug_metrics(SimpleNamespace(batch=by_verl))
        return found | compute_rollout_corr_metrics_from_logprobs(trainer[some], engine[some], mask[some])


def of_update(metrics: dict[str, Any]) -> dict[str, Any]:
    """An update's metrics as verl reduced them, with the names and figures of a forward pass before it."""
    return with_means({own_name(name): value for name, value in metrics.items()})


def own_name(name: str) -> str:
    short = name.removeprefix("actor/")
    return short if short.startswith(OWN_NAMES) else name
