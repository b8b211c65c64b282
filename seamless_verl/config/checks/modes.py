"""Checks of the trainer mode and of single values: what each mode needs, what it does not read, values that are
missing, numbers, and old names of code.

Missing values (`???` in the yaml) count unless the part of the config that they belong to is switched off. The
numbers are those that nothing else reads before the run: verl and vLLM would refuse them a minute or two after the
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from operator import attrgetter

from seamless_verl.config import engine_kwargs
from seamless_verl.config.checks.estimators import OWN_ESTIMATORS
from seamless_verl.config.checks.roles import (
    by_tags,
    has_reward_model,
    has_standalone_rollout,
    has_teacher,
    needs_critic,
    seamless_layout,
)
from seamless_verl.config.checks.settings import MISSING, Problem, Settings, check, texts_of
from seamless_verl.config.renames import renamed_code
from seamless_verl.config.schema import RequestsConfig, SeamlessConfig
from seamless_verl.config.wait_settings import WaitsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import Layout
from seamless_verl.runtime.fields import nearest

VERL_MODES = ("sync", "colocate_async", "separate_async")
MODES = (*VERL_MODES, "seamless")
BOUNDED_POLICIES = ("mask_older_than", "drop_if_older_than")  # of seamless.tokens.policy, those with `older_than`
MODE_KEY = "trainer.v1.trainer_mode"
ROLLOUT = "actor_rollout_ref.rollout"
NO_REPLAY = "disabled"
REPLAYED = "skip.rollout_tq.enable"
MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"
VERL_SAMPLER = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"}


@check
def check_mode(settings: Settings) -> list[Problem]:
    """A known mode, and verl's v1 trainer under ours."""
    mode = settings.mode
    if mode not in MODES:
        return [Problem(MODE_KEY, mode, "is not a trainer mode", nearest(mode, list(MODES)))]
    if mode == "seamless" and not settings.flag("trainer.use_v1", True):
        way_out = f"Remove trainer.use_v1=False, or set {MODE_KEY}=sync for verl's legacy trainer"
        return [Problem("trainer.use_v1", False, "the seamless trainer is a v1 trainer", way_out)]
    return []


@check
def check_renamed_code(settings: Settings) -> list[Problem]:
    """No setting names code of this package by an old name."""
    found = ((key, text, renamed_code(text)) for key, text in texts_of(settings.tree, ""))
    return [Problem(key, text, "was renamed", f"Write {key}={new}") for key, text, new in found if new is not None]


@check
def check_seamless(settings: Settings) -> list[Problem]:
    """The `seamless:` node has no mistakes, in every mode; in ours its settings fit together."""
    _ = settings.seamless  # reading it refuses unknown and renamed settings
    if settings.mode != "seamless":
        return []
    parts = (
        *(_unused_pool, _someone_generates, _never_lent, _ahead, _tail_batching, _min_sessions),
        *(_engine, _routing, _released, _sampler),
    )
    return [problem for part in parts for problem in part(settings)]


@check
def check_standalone_pool(settings: Settings) -> list[Problem]:
    """A standalone rollout pool has devices, and weights that can reach them."""
    if settings.mode not in MODES or not has_standalone_rollout(settings):
        return []
    by_fields = [] if by_tags(settings) else _pool_size(settings)
    return [*by_fields, *_weight_transfer(settings), *_reward_model(settings)]


def _pool_size(settings: Settings) -> list[Problem]:
    reason = f"{settings.mode} generates on a pool of its own, which has no devices"
    return [
        Problem(f"{ROLLOUT}.{name}", 0, reason, f"Set {ROLLOUT}.{name}=1 or more")
        for name in ("nnodes", "n_gpus_per_node")
        if settings.integer(f"{ROLLOUT}.{name}", 0, least=0) == 0
    ]


def _weight_transfer(settings: Settings) -> list[Problem]:
    key = f"{ROLLOUT}.checkpoint_engine.backend"
    backend = settings.get(key, "naive")
    if backend == "delta_sharded" and settings.mode == "seamless":
        reason = "sends what has changed in each weight, but replicas load whole weights, staged in their host's memory"
        return [Problem(key, backend, reason, f"Set {key}=nccl")]
    if backend != "naive":
        return []
    reason = "reaches only engines on the trainer's own devices"
    return [Problem(key, "naive", reason, f"Set {key}={'nccl' if settings.host.accelerator else 'gloo'}")]


def _reward_model(settings: Settings) -> list[Problem]:
    key = "reward.reward_model.enable_resource_pool"
    if not has_reward_model(settings) or settings.flag(key) or by_tags(settings):
        return []
    return [Problem(key, False, "a standalone rollout never pauses to make room for it", f"Set {key}=True")]


def _unused_pool(settings: Settings) -> list[Problem]:
    nodes = settings.integer(f"{ROLLOUT}.nnodes", 0, least=0)
    if settings.seamless.layout is not Layout.COLOCATED or nodes == 0:
        return []
    reason = "is not used by seamless.layout=colocated"
    return [Problem(f"{ROLLOUT}.nnodes", nodes, reason, "Set seamless.layout=auto to use the pool", warning=True)]


def _never_lent(settings: Settings) -> list[Problem]:
    lending = settings.seamless.lending
    if lending != "never" or seamless_layout(settings) is Layout.DISAGGREGATED:
        return []
    reason = "would leave calls on the trainer's devices frozen from the first update on"
    way_out = "Set seamless.lending=marginal, or lay it out disaggregated, where nothing is lent"
    return [Problem("seamless.lending", lending, reason, way_out)]


def _ahead(settings: Settings) -> list[Problem]:
    ahead, bound = settings.seamless.ahead, settings.seamless.staleness_bound
    if ahead is None or ahead <= bound:
        return []
    reason = f"is more than seamless.max_staleness={bound} lets be trained"
    return [Problem("seamless.ahead", ahead, reason, f"Set seamless.max_staleness={ahead}, or seamless.ahead={bound}")]


def _tail_batching(settings: Settings) -> list[Problem]:
    """Prompts are deferred only where all tokens are of one version, and begin again with new generations."""
    key, share = "seamless.tail_batching", settings.seamless.tail_batching
    if share is None:
        return []
    found = list[Problem]()
    if bound := settings.seamless.staleness_bound:
        reason = f"begins prompts again that seamless.max_staleness={bound} lets be trained in a later step"
        found.append(Problem(key, share, reason, f"Set seamless.max_staleness=0, or {key}=null"))
    if settings.flag(REPLAYED):
        reason = f"has no prompt left over, since {REPLAYED}=True reads the generations of an earlier run"
        found.append(Problem(key, share, reason, f"Set {key}=null, or {REPLAYED}=False"))
    if (manager := settings.get(MANAGER)) is not None:
        reason = f"stops groups, which {MANAGER}={manager} may not do"
        found.append(Problem(key, share, reason, f"Set {key}=null, or {MANAGER}=null"))
    if (sampler := settings.seamless.sampler.name) is not None:
        reason = f"drops what was generated for a prompt, of which seamless.sampler.name={sampler} may ask for more"
        found.append(Problem(key, share, reason, f"Set {key}=null, or seamless.sampler.name=null"))
    return found


RELATIVE = (
    *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline", *OWN_ESTIMATORS),
)
"""Estimators that compare the sessions of a group with each other."""


def _min_sessions(settings: Settings) -> list[Problem]:
    """A group has as many sessions as are needed, and those that are compared are at least two."""
    key, needed, sessions = "seamless.min_sessions", settings.seamless.min_sessions, settings.integer(f"{ROLLOUT}.n")
    if needed is not None and needed > sessions:
        reason = f"is more than the {ROLLOUT}.n={sessions} sessions of a group"
        return [Problem(key, needed, reason, f"Set {key}={sessions} or less")]
    estimator = settings.get("algorithm.adv_estimator")
    if needed == 1 and sessions > 1 and estimator in RELATIVE:
        reason = f"lets {estimator} train a group of one, which has no other session to be compared with"
        return [Problem(key, needed, reason, f"Set {key}=2 or more, or leave it out")]
    return []


def _engine(settings: Settings) -> list[Problem]:
    key = f"{ROLLOUT}.name"
    name = settings.get(key, "vllm")
    if name in ("vllm", MISSING) or not settings.host.accelerator:  # check_cpu_rollout refuses it without one
        return []
    way_out = f"Set {key}=vllm, or use one of verl's own trainer modes"
    return [Problem(key, name, "the seamless trainer streams from vLLM's engine", way_out)]


def _routing(settings: Settings) -> list[Problem]:
    """verl's replay of a mixture's routing: our replicas' chunks carry no routed experts for a trainer to replay."""
    rollout = f"{ROLLOUT}.enable_rollout_routing_replay"
    values: dict[str, tuple[object, object]] = {rollout: (settings.flag(rollout), False)}
    for engine in ("megatron", "veomni"):
        key = f"actor_rollout_ref.actor.{engine}.router_replay.mode"
        values[key] = settings.get(key, NO_REPLAY), NO_REPLAY
    reason = "the seamless trainer replays no routing of a mixture's experts"
    return [
        Problem(key, value, reason, f"Set {key}={off}, or use one of verl's own trainer modes")
        for key, (value, off) in values.items()
        if value != off
    ]


def _released(settings: Settings) -> list[Problem]:
    key, frees = "seamless.handover", f"{ROLLOUT}.free_cache_engine"
    handover = settings.seamless.handover
    if not handover.cuts_calls or settings.flag(frees, True):
        return []
    reason = f"releases nothing with {frees}=False"
    return [Problem(key, handover.value, reason, f"Set {frees}=True, or {key}=resident")]


def _sampler(settings: Settings) -> list[Problem]:
    """verl's options of the replay buffer, which `seamless.max_staleness` replaces in our mode."""
    sampler = "trainer.v1.sampler"
    found: list[Problem] = []
    if (path := settings.get(f"{sampler}.custom_sampler.path")) is not None:
        reason = "the seamless trainer samples under its own staleness bound"
        way_out = f"Remove it, or set {MODE_KEY}=separate_async"
        found.append(Problem(f"{sampler}.custom_sampler.path", path, reason, way_out))
    for key, default in VERL_SAMPLER.items():
        if (value := settings.get(f"{sampler}.{key}", default)) != default:
            reason = "is not read by the seamless trainer"
            way_out = "Set seamless.max_staleness instead"
            found.append(Problem(f"{sampler}.{key}", value, reason, way_out, warning=True))
    return found


def _someone_generates(settings: Settings) -> list[Problem]:
    key = "actor_rollout_ref.hybrid_engine"
    if seamless_layout(settings) is Layout.DISAGGREGATED or settings.flag(key, True):
        return []
    if seamless_layout(settings) is Layout.MULTIPLEXED:
        way_out = "Remove it, or take the tag rollout away from machines that train"
        return [Problem(key, False, "and machines that train are to generate too", way_out)]
    way_out = f"Remove it, or give generation a pool: {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1"
    return [Problem(key, False, "leaves nothing to generate in the colocated layout", way_out)]


SUGGESTED = {"actor_rollout_ref.rollout.name": "vllm", "reward.reward_model.rollout.name": "vllm"}


@check
def check_missing(settings: Settings) -> list[Problem]:
    """One problem for each missing value that the run will read."""
    unused = tuple(_unused(settings))
    keys = [key for key in _missing(settings.tree, "") if not key.startswith(unused)]
    return [Problem(key, MISSING, "has no value", _way_out(key)) for key in keys]


def _way_out(key: str) -> str:
    return f"Add {key}={SUGGESTED.get(key, '...')} to the command"


def _unused(settings: Settings) -> Iterator[str]:
    if not has_reward_model(settings):
        yield "reward.reward_model."
    if not has_teacher(settings):
        yield "distillation."
    if not needs_critic(settings):
        yield "critic."


def _missing(node: object, prefix: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _missing(value, f"{prefix}.{name}" if prefix else str(name))
    elif node == MISSING:
        yield prefix


WHOLE_NUMBERS = {
    f"{ROLLOUT}.max_num_seqs": 1,
    f"{ROLLOUT}.n": 1,
}
"""Keys of whole numbers, with the least allowed value."""
REAL_NUMBERS = (
    *(f"{part}.optim.{name}" for part in ("actor_rollout_ref.actor", "critic") for name in ("lr", "weight_decay")),
    *(f"actor_rollout_ref.actor.{name}" for name in ("clip_ratio", "entropy_coeff", "kl_loss_coef")),
    *(f"{ROLLOUT}.{name}" for name in ("temperature", "top_p")),
    *("algorithm.gamma", "algorithm.lam"),
)
"""Keys of numbers; verl would compare a text with numbers and fail."""
FREQUENCIES = ("save_freq", "test_freq")  # of `trainer`, whole numbers; -1 is never
MEMORY_SHARE = f"{ROLLOUT}.gpu_memory_utilization"


@check
def check_numbers(settings: Settings) -> list[Problem]:
    """Each of these keys is a number within its bounds."""
    given = {key: least for key, least in WHOLE_NUMBERS.items() if settings.get(key) is not None}
    given |= {f"trainer.{name}": -1 for name in FREQUENCIES if name in settings.get("trainer", {})}
    problems = [problem for key, least in given.items() if (problem := _whole(settings, key, least)) is not None]
    reals = ((key, settings.get(key)) for key in REAL_NUMBERS)
    problems += [
        Problem(key, value, "is no number", f"Set {key} to a number") for key, value in reals if not _real(value)
    ]
    share = settings.get(MEMORY_SHARE)
    if share is not None and not (_real(share) and 0 < share <= 1):
        problems.append(Problem(MEMORY_SHARE, share, "must be a number above 0, at most 1", f"Set {MEMORY_SHARE}=0.5"))
    return problems


def _real(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _whole(settings: Settings, key: str, least: int) -> Problem | None:
    try:
        settings.integer(key, least=least)
    except ConfigError as error:
        return Problem.of(error)
    return None


LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
"""Of vLLM's modes those that give logprobs; replica/own_logprobs.py makes the model's own of both."""


@check
def check_logprobs_mode(settings: Settings) -> list[Problem]:
    """The engines record logprobs, which the trainer uses, and not logits."""
    overriding = engine_kwargs.given(settings.get(engine_kwargs.KEY), "logprobs_mode")
    keys = {f"{ROLLOUT}.logprobs_mode": settings.get(f"{ROLLOUT}.logprobs_mode")}
    keys |= {} if overriding is None else {f"{engine_kwargs.KEY}.logprobs_mode": overriding}
    if settings.mode in VERL_MODES:
        return []
    return [
        Problem(key, value, "gives no logprobs to train with", f"Set {key}={' or '.join(LOGPROBS_MODES)}")
        for key, value in keys.items()
        if value is not None and value not in LOGPROBS_MODES
    ]


UNUSED = (
    "layout",
    "wait_for_machines_s",
    "max_staleness",
    "ahead",
    "tail_batching",
    "min_sessions",
    "lending",
    "handover",
    "replica_restarts",
    "weights.at_once",
    "weights.kv",
    "tokens.policy",
    "tokens.older_than",
    "tokens.weigh",
    "tokens.max_sequence",
    "tokens.grammar",
    "correction.truncate",
    "correction.m2_threshold",
    "correction.scale_lr",
    "watchdog.transition_s",
    "watchdog.no_progress_s",
    *(f"watchdog.waits.{item.name}" for item in fields(WaitsConfig)),
    "sampler.name",
    "console",
)
"""Of the `seamless:` node, read by our trainer alone. Machines and the gateway have checks of their own."""
OF_THE_GATEWAY = (
    *("gateway.port", "gateway.journal", "gateway.options", "gateway.public_address"),
    *(f"gateway.requests.{item.name}" for item in fields(RequestsConfig)),
    *("gateway.max_calls", "gateway.max_sessions"),
)
"""Read only where the gateway runs. `shards` and `max_failed_groups` concern all calls and all agent loops."""


@check
def check_unused(settings: Settings) -> list[Problem]:
    """A warning for each setting that was changed and that nothing reads, as other settings are."""
    given = settings.seamless
    if settings.mode in VERL_MODES:
        way_out = f"Set {MODE_KEY}=seamless, or leave it out"
        return _changed(given, UNUSED, f"is not read by {MODE_KEY}={settings.mode}", way_out)
    found: list[Problem] = []
    if given.tokens.policy not in BOUNDED_POLICIES:
        reason = f"is not read by seamless.tokens.policy={given.tokens.policy}"
        way_out = f"Set seamless.tokens.policy={' or '.join(BOUNDED_POLICIES)}, or leave it out"
        found += _changed(given, ("tokens.older_than",), reason, way_out)
    if not given.gateway.enabled:
        reason, way_out = "is not read while seamless.gateway.enabled=false", "Set seamless.gateway.enabled=true"
        found += _changed(given, OF_THE_GATEWAY, reason, f"{way_out}, or leave it out")
    if not given.view.enabled:
        reason, way_out = "is not read while seamless.view.enabled=false", "Set seamless.view.enabled=true"
        found += _changed(given, ("view.host", "view.port"), reason, f"{way_out}, or leave it out")
    return found


def _changed(given: SeamlessConfig, names: Iterable[str], reason: str, way_out: str) -> list[Problem]:
    """A warning for each of these settings that is not its default."""
    default = SeamlessConfig()
    return [
        Problem(f"seamless.{name}", plain(value), reason, way_out, warning=True)
        for name in names
        if (value := attrgetter(name)(given)) != attrgetter(name)(default)
    ]


def plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, Enum) else value
