"""What `seamless.correction.loss=auto` and `seamless.max_staleness=null` come to: a loss that corrects for old tokens,
and how old they may be with it.

Measured in tools/compare/rewards.md: with DPPO's loss tokens of four versions learn as those of none do, and without a
correction one version is already behind. So `auto` is `dppo` wherever a run leaves verl's loss as it is, and a run that
brings a loss of its own keeps it, with a bound that does little harm.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.checks.corrections import CORRECTION, IGNORED_BY_BYPASS, corrects, masks
from seamless_verl.config.schema import CORRECTED_STALENESS, HARMLESS_STALENESS
from seamless_verl.config.settings import Settings
from seamless_verl.config.verl_keys import LOSS_MODE

ACTOR = "actor_rollout_ref.actor"
BYPASS = f"{CORRECTION}.bypass_mode"
DPPO: dict[str, tuple[object, object]] = {
    LOSS_MODE: ("vanilla", "dppo_tv"),
    f"{ACTOR}.clip_ratio": (0.2, 0.15),
    f"{ACTOR}.clip_ratio_low": (0.2, 0.15),
    f"{ACTOR}.clip_ratio_high": (0.2, 0.15),
    f"{ACTOR}.clip_ratio_c": (3.0, 10_000.0),
    BYPASS: (False, True),
}
"""verl's default of each field, and what `seamless.correction.loss=dppo` sets (arXiv 2602.04879). The clips are of
probabilities. verl cuts a ratio off at `clip_ratio_c`: at 10,000 in effect never."""
CLIPS = tuple(key for key in DPPO if ".clip_ratio" in key)
LOSS, STALENESS, POLICY = "seamless.correction.loss", "seamless.max_staleness", "seamless.tokens.policy"
NAMED = 2  # keys in a message, at most


def adopt_correction(config: DictConfig, overrides: Sequence[str] = ()) -> str | None:
    """Set verl's fields for the loss, and the bound; what the user set stays. Other trainers read neither.

    Returns in words what was chosen; None where the user chose both, or another trainer runs.
    """
    settings = Settings.of(config, devices=None, accelerator=True)
    if settings.mode != "seamless":
        return None
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    asked = settings.seamless.correction.loss
    own = _own_loss(settings, named)
    keeps = bool(own) or settings.seamless.max_staleness == 0
    loss = asked if asked != "auto" else (None if keeps else "dppo")
    OmegaConf.update(config, LOSS, loss, force_add=True)
    for key, (default, value) in DPPO.items() if loss else ():
        if key not in named and settings.get(key, default) == default:
            OmegaConf.update(config, key, value, force_add=True)
    bound = settings.seamless.max_staleness
    if bound is None:
        corrected = corrects(Settings.of(config, devices=None, accelerator=True))
        bound = CORRECTED_STALENESS if corrected else HARMLESS_STALENESS
        OmegaConf.update(config, STALENESS, bound, force_add=True)
    why = f"which sets {LOSS_MODE}, its clips and {BYPASS}" if loss else _why_none(settings, own)
    chosen = [f"{LOSS}={loss or 'null'}, {why}"] if asked == "auto" else []
    chosen += [f"{STALENESS}={bound}"] if settings.seamless.max_staleness is None else []
    return f"chosen: {'; '.join(chosen)} (docs/algorithms.md)" if chosen else None


def _why_none(settings: Settings, own: Sequence[str]) -> str:
    """Which settings decide that a run keeps verl's loss as it is, with their values: two of them, at most."""
    if settings.seamless.max_staleness == 0:
        return f"since {STALENESS}=0 trains nothing old"
    texts = [f"{key}={settings.get(key)}" for key in own[:NAMED]]
    more = f" and {len(own) - NAMED} more" if len(own) > NAMED else ""
    why = f"since {', '.join(texts)}{more} {'is' if len(own) == 1 else 'are'} set"
    return f"{why} ({LOSS}=dppo asks for DPPO's all the same)" if set(own) <= {*CLIPS, POLICY} else why


def _own_loss(settings: Settings, named: set[str]) -> list[str]:
    """The keys by which a run says itself how old tokens are trained: the loss, its clips, which are of ratios for PPO,
    a correction, a mask, or a teacher."""
    defaults: dict[str, object] = {key: default for key, (default, _) in DPPO.items() if key != BYPASS}
    defaults |= {f"{CORRECTION}.{name}": value for name, value in IGNORED_BY_BYPASS.items()}
    own = [key for key, value in defaults.items() if key in named or settings.get(key, value) != value]
    own += [BYPASS] if BYPASS in named and not settings.flag(BYPASS) else []  # true is DPPO's own way
    own += [POLICY] if masks(settings) else []
    return own + (["distillation.enabled"] if settings.flag("distillation.enabled") else [])
