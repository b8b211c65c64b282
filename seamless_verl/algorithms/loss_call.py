"""What verl's policy losses are not given, and the corrections need: how old each token is, and where the update is.

Versions are counted in weight versions and may be fractions. In step g the trainer begins with the weights of version
g - 1 and commits version g. It makes U updates in a step (`parameter_sync_step`), each of K optimizer steps
(mini-batches times epochs). Before optimizer step k (from 0) of update u (from 0)

- the proximal policy, PPO's old one, has the weights at the beginning of the update: version g - 1 + u / U;
- the policy that is trained is k / K of an update further: version g - 1 + (u + k / K) / U.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seamless_verl.algorithms import Given

CONTEXT = -1
"""The version of a token that no engine generated."""


@dataclass(frozen=True)
class LossCall:
    """One call of a policy loss.

    `versions` is int64 [rows, response], the weights that generated each token, CONTEXT where none did. `proximal`
    and `current` are the versions of the two policies of the trainer, of which `current` is at least `proximal`.
    """

    versions: torch.Tensor
    proximal: float
    current: float

    def staleness(self) -> torch.Tensor:
        """How many versions each token is behind the proximal policy: float32 [rows, response], 0 or more."""
        return (self.proximal - self.versions.to(torch.float32)).clamp(min=0.0)


this_call = Given[LossCall]("this policy loss needs the versions of tokens: only trainer mode seamless gives them")
