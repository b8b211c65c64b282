"""Memory: the sources' own numbers come out, sums divide as they should, and what does not fit is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.resources import group, memory_facts, plan, qwen3_8b

from seamless_verl.resources.memory import (
    DeviceRoles,
    EngineMemory,
    TrainingMemory,
    activations,
    cache_bytes_per_token,
    device_peak,
    engine_state,
    engine_weights,
    local_parameters,
    staged_bytes,
    trainer_state,
)
from seamless_verl.resources.memory_fit import host_bytes, memory_problems
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import Roles

BOTH = ("train", "rollout")
ONE = ParallelSizes()
TRAINING = TrainingMemory(tokens=4096, sequence=4096)
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def mixtral() -> ModelFacts:
    facts = ModelFacts.read(MIXTRAL)
    assert facts is not None
    return facts


def test_published_parameter_counts() -> None:
    """Qwen3-8B's and Mixtral-8x7B's checkpoints have this many."""
    assert qwen3_8b().parameters == 8_190_735_360
    assert mixtral().parameters == 46_702_792_704


def test_a_config_without_sizes_is_not_counted() -> None:
    assert ModelFacts.read({"model_type": "qwen3", "hidden_size": 128}) is None


def test_one_rank_keeps_18_bytes_a_parameter_and_the_optimizer_shards() -> None:
    """Megatron-Core's table: 18 bytes alone, 6 + 12/d with d data-parallel ranks."""
    model = qwen3_8b()
    assert sum(trainer_state(model, ONE, 1, TRAINING).values()) == 18 * model.parameters
    state = trainer_state(model, ONE, 8, TRAINING)
    assert state["optimizer"] == -(-12 * model.parameters // 8)
    assert state["weights"] + state["gradients"] == 6 * model.parameters
    whole = trainer_state(model, ONE, 8, replace(TRAINING, distributed_optimizer=False))
    assert whole["optimizer"] == 12 * model.parameters
    assert trainer_state(model, ParallelSizes(context=4), 8, TRAINING)["optimizer"] == state["optimizer"]
    assert trainer_state(model, ONE, 1, replace(TRAINING, references=1))["reference"] == 2 * model.parameters


def test_ranks_together_hold_the_model() -> None:
    model = qwen3_8b()
    common, experts = local_parameters(model, ParallelSizes(tensor=8))
    assert experts == 0 and model.parameters <= 8 * common < 1.001 * model.parameters
    staged, _ = local_parameters(model, ParallelSizes(pipeline=4))
    assert staged == 9 * (model.attention + model.replicated + model.dense_mlp) + model.embedding + model.hidden
    sparse, divided = local_parameters(mixtral(), ParallelSizes(tensor=2, expert=4, expert_tensor=1))
    assert divided == 32 * mixtral().experts // 4 and sparse < mixtral().parameters // 8


def test_activations_are_as_in_the_paper_for_its_model() -> None:
    """Korthikanti et al. 2022, equation 4 less attention scores and dropout: sbh/t x (34 - 1 - 1 - 1) bytes a layer.

    Their MLP keeps 8h before its GELU, 8h after; a gated one of inner width 4h keeps three of them and the gate's.
    """
    model = replace(qwen3_8b(), qkv_width=3 * 4096, mlp_width=4 * 4096, vocabulary=0)
    for tensor in (1, 8):
        token = activations(model, ParallelSizes(tensor=tensor), 1, TRAINING) / model.layers / model.hidden * tensor
        assert token == 2 * 4 + 2 * 2 * 3 + 2 * 4 * 4 == 52
    full = replace(TRAINING, full_recompute=True)
    assert activations(model, ONE, 1, full) == 2 * 4096 * 36 + 52 * 4096
    logits = replace(model, vocabulary=151936, dense_layers=0)
    assert activations(logits, ParallelSizes(tensor=4), 10, TRAINING) == 10 * 8 * 151936 // 4
    plain = replace(TRAINING, plain_layers=True)
    assert activations(model, ONE, 10, plain) == 10 * 36 * int(1.42 * 52 * 4096)
    unsplit_peak = replace(TRAINING, sequence_parallel=False)
    assert activations(model, ParallelSizes(tensor=8), 1, unsplit_peak) > activations(
        model, ParallelSizes(tensor=8), 1, TRAINING
    )


def test_the_engine_takes_its_share_or_what_it_was_given() -> None:
    model, single = qwen3_8b(), ReplicaSizes(1)
    assert cache_bytes_per_token(model, single, EngineMemory()) == 2 * 36 * 8 * 128 * 2 == 147_456
    assert cache_bytes_per_token(model, ReplicaSizes(16), EngineMemory()) == 147_456 // 8
    assert sum(engine_state(model, single, EngineMemory(utilization=0.5), 80 * 10**9).values()) == 40 * 10**9
    given = engine_state(model, single, EngineMemory(cache_bytes=2**30), 80 * 10**9)
    assert given == {"engine weights": 2 * model.parameters, "KV cache": 2**30}
    assert engine_state(model, single, EngineMemory(longest=1000), None)["KV cache"] == 1000 * 147_456
    spread = engine_weights(mixtral(), ReplicaSizes(tensor=2, data=4), EngineMemory())
    assert spread < engine_weights(mixtral(), ReplicaSizes(tensor=2), EngineMemory()) / 3


def test_a_shared_device_peaks_in_the_phase_that_has_most() -> None:
    facts, roles = memory_facts(80), DeviceRoles(trains=True, generates=True)
    unsplit_peak = device_peak(facts, roles, ONE, 1, ReplicaSizes(1))
    parts = dict(unsplit_peak.parts)
    assert unsplit_peak.phase == "switch" and parts["optimizer"] == 12 * facts.actor.parameters
    assert "KV cache" in parts and parts["buckets"] == facts.bucket_bytes  # it generates while weights are staged
    cache_later = replace(facts, engine=replace(facts.engine, cache_in_switch=False))  # verl's own modes
    assert device_peak(cache_later, roles, ONE, 1, ReplicaSizes(1)).phase == "generate"
    away = replace(facts.training, param_offload=True, optimizer_offload=True)
    offloaded = device_peak(replace(facts, training=away), roles, ONE, 1, ReplicaSizes(1))
    assert offloaded.phase == "train" and "KV cache" not in dict(offloaded.parts)
    awake = replace(facts.engine, released=False)
    kept = device_peak(replace(facts, training=away, engine=awake), roles, ONE, 1, ReplicaSizes(1))
    assert kept.phase == "train" and "KV cache" in dict(kept.parts)
    weights_only = replace(facts.engine, weights_stay=True)
    cache_away = device_peak(replace(facts, training=away, engine=weights_only), roles, ONE, 1, ReplicaSizes(1))
    assert cache_away.certain == offloaded.certain + 2 * facts.actor.parameters and cache_away.phase == "train"
    on_host = device_peak(replace(facts, training=away, shared=True), roles, ONE, 1, ReplicaSizes(1))
    assert on_host.certain == unsplit_peak.certain  # there is nowhere to offload to
    only = device_peak(facts, DeviceRoles(trains=False, generates=True), ONE, 1, ReplicaSizes(1))
    assert dict(only.parts).keys() == {"processes", "engine weights", "KV cache", "buckets"}
    receiver = DeviceRoles(trains=False, generates=True, transfers=True)
    received = device_peak(cache_later, receiver, ONE, 1, ReplicaSizes(1))
    assert received.phase == "switch" and dict(received.parts)["buckets"] == 2 * facts.bucket_bytes
    assert "KV cache" in dict(received.parts)  # it is never released
    sender = DeviceRoles(trains=True, generates=False, transfers=True)
    with_buckets = device_peak(replace(facts, training=away, bucket_bytes=2**40), sender, ONE, 1, ReplicaSizes(1))
    assert dict(with_buckets.parts)["buckets"] == 2**41 and with_buckets.phase == "switch"
    with_critic = device_peak(replace(facts, critic=facts.actor), replace(roles, critic=True), ONE, 1, ReplicaSizes(1))
    assert dict(with_critic.parts)["critic"] == 18 * facts.actor.parameters
    assert device_peak(facts, DeviceRoles(False, False), ONE, 1, ReplicaSizes(1)).parts == ()


def test_what_does_not_fit_is_said_with_its_largest_part() -> None:
    tight = plan(group(1, 1, *BOTH), memory=memory_facts(80))
    (problem,) = memory_problems(tight)
    assert problem.certain and problem.key.endswith("tensor_model_parallel_size")
    assert "a device of group group0 would need 190.7 GB in phase switch (optimizer 98.3 GB" in problem.reason
    wide = plan(group(1, 8, *BOTH), sizes=ParallelSizes(tensor=4), memory=memory_facts(80))
    assert memory_problems(wide) == []
    cache = memory_facts(80, engine=EngineMemory(utilization=0.95))
    (problem,) = memory_problems(plan(group(1, 8, *BOTH), sizes=ParallelSizes(tensor=4), memory=cache))
    assert problem.key == "actor_rollout_ref.rollout.gpu_memory_utilization"
    assert memory_problems(plan(group(1, 1, *BOTH), memory=memory_facts(None))) == []


def test_only_the_longest_micro_batch_is_a_warning() -> None:
    facts = memory_facts(80, training=TrainingMemory(tokens=200_000, sequence=4096))
    (problem,) = memory_problems(plan(group(1, 8, *BOTH), sizes=ParallelSizes(tensor=4), memory=facts))
    assert not problem.certain and problem.key == "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def test_devices_of_a_host_share_its_memory() -> None:
    facts = replace(memory_facts(400), shared=True)
    assert memory_problems(plan(group(1, 1, *BOTH), memory=facts)) == []
    (problem,) = memory_problems(plan(group(1, 1, *BOTH), group(1, 1, "rollout"), memory=facts))
    assert problem.certain and "all devices together" in problem.reason


def test_a_critic_elsewhere_is_not_on_the_trainers_devices() -> None:
    facts = memory_facts(80, critic=qwen3_8b())
    made = plan(group(1, 2, *BOTH), group(1, 2, "critic"), roles=Roles(critic=True), memory=facts)
    assert all("critic" not in dict(peak.parts) for peak in made.memory)


def test_host_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "max"
    meminfo.write_text("MemTotal:       24000 kB\nMemFree: 1 kB\n")
    assert host_bytes(meminfo, (limit,)) == 24_000 * 1024
    limit.write_text("max\n")
    assert host_bytes(meminfo, (limit,)) == 24_000 * 1024
    limit.write_text("1000000\n")
    assert host_bytes(meminfo, (limit,)) == 1_000_000
    assert host_bytes(tmp_path / "none", (limit,)) is None


FOUR = ParallelSizes(tensor=4)
COPY = staged_bytes(qwen3_8b())


def test_each_host_that_loads_has_one_copy_of_the_weights() -> None:
    assert COPY == 2 * 8_190_735_360
    facts = memory_facts(80)
    both = plan(group(2, 8, *BOTH), group(2, 8, "rollout"), sizes=FOUR, memory=facts)
    assert [dict(host.parts)["staged weights"] for host in both.hosts] == [COPY] * 4
    apart = plan(group(2, 8, "train"), group(2, 8, "rollout"), sizes=FOUR, memory=facts)
    assert [dict(host.parts).get("staged weights") for host in apart.hosts] == [COPY, None, COPY, COPY]
    in_verls_modes = plan(group(1, 8, *BOTH), sizes=FOUR, memory=replace(facts, staged=False))
    assert "staged weights" not in dict(in_verls_modes.hosts[0].parts)


def test_what_ranks_offload_is_on_their_hosts() -> None:
    training = TrainingMemory(
        tokens=4096, sequence=4096, param_offload=True, optimizer_offload=True, references=1, references_offload=True
    )
    (host,) = plan(group(1, 8, *BOTH), sizes=FOUR, memory=memory_facts(80, training=training)).hosts
    parts, size = dict(host.parts), qwen3_8b().parameters
    assert 0.99 < parts["offloaded optimizer"] / (12 * size) < 1.01  # all shards of one host together
    assert 0.99 < parts["offloaded weights"] / (2 * 2 * size) < 1.01  # two data-parallel copies
    assert parts["offloaded reference"] == parts["offloaded weights"]
    on_host = replace(training, optimizer_offload=False, optimizer_on_host=0.5)
    made = plan(group(1, 8, *BOTH), sizes=FOUR, memory=memory_facts(80, training=on_host))
    assert 0.99 < dict(made.hosts[0].parts)["optimizer on the host"] / (6 * size) < 1.01


def test_engines_keep_copies_where_vllm_sleeps_at_level_1() -> None:
    facts = memory_facts(80)
    kept = replace(facts, engine=replace(facts.engine, kept_on_host=True))
    hybrid, alone = plan(group(1, 8, *BOTH), group(1, 8, "rollout"), sizes=FOUR, memory=kept).hosts
    assert dict(hybrid.parts)["engine copies"] == 8 * 2 * qwen3_8b().parameters
    assert "engine copies" not in dict(alone.parts)  # its engines do not sleep


def test_a_host_that_is_too_small_is_refused_once_for_its_group() -> None:
    facts = replace(memory_facts(80), host_bytes=20 * 10**9)
    (problem,) = memory_problems(plan(group(4, 8, *BOTH), sizes=FOUR, memory=facts))
    assert problem.certain and problem.key == "seamless.host_memory_gb"
    assert "a machine of group group0 would need 33.6 GB of host memory (processes 17.2 GB" in problem.reason
    assert "and has 20.0 GB" in problem.reason
    assert memory_problems(plan(group(4, 8, *BOTH), sizes=FOUR, memory=replace(facts, host_bytes=34 * 10**9))) == []


def test_where_devices_are_the_host_the_staged_copy_counts_with_them() -> None:
    shared = replace(memory_facts(170), shared=True)
    (problem,) = memory_problems(plan(group(1, 1, *BOTH), memory=shared))
    assert "staged weights 16.4 GB" in problem.reason
