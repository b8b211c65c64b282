"""Checks of corrections for tokens of older weights: settings that no one reads, and staleness that nothing corrects.

verl's V1 trainers read `algorithm.rollout_correction` in `_compute_old_log_prob` and `_compute_advantage`. With
`bypass_mode` the first takes the engine's logprobs for PPO's old ones, and the second leaves out all the rest. verl's
legacy trainer, `trainer.use_v1=False`, hands the rest to its loss.
"""

from __future__ import annotations

from seamless_verl.config.schema import CORRECTED_STALENESS, HARMLESS_STALENESS
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import LOSS_MODE, OWN_LOSSES

CORRECTION = "algorithm.rollout_correction"
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
CORRECTING_LOSSES = ("dppo_tv", "dppo_kl", "cispo", *OWN_LOSSES)
"""Policy losses that train a token by how far the policy is from the one that generated it, without PPO's clip."""
IGNORED_BY_BYPASS = {"rollout_is": None, "rollout_rs": None, "loss_type": "ppo_clip"}
"""Of `rollout_correction`, with the values of verl that ask for nothing."""


@check
def check_own_losses(settings: Settings) -> list[Problem]:
    """A loss of this package runs in our mode, on the engine's own logprobs where it needs them."""
    loss = settings.get(LOSS_MODE, "vanilla")
    if loss not in OWN_LOSSES:
        return []
    if settings.mode != "seamless":
        way_out = f"Set trainer.v1.trainer_mode=seamless, or {LOSS_MODE}=dppo_tv"
        return [Problem(LOSS_MODE, loss, "needs the weight version of each token, which only seamless has", way_out)]
    if loss == "interpolated" and not settings.flag(f"{CORRECTION}.bypass_mode"):
        reason = "interpolates what bypass_mode=False computes with a forward pass"
        way_out = f"Set {CORRECTION}.bypass_mode=True, or {LOSS_MODE}=vanilla with {CORRECTION}.rollout_is=token"
        return [Problem(LOSS_MODE, loss, reason, way_out)]
    return []


@check
def check_chosen_loss(settings: Settings) -> list[Problem]:
    """`seamless.correction.loss` and what verl's fields say are one."""
    chosen, loss = settings.seamless.correction.loss, settings.get(LOSS_MODE, "vanilla")
    bypass = settings.flag(f"{CORRECTION}.bypass_mode")
    if settings.mode != "seamless" or chosen != "dppo" or (loss == "dppo_tv" and bypass):
        return []
    other = f"{LOSS_MODE}={loss}" if loss != "dppo_tv" else f"{CORRECTION}.bypass_mode={bypass}"
    way_out = "Leave one of them out"
    return [Problem("seamless.correction.loss", chosen, f"contradicts {other}", way_out)]


@check
def check_bypass(settings: Settings) -> list[Problem]:
    """With `bypass_mode`, no correction is asked for that a V1 trainer leaves out: refused in our mode."""
    if not settings.flag(f"{CORRECTION}.bypass_mode") or not settings.flag("trainer.use_v1", True):
        return []
    reason = "is left out by verl's V1 trainers while bypass_mode=True"
    found: list[Problem] = []
    for name, default in IGNORED_BY_BYPASS.items():
        if (value := settings.get(f"{CORRECTION}.{name}", default)) != default:
            other = f"{LOSS_MODE}=bypass_mode with +{POLICY_LOSS}.rollout_correction.{name}={value}"
            way_out = f"Set {CORRECTION}.bypass_mode=False" if name != "loss_type" else "Remove it"
            warning = settings.mode != "seamless"
            found.append(Problem(f"{CORRECTION}.{name}", value, reason, f"{way_out}, or {other}", warning=warning))
    return found


@check
def check_staleness(settings: Settings) -> list[Problem]:
    """Old tokens are corrected for, or masked; else a warning that names the corrections."""
    bound = settings.seamless.staleness_bound
    if settings.mode != "seamless" or bound <= HARMLESS_STALENESS or masks(settings):
        return []
    if corrects(settings):
        older = settings.seamless.tokens.older_than
        return [_not_compared(bound)] if min(bound, bound if older is None else older) > CORRECTED_STALENESS else []
    loss = settings.get(LOSS_MODE, "vanilla")
    reason = f"trains tokens that are {bound} versions old with loss_mode={loss}, which does not correct for that"
    way_out = (
        f"Set seamless.correction.loss=dppo, or {LOSS_MODE}=interpolated or m2po, or {CORRECTION}.bypass_mode=False "
        f"with {CORRECTION}.rollout_is=token, or seamless.max_staleness={HARMLESS_STALENESS} (see docs/algorithms.md)"
    )
    return [Problem("seamless.max_staleness", bound, reason, way_out, warning=True)]


def _not_compared(bound: int) -> Problem:
    reason = f"lets tokens be older than the {CORRECTED_STALENESS} versions that were compared with on-policy training"
    arms = f"--arms sync,seamless --staleness {CORRECTED_STALENESS},{bound}"
    way_out = f"Compare what it costs: seamless-verl compare ... {arms}"
    return Problem(
        "seamless.max_staleness", bound, reason, f"{way_out} (seamless_verl/tools/compare/README.md)", warning=True
    )


def corrects(settings: Settings) -> bool:
    """Whether the loss takes into account how far the policy is from the one that generated a token."""
    loss = settings.get(LOSS_MODE, "vanilla")
    if loss == "bypass_mode":
        return bool(settings.get(f"{POLICY_LOSS}.rollout_correction.loss_type") == "reinforce")
    asked = any(settings.get(f"{CORRECTION}.{name}") is not None for name in ("rollout_is", "rollout_rs"))
    return loss in CORRECTING_LOSSES or (asked and not settings.flag(f"{CORRECTION}.bypass_mode"))


def masks(settings: Settings) -> bool:
    """Whether no token is trained that is older than does little harm."""
    tokens = settings.seamless.tokens
    return tokens.policy != "train_all" and (tokens.older_than or 0) <= HARMLESS_STALENESS
