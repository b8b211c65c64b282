"""Checks of losses, estimators and corrections: what they need, what no one reads, and staleness that nothing corrects.

verl's V1 trainers read `algorithm.rollout_correction` in `_compute_old_log_prob` and `_compute_advantage`. With
`bypass_mode` the first takes the engine's logprobs for PPO's old ones, and the second leaves out all the rest. verl's
legacy trainer, `trainer.use_v1=False`, hands the rest to its loss.
"""

from __future__ import annotations

from seamless_verl.algorithms import OF_TURNS
from seamless_verl.config.schema import CORRECTED_STALENESS, HARMLESS_STALENESS
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import ESTIMATOR, LOSS_MODE, OWN_ESTIMATORS, OWN_LOSSES

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


SESSIONS = "actor_rollout_ref.rollout.n"
GATEWAY = "seamless.gateway.enabled"
MEDIAN = "mc_grpo"
PAIRS = "grpo_passk"  # verl's, which raises ValueError for a group of one
WITHIN_GROUPS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg")
"""verl's estimators whose baseline is a group's own rewards. In a group of one it is 0, or the sample has no advantage
(verl's core_algos.py)."""


@check
def check_turns(settings: Settings) -> list[Problem]:
    """An estimator that compares turns has turns: sessions of agents, which the gateway records call by call.

    Rewards of turns are posted to the gateway, so that without it there are none of these either.
    """
    estimator = settings.get(ESTIMATOR)
    if estimator not in OF_TURNS or settings.mode != "seamless" or settings.seamless.gateway.enabled:
        return []
    reason = "compares turns and reads their rewards, and without the gateway each session is one turn without any"
    way_out = f"Set {GATEWAY}=true and train an agent (docs/agents.md), or {ESTIMATOR}=grpo"
    return [Problem(ESTIMATOR, estimator, reason, way_out)]


NOT_IN_V1 = {
    "remax": "needs the reward of a greedy answer to each prompt, for which verl's V1 trainers have no pass",
    "gdpo": "reads each part of a reward from columns of a batch that verl's V1 trainers do not give to estimators",
    **dict.fromkeys(
        ("optimal_token_baseline", "tir_optimal_token_baseline"),
        "needs the sum of squared probabilities of each token, which verl's V1 trainers do not compute",
    ),
}
"""verl's estimators that fail at the first step (trainer_base.py `_compute_advantage`, ray_trainer.py)."""


@check
def check_estimators_of_v0(settings: Settings) -> list[Problem]:
    """verl's estimators that only its legacy trainer can compute."""
    estimator = settings.get(ESTIMATOR)
    if estimator not in NOT_IN_V1 or not settings.flag("trainer.use_v1", True):
        return []
    way_out = f"Set {ESTIMATOR}=grpo or rloo, or trainer.v1.trainer_mode=sync trainer.use_v1=False"
    return [Problem(ESTIMATOR, estimator, NOT_IN_V1[estimator], way_out)]


@check
def check_own_estimators(settings: Settings) -> list[Problem]:
    """An estimator of this package runs in our mode, on groups in which sessions can be compared."""
    estimator = settings.get(ESTIMATOR)
    if estimator not in OWN_ESTIMATORS:
        return []
    if settings.mode != "seamless":
        way_out = f"Set trainer.v1.trainer_mode=seamless, or {ESTIMATOR}=grpo"
        return [Problem(ESTIMATOR, estimator, "is registered by the seamless trainer alone", way_out)]
    sessions = settings.integer(SESSIONS)
    if sessions == 1:
        alone = "it is its own pivot, which is not trained" if estimator == MEDIAN else "nothing to compare it with"
        reason = f"has groups of {SESSIONS}=1 session: {alone}"
        least = "3 or another odd number" if estimator == MEDIAN else "2 or more"
        return [Problem(ESTIMATOR, estimator, reason, f"Set {SESSIONS}={least}, or another estimator")]
    if estimator == MEDIAN and sessions % 2 == 0:
        reason = f"has no pivot in groups of {SESSIONS}={sessions}, an even number: the median is between two sessions"
        return [Problem(ESTIMATOR, estimator, reason, f"Set {SESSIONS}={sessions + 1}", warning=True)]
    return []


@check
def check_lone_samples(settings: Settings) -> list[Problem]:
    """verl's estimators that compare the samples of a group, where a group has one; most go on without a baseline."""
    estimator = settings.get(ESTIMATOR)
    samples_vary = settings.mode == "seamless" and settings.seamless.sampler.name is not None
    if estimator not in (PAIRS, *WITHIN_GROUPS) or settings.integer(SESSIONS) != 1 or samples_vary:
        return []
    reason = f"has groups of {SESSIONS}=1 sample: nothing to compare it with"
    return [Problem(ESTIMATOR, estimator, reason, f"Set {SESSIONS}=4 or more", warning=estimator != PAIRS)]
