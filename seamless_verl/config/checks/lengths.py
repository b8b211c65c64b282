"""Lengths in tokens: prompt and response together fit the engine's sequences, and those fit the model.

Sources: verl/workers/rollout/vllm_rollout/vllm_async_server.py `_validate_configs` and `generate`, which
cuts responses short where they do not fit, and fails for prompts that leave no room.
"""

from __future__ import annotations

from seamless_verl.config.checks.model import MODEL, PATH
from seamless_verl.config.checks.model_files import model_config, text_config
from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import ROLLOUT

LONGEST = f"{ROLLOUT}.max_model_len"


@check
def check_truncation(settings: Settings) -> list[Problem]:
    """How a prompt that is too long is cut is not for the user to choose (agent_loop.py `_cap_text_prompt_length`)."""
    key, way = "data.truncation", settings.get("data.truncation", "error")
    if way in ("error", "left"):  # verl's default; and what it does, whatever it is told
        return []
    reason = "is not read by verl 0.9.1, which cuts off the beginning of a prompt that is too long"
    way_out = "Leave it out; data.filter_overlong_prompts=True leaves such prompts out"
    return [Problem(key, way, reason, way_out, warning=True)]


@check
def check_lengths(settings: Settings) -> list[Problem]:
    """A longest prompt with a longest response is no longer than a sequence may be."""
    positions, longest = max_positions(settings), settings.get(LONGEST)
    if longest is not None:
        longest = settings.integer(LONGEST)
        if positions is not None and longest > positions:
            reason = f"is more than the model's {positions} positions"
            return [Problem(LONGEST, longest, reason, f"Set {LONGEST}={positions} or less, or use another model")]
    limit = positions if longest is None else longest
    if limit is None:
        return []
    where = f"{PATH} has max_position_embeddings={limit}" if longest is None else f"{LONGEST}={limit}"
    return _too_long(settings, limit, where, longer=positions if longest is not None else None)


def max_positions(settings: Settings) -> int | None:
    """The model's own limit; None when its config is not at hand, or stretches it."""
    config = model_config(settings, MODEL)
    if config is None:
        return None
    text = text_config(config)
    own = text.get("max_position_embeddings", config.get("max_position_embeddings"))
    stretched = text.get("rope_scaling") and settings.get(f"{ROLLOUT}.name") != "vllm"  # under vLLM verl takes it as is
    return own if isinstance(own, int) and not stretched else None


def _too_long(settings: Settings, limit: int, where: str, *, longer: int | None) -> list[Problem]:
    prompt_key, prompt = _length(settings, "prompt")
    key, response = _length(settings, "response")
    total = prompt + response
    if total <= limit:
        return []
    reason = f"with {prompt_key}={prompt} makes sequences of {total} tokens, and {where}"
    lower = f"Set {key}={limit - prompt} or less" if limit > prompt else f"Lower both to {limit} together"
    raised = f", or {LONGEST}={total}" if longer is not None and total <= longer else ""
    return [Problem(key, response, reason, lower + raised)]


def _length(settings: Settings, what: str) -> tuple[str, int]:
    """The rollout's length, under the key of `data` that it follows by default."""
    own, key = f"{ROLLOUT}.{what}_length", f"data.max_{what}_length"
    if settings.get(own) is None or settings.get(own) == settings.get(key):
        return key, settings.integer(key)
    return own, settings.integer(own)
