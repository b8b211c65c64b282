"""Settings of which generated tokens are trained, and of what counts once in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from seamless_verl.runtime.fields import Doc, NotNegative, Positive

TokenPolicy: TypeAlias = Literal["train_all", "mask_older_than", "drop_if_older_than", "fresh_tail_only"]
GrammarPolicy: TypeAlias = Literal["train_all", "mask_forced", "mask_all"]
Weigh: TypeAlias = Literal["session", "sequence"]


@dataclass(frozen=True)
class TokensConfig:
    """Which generated tokens are trained: policies of trajectory/policies.py."""

    policy: Annotated[
        TokenPolicy,
        Doc(
            "which tokens are trained, by their weight version: all, those not older than `older_than`, "
            "only whole sequences of such tokens, or those after the last token that is not on-policy",
        ),
    ] = "train_all"
    older_than: Annotated[
        NotNegative,
        Doc(
            "for `mask_older_than` and `drop_if_older_than`: versions that a token may be behind the trainer",
        ),
    ] = 0
    grammar: Annotated[
        GrammarPolicy,
        Doc(
            "tokens that an engine sampled under a grammar (JSON schema, required or strict tool) for the gateway's "
            "agents: `train_all`, `mask_forced` (not those for which the grammar allowed no other token), `mask_all`",
        ),
    ] = "mask_forced"
    weigh: Annotated[
        Weigh,
        Doc(
            "what counts once in the loss, in a group's statistics and in a mini-batch: a `session`, also if branches "
            "or compactions make several sequences of it, or each `sequence`, as in verl",
        ),
    ] = "session"
    max_sequence: Annotated[
        Positive | None,
        Doc(
            "tokens of a session's training sequence, prompt and response together: what is beyond is not trained; "
            "`null` is `data.max_prompt_length` + `data.max_response_length`",
        ),
    ] = None

    @property
    def policy_text(self) -> str:
        """The policy as `seamless-verl trajectories` takes it, with its bound if it has one."""
        bounded = self.policy in ("mask_older_than", "drop_if_older_than")
        return f"{self.policy}:{self.older_than}" if bounded else self.policy

    def sequence_limit(self, prompt_length: int, response_length: int) -> int:
        """Tokens of a training sequence, where the rollout's prompts and responses may have so many."""
        return prompt_length + response_length if self.max_sequence is None else self.max_sequence
