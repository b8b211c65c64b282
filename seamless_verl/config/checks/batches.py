"""Checks of batch sizes and lengths: train batch, mini-batches, micro-batches, and tokens of a sequence.

A train batch is `train_batch_size` prompts, cut into `parameter_sync_step` local updates, each cut
into mini-batches of `ppo_mini_batch_size` prompts; a mini-batch has n sequences a prompt, shared by
the data-parallel ranks and cut into micro-batches. Where verl would pad an uneven train batch with
synthetic sequences (trainer_base.py `_balance_batch`), the batch is refused here instead. Micro-batch sizes
matter only while `use_dynamic_bsz` is off. Prompt and response together fit the engine's sequences, and those
fit the model; vLLM's server cuts responses short where they do not fit, and fails for prompts that leave no room.

Sources: verl/utils/config.py `validate_config` and `check_mutually_exclusive`, verl/workers/config/actor.py,
trainer_base.py `step`, trainer_separate_async.py `__init__`, verl/workers/engine_workers.py `init_model`,
verl/workers/engine/utils.py `prepare_micro_batches`, verl/workers/rollout/vllm_rollout/vllm_async_server.py
`_validate_configs` and `generate`.
"""

from __future__ import annotations

import math

from seamless_verl.config.model import MODEL, PATH, model_config, text_config
from seamless_verl.config.roles import (
    ROLLOUT_KEY,
    data_parallel_size,
    needs_critic,
    trainer_sizes,
)
from seamless_verl.config.settings import Problem, Settings, check

TRAIN = "data.train_batch_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
CRITIC_MINI = "critic.ppo_mini_batch_size"
SAMPLES = "actor_rollout_ref.rollout.n"


def sync_step_key(settings: Settings) -> str:
    return f"trainer.v1.{settings.mode}.parameter_sync_step"


@check
def check_train_batch(settings: Settings) -> list[Problem]:
    """The train batch is a multiple of local updates, each a multiple of mini-batches."""
    train, mini = settings.integer(TRAIN), settings.integer(MINI)
    key = sync_step_key(settings)
    updates = settings.integer(key, 1)
    if settings.mode == "separate_async":
        return _exact_train_batch(key, train, mini, updates)
    unit = mini * updates
    if train % unit == 0:
        by_session = settings.mode == "seamless" and settings.seamless.tokens.weigh == "session"
        return _critic_mini_batch(settings, train // updates) if by_session else []
    parts = f"{MINI}={mini}" if updates == 1 else f"{MINI}={mini} x {key}={updates} = {unit}"
    way_out = f"Set {TRAIN}={_up(train, unit)}{_or_mini(train, mini, updates)}"
    return [Problem(TRAIN, train, f"is not a multiple of {parts}", way_out)]


def _critic_mini_batch(settings: Settings, prompts: int) -> list[Problem]:
    """The critic's mini-batches divide an update of so many prompts."""
    mini = settings.integer(CRITIC_MINI) if needs_critic(settings) and settings.get(CRITIC_MINI) is not None else 1
    if mini and prompts % mini == 0:
        return []
    reason = f"does not divide the {prompts} prompts of an update"
    return [Problem(CRITIC_MINI, mini, reason, f"Set {CRITIC_MINI}={math.gcd(prompts, mini)}, or another divisor")]


@check
def check_mini_batch(settings: Settings) -> list[Problem]:
    """Every data-parallel rank gets the same number of sequences of a mini-batch."""
    ranks = data_parallel_size(settings)
    keys = [MINI]
    if needs_critic(settings) and settings.get(CRITIC_MINI) is not None:
        keys.append(CRITIC_MINI)
    samples = settings.integer(SAMPLES)
    return [
        Problem(
            key,
            settings.get(key),
            f"x {SAMPLES}={samples} sequences do not divide among {ranks} data-parallel ranks",
            f"Make {key} x {SAMPLES} a multiple of {ranks}",
        )
        for key in keys
        if ranks and settings.integer(key) * samples % ranks
    ]


def _exact_train_batch(key: str, train: int, mini: int, updates: int) -> list[Problem]:
    if train == updates * mini:
        return []
    reason = f"separate_async needs {key}={updates} x {MINI}={mini} = {updates * mini}"
    instead = f", or {MINI}={train // updates}" if train % updates == 0 else ""
    return [Problem(TRAIN, train, reason, f"Set {TRAIN}={updates * mini}{instead}")]


def _or_mini(train: int, mini: int, updates: int) -> str:
    """The largest mini-batch, at most as large as the given one, that divides the train batch."""
    if train % updates:
        return ""
    update = train // updates
    return f", or {MINI}={max(size for size in range(1, min(mini, update) + 1) if update % size == 0)}"


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


ACTOR = "actor_rollout_ref.actor"


LONGEST = f"{ROLLOUT_KEY}.max_model_len"


@check
def check_lengths(settings: Settings) -> list[Problem]:
    """The longest prompt and the longest response together fit a sequence."""
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
    return _too_long(settings, limit, where, may_be_raised=longest is not None, positions=positions)


@check
def check_training_sequence(settings: Settings) -> list[Problem]:
    """The longest training sequence fits a micro-batch, where verl fills those by tokens (seqlen_balancing.py).

    Sessions of the gateway are cut where it ends; with verl's agent loops it is for verl to know how long they get.
    """
    if settings.mode != "seamless" or not settings.seamless.gateway.enabled:
        return []
    key, sizes = f"{ACTOR}.ppo_max_token_len_per_gpu", trainer_sizes(settings)
    if not settings.flag(f"{ACTOR}.use_dynamic_bsz") or settings.get(key) is None or sizes is None:
        return []
    parallel = sizes.context
    (prompt_key, prompt), (response_key, response) = (_length(settings, what) for what in ("prompt", "response"))
    longest, each = prompt + response, settings.integer(key)
    if longest <= (room := each * parallel):
        return []
    holds = f"is a micro-batch of {room} tokens" if parallel == 1 else f"on {parallel} ranks is one of {room} tokens"
    reason = f"{holds}, and sessions are trained up to {prompt_key}={prompt} + {response_key}={response}"
    way_out = f"Set {key}={-(-longest // parallel)}, or lower {response_key}"
    return [Problem(key, each, reason, way_out)]


def max_positions(settings: Settings) -> int | None:
    """The model's own limit; None when its config is not available, or extends the limit."""
    config = model_config(settings, MODEL)
    if config is None:
        return None
    text = text_config(config)
    own = text.get("max_position_embeddings", config.get("max_position_embeddings"))
    # Under vLLM verl takes the limit as it is.
    extended = text.get("rope_scaling") and settings.get(f"{ROLLOUT_KEY}.name") != "vllm"
    return own if isinstance(own, int) and not extended else None


def _too_long(
    settings: Settings, limit: int, where: str, *, may_be_raised: bool, positions: int | None
) -> list[Problem]:
    """`may_be_raised`: the limit is a setting's; `positions` are the model's, None where its config is not here."""
    prompt_key, prompt = _length(settings, "prompt")
    key, response = _length(settings, "response")
    total = prompt + response
    if total <= limit:
        return []
    reason = f"with {prompt_key}={prompt} makes sequences of {total} tokens, and {where}"
    lower = f"Set {key}={limit - prompt} or less" if limit > prompt else f"Lower both to {limit} together"
    raised = f", or {LONGEST}={total}" if may_be_raised and (positions is None or total <= positions) else ""
    raised += ", if the model has as many positions" if raised and positions is None else ""
    return [Problem(key, response, reason, lower + raised)]


def _length(settings: Settings, what: str) -> tuple[str, int]:
    """The rollout's length, under the key of `data` that it follows by default."""
    own, key = f"{ROLLOUT_KEY}.{what}_length", f"data.max_{what}_length"
    if settings.get(own) is None or settings.get(own) == settings.get(key):
        return key, settings.integer(key)
    return own, settings.integer(own)


BACKEND = "transfer_queue.backend"
SIZE = f"{BACKEND}.SimpleStorage.total_storage_size"


@check
def check_queue_room(settings: Settings) -> list[Problem]:
    """A warning where the rows that the staleness bound permits do not fit.

    They are those of the step that is trained, of `max_staleness` steps more, and of the step before until it is
    reported, when the next prompts may have been submitted. An agent whose conversation forks has several rows a
    sample, and a validation has its own.
    """
    size = settings.get(SIZE)
    if settings.mode != "seamless" or size is None or settings.text(f"{BACKEND}.storage_backend") != "SimpleStorage":
        return []
    steps = settings.seamless.staleness_bound + 2
    step_rows = settings.integer(TRAIN) * (1 + settings.integer(SAMPLES))
    if (rows := steps * step_rows + settings.integer(TRAIN)) <= settings.integer(SIZE):
        return []
    each = f"{TRAIN} x (1 + {SAMPLES}) each"
    reason = f"{steps} steps and the next prompts may have {rows} rows, {each}, and a full queue ends the run"
    return [Problem(SIZE, size, reason, f"Set {SIZE}=null, or {2 * rows}", warning=True)]
