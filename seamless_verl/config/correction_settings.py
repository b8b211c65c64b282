"""The settings of corrections for tokens of older weights: `seamless.correction`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from seamless_verl.runtime.fields import Doc, PositiveNumber

CorrectionLoss: TypeAlias = Literal["auto", "dppo"]
HARMLESS_STALENESS = 1
"""Versions that a token may be behind the trainer without a correction: tools/compare/rewards.md has what it costs."""
CORRECTED_STALENESS = 4
"""Versions that a token may be behind the trainer where the loss corrects: the most that was compared with none."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Corrections for tokens of older weights: methods of algorithms/, beside verl's own."""

    loss: Annotated[
        CorrectionLoss | None,
        Doc(
            "`dppo`: DPPO's trust region on probabilities, against the weights that generated: sets verl's "
            "`policy_loss.loss_mode=dppo_tv`, its clips and `bypass_mode`, where they are not set; `null` leaves them; "
            "`auto`: `dppo`, where the run leaves verl's `loss_mode`, clips and `rollout_correction` as they are, and "
            "trains tokens of older weights"
        ),
    ] = "auto"
    truncate: Annotated[
        PositiveNumber,
        Doc(
            "for `policy_loss.loss_mode=interpolated`: the largest importance weight of a token, proximal to behavior "
            "policy"
        ),
    ] = 2.0
    m2_threshold: Annotated[
        PositiveNumber,
        Doc(
            "for `policy_loss.loss_mode=m2po`: the largest mean of the squared log ratios of the tokens that its trust "
            "region bounds",
        ),
    ] = 0.04
    scale_lr: Annotated[
        bool,
        Doc(
            "scale the learning rate of each optimizer step by the root of its mini-batch's effective sample size, as "
            "a share of its sequences (VCPO)",
        ),
    ] = False
