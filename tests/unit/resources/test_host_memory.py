"""Host memory: one copy of the staged weights on each host that loads it, what is offloaded, and the refusal."""

from __future__ import annotations

from dataclasses import replace

from support.resources import group, memory_facts, plan, qwen3_8b

from seamless_verl.resources.host_memory import staged_bytes
from seamless_verl.resources.memory import TrainingMemory
from seamless_verl.resources.memory_fit import memory_problems
from seamless_verl.resources.parallel import ParallelSizes

BOTH = ("train", "rollout")
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
