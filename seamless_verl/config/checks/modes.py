"""Checks of the trainer mode: what each mode needs, and which settings of ours fit together."""

from __future__ import annotations

from collections.abc import Mapping

from seamless_verl.config.adopting import BYPASS
from seamless_verl.config.roles import (
    by_tags,
    has_hybrid_rollout,
    has_reward_model,
    has_reward_pool,
    has_standalone_rollout,
    pool_backend,
    seamless_layout,
    uses_megatron,
)
from seamless_verl.config.settings import MISSING, Problem, Settings, check
from seamless_verl.config.verl_keys import DEFAULT_ENGINE, MODE_KEY, OWN_ESTIMATORS, VERL_MODES, engine_config, items_of
from seamless_verl.resources.tags import Layout
from seamless_verl.runtime.fields import nearest

MODES = (*VERL_MODES, "seamless")
ROLLOUT = "actor_rollout_ref.rollout"
REWARD_MODEL, REWARD_POOL = "reward.reward_model", "reward.reward_model.enable_resource_pool"
NO_REPLAY = "disabled"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
REPLAYED = "skip.rollout_tq.enable"
MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"
ASYNCHRONOUS = ("separate_async", "colocate_async")  # verl's modes with settings of their own
STEPS_AHEAD = "Set seamless.ahead instead, the steps whose prompts are generated ahead"
LENDING = "Leave it out: in seamless.layout=multiplexed seamless.lending decides when the trainer's devices generate"
NOT_READ = "is not read by the seamless trainer"


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
def check_seamless(settings: Settings) -> list[Problem]:
    """The `seamless:` node has no mistakes, in every mode; in ours its settings fit together."""
    _ = settings.seamless  # reading it refuses unknown and renamed settings
    if settings.mode != "seamless":
        return []
    parts = (
        *(_unused_pool, _someone_generates, _never_lent, _ahead, _tail_batching, _min_sessions),
        *(_engine, _disaggregation, _routing, _released, _sampler, _other_modes),
    )
    return [problem for part in parts for problem in part(settings)]


@check
def check_standalone_pool(settings: Settings) -> list[Problem]:
    """A standalone rollout pool has devices, and weights that can reach them."""
    if settings.mode not in MODES or not has_standalone_rollout(settings):
        return []
    by_fields = [] if by_tags(settings) else _pool_size(settings)
    return [*by_fields, *_weight_transfer(settings)]


@check
def check_reward_model(settings: Settings) -> list[Problem]:
    """A reward model has devices of its own where nothing pauses for it.

    In verl's `sync` it wakes on the trainer's devices when a step has taken its samples, and all engines sleep then.
    Ours generate, or hold their weights and cache there; and agent loops have no rewards before, by which a sampler
    judges a group that has ended.
    """
    apart = settings.mode in ("separate_async", "seamless")
    if not apart or not has_reward_model(settings) or has_reward_pool(settings):
        return []
    if by_tags(settings) and not has_hybrid_rollout(settings):
        return []  # the plan says so
    way_out = f"Set {REWARD_POOL}=True with {REWARD_MODEL}.nnodes and {REWARD_MODEL}.n_gpus_per_node"
    if by_tags(settings):
        way_out = "Give the tag reward to machines that do not train"
    reason = f"lets {REWARD_MODEL}.enable=True score on devices where engines hold their weights and cache"
    return [Problem(REWARD_POOL, False, reason, way_out)]


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
    return [Problem(key, "naive", reason, f"Set {key}={pool_backend(None, accelerator=settings.host.accelerator)}")]


def _unused_pool(settings: Settings) -> list[Problem]:
    nodes = settings.integer(f"{ROLLOUT}.nnodes", 0, least=0)
    if settings.seamless.layout is not Layout.COLOCATED or nodes == 0 or by_tags(settings):  # tags: check_resources
        return []
    key, reason = f"{ROLLOUT}.nnodes", "contradicts seamless.layout=colocated, which has no such pool"
    return [Problem(key, nodes, reason, f"Set {key}=0, or seamless.layout=auto to use the pool")]


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


def _disaggregation(settings: Settings) -> list[Problem]:
    key = f"{ROLLOUT}.disaggregation.enabled"
    if not settings.flag(key):
        return []
    reason = "the seamless trainer has no servers for prefill alone: half of the engines' devices would be idle"
    return [Problem(key, True, reason, f"Set {key}=False, or use one of verl's own trainer modes")]


def _routing(settings: Settings) -> list[Problem]:
    """Replay of a mixture's routes: R3 replays those that engines chose and return, R2 those of a computation before.

    verl finds out when it trains: it has no routes, or those of the other way.
    """
    veomni, key = (f"actor_rollout_ref.actor.{engine}.router_replay.mode" for engine in ("veomni", "megatron"))
    if (mode := settings.get(veomni, NO_REPLAY)) != NO_REPLAY:
        reason = "the seamless trainer replays routes with Megatron's engine alone"
        return [Problem(veomni, mode, reason, f"Set {veomni}={NO_REPLAY}, or use one of verl's own trainer modes")]
    mode, given = settings.get(key, NO_REPLAY), settings.flag(ROUTES)
    if given and not uses_megatron(settings):
        reason = "has routes of the engines in every row, which Megatron's engine alone replays"
        return [Problem(ROUTES, True, reason, f"Set {ROUTES}=False")]
    if mode == "R3" and not given:
        return [Problem(key, mode, "replays what the engines chose, which they do not return", f"Set {ROUTES}=True")]
    if given and mode != "R3":
        reason = f"has routes of the engines in every row, which {key}={mode} does not replay"
        return [Problem(ROUTES, True, reason, f"Set {key}=R3, or {ROUTES}=False")]
    if mode == "R2" and settings.flag(BYPASS):
        reason = f"replays the routes of the old logprobs' computation, which {BYPASS}=True leaves out"
        return [Problem(key, mode, reason, f"Set {key}=R3 with {ROUTES}=True, or {BYPASS}=False")]
    return []


def _released(settings: Settings) -> list[Problem]:
    key, frees = "seamless.handover", f"{ROLLOUT}.free_cache_engine"
    handover = settings.seamless.handover
    if not handover.cuts_calls or settings.flag(frees, True) or not has_hybrid_rollout(settings):
        return []
    reason = f"releases nothing with {frees}=False"
    return [Problem(key, handover.value, reason, f"Set {frees}=True, or {key}=resident")]


def _sampler(settings: Settings) -> list[Problem]:
    """verl's replay buffer of a user's own, which `seamless.max_staleness` replaces in our mode."""
    key = "trainer.v1.sampler.custom_sampler.path"
    if (path := settings.get(key)) is None:
        return []
    reason = "the seamless trainer samples under its own staleness bound"
    return [Problem(key, path, reason, f"Remove it, or set {MODE_KEY}=separate_async")]


def _other_modes(settings: Settings) -> list[Problem]:
    """What was set of verl's asynchronous modes, with what it is in ours."""
    default = engine_config(DEFAULT_ENGINE)["trainer"]["v1"]
    found = list[Problem]()
    for mode in ASYNCHRONOUS:
        given = settings.get(f"trainer.v1.{mode}", {})
        for name, value in items_of(given) if isinstance(given, Mapping) else ():
            known = dict(items_of(default[mode]))
            if not isinstance(value, Mapping) and name in known and value != known[name]:
                way_out = _own_setting(name, value)
                found.append(Problem(f"trainer.v1.{mode}.{name}", value, NOT_READ, way_out, warning=True))
    return found


def _own_setting(name: str, value: object) -> str:
    if name == "parameter_sync_step":
        return f"Set trainer.v1.seamless.{name}={value} instead"
    return STEPS_AHEAD if name == "num_warmup_batches" else LENDING


def _someone_generates(settings: Settings) -> list[Problem]:
    key = "actor_rollout_ref.hybrid_engine"
    if settings.flag(key, True):
        return []
    if seamless_layout(settings) is Layout.DISAGGREGATED:
        return [Problem(key, False, NOT_READ, "Leave it out: the layout is disaggregated without it", warning=True)]
    if seamless_layout(settings) is Layout.MULTIPLEXED:
        way_out = "Remove it, or take the tag rollout away from machines that train"
        return [Problem(key, False, "and machines that train are to generate too", way_out)]
    way_out = f"Remove it, or give generation a pool: {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1"
    return [Problem(key, False, "leaves nothing to generate in the colocated layout", way_out)]
