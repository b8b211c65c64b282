"""Pins what the pools and the plan use of verl, Ray and transformers: a failing test names what changed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import ray
from packaging.version import Version
from support.hosts import found, signature

from seamless_verl.config.checks.hosts import OF_THE_CLUSTER
from seamless_verl.resources.machines import CPUS_A_DEVICE, CPUS_OF_REPLICA
from seamless_verl.resources.model_facts import ModelFacts

BASE = "verl.single_controller.ray.base:"
REPLICA = "verl.workers.rollout.replica:"
OVERRIDDEN = {
    BASE + "RayResourcePool.get_placement_groups": "(self, strategy='STRICT_PACK', name=None, device_name='cuda')",
    BASE + "RayResourcePool.__init__": "(self, process_on_nodes: Optional[list[int]] = None, use_gpu: bool = True,"
    " name_prefix: str = None, max_colocate_count: int = 10, detached=False, accelerator_type: Optional[str] = None)"
    " -> None",
    BASE + "ResourcePoolManager.create_resource_pool": "(self)",
    BASE + "ResourcePoolManager.get_resource_pool": "(self, role) -> verl.single_controller.ray.base.RayResourcePool",
    BASE + "ResourcePoolManager.get_n_gpus": "(self) -> int",
    BASE + "ResourcePoolManager._check_resource_available": "(self)",
    BASE + "RayWorkerGroup._init_with_resource_pool": "(self, resource_pool, ray_cls_with_init, bin_pack, detached,"
    " worker_env=None)",
    BASE + "RayWorkerGroup._create_worker": "(self, rank, pg_idx, pg, local_rank, resource_pool, ray_cls_with_init,"
    " worker_env, detached)",
    BASE + "RayWorkerGroup._get_master_addr_port": "(self, pg, bundle_index=0, master_port_range=None)",
    REPLICA + "RolloutReplica.init_standalone": "(self)",
    REPLICA + "RolloutReplica.init_hybrid": "(self, worker_group: verl.single_controller.ray.base.RayWorkerGroup)",
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
EXPERTS = {"moe_intermediate_size": 48}
LATENT = {
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, **EXPERTS},
}


@pytest.mark.parametrize("symbol", OVERRIDDEN)
def test_verl_still_has_what_the_pools_override(symbol: str) -> None:
    assert str(signature(found(symbol, "tag-pools"))) == OVERRIDDEN[symbol]


def test_the_managers_fields() -> None:
    from verl.single_controller.ray.base import ResourcePoolManager

    names = [field.name for field in dataclasses.fields(ResourcePoolManager)]
    assert names == ["resource_pool_spec", "mapping", "max_colocate_count", "resource_pool_dict"]
    assert ResourcePoolManager.max_colocate_count == CPUS_A_DEVICE


def test_how_a_replica_makes_a_manager() -> None:
    """`init_standalone` names the class in its module, and calls it so; the pool's name carries the rank."""
    from verl.workers.rollout import replica

    source = inspect.getsource(replica.RolloutReplica.init_standalone)
    assert "ResourcePoolManager" in vars(replica)
    assert 'f"rollout_pool_{self.replica_rank}{self.name_suffix}"' in source
    for part in ("resource_pool_spec=resource_pool_spec", "mapping=None", f"max_colocate_count={CPUS_OF_REPLICA}"):
        assert part in source


def test_a_pool_s_groups_have_its_name() -> None:
    """By which `remove_groups_of` finds those of a pool that does not know of them yet."""
    source = inspect.getsource(found("verl.single_controller.ray.base:RayResourcePool.get_placement_groups", "pools"))
    assert 'f"{self.name_prefix}verl_group_' in source and "name=pg_name_prefix + str(idx)" in source
    assert source.index("name=pg_name_prefix") < source.index("ray.get([pg.ready()") < source.index("self.pgs = sort")


def test_a_replica_takes_its_devices_before_it_launches_and_waits_for_nothing_else() -> None:
    """`SeamlessServers._take_devices` has it do so without the launch, while the class above is replaced."""
    from verl.workers.rollout import replica

    source = inspect.getsource(replica.RolloutReplica.init_standalone)
    assert source.count("await") == 1 and source.rstrip().endswith("await self.launch_servers()")


@pytest.mark.parametrize(("symbol", "chosen"), [
    ("verl.experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers", "ray.nodes()"),
    ("verl.experimental.reward_loop.reward_loop:RewardLoopManager._init_reward_loop_workers", "ray.nodes()"),
    ("transfer_queue.utils.common:get_node_round_robin_scheduling_strategies", "ray.nodes()"),
    ("verl.workers.rollout.router:_create_global_sticky_inflight", "ray.remote(load_balancer_cls).remote("),
    ("transfer_queue.interface:init", "TransferQueueController.options("),
])  # fmt: skip
def test_actors_get_their_nodes_by_the_names_that_are_replaced(symbol: str, chosen: str) -> None:
    """`trainer/needed_nodes.py` keeps them off the nodes that only generate."""
    assert chosen in inspect.getsource(found(symbol, "needed-nodes"))


@pytest.mark.parametrize("name", OF_THE_CLUSTER)
def test_ray_takes_no_setting_of_a_cluster_that_exists(name: str) -> None:
    source = inspect.getsource(ray._private.worker.init)
    joining = source[source.index("connecting to an existing cluster") - 300 :]
    assert f"{name} is not None" in joining


def test_what_worker_creation_reads_of_a_pool() -> None:
    """Our view of one machine has exactly these."""
    from verl.single_controller.ray.base import RayWorkerGroup

    source = inspect.getsource(RayWorkerGroup._create_worker)
    read = {part.split(".")[1].split("[")[0].split()[0].rstrip(",)") for part in _uses(source, "resource_pool")}
    assert read == {"world_size", "use_gpu", "store", "max_colocate_count"}


def test_rays_placement_groups_take_label_selectors() -> None:
    module = importlib.import_module("ray.util.placement_group")  # `ray.util` has a function of this name

    from seamless_verl.trainer.pools import NODE_ID

    if Version(ray.__version__) >= Version("2.60"):  # before, Ray has no name for it in Python
        assert NODE_ID == module.NODE_ID_LABEL_KEY
    parameters = inspect.signature(module.placement_group).parameters
    assert {"bundles", "strategy", "name", "lifetime", "bundle_label_selector"} <= set(parameters)


def test_verls_roles() -> None:
    from verl.trainer.ppo.utils import Role

    assert all(hasattr(Role, name) for name in ("Critic", "RefPolicy", "RewardModel", "TeacherModel"))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 96, **EXPERTS}),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, **EXPERTS}),
        ("deepseek_v3", {"n_shared_experts": 1, "q_lora_rank": 24, **LATENT}),
        ("deepseek_v3", {"n_shared_experts": 2, "q_lora_rank": None, **LATENT}),
    ],
)
def test_parameters_are_those_of_transformers_modules(kind: str, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    facts = ModelFacts.read(config.to_dict())
    assert facts is not None and facts.exact
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.integration
@pytest.mark.parametrize("size", ["nano", "small", "medium"])
def test_parameters_of_our_tiny_models(size: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from seamless_verl.tiny.models import model_config

    config = model_config(size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    facts = ModelFacts.read(config.to_dict())
    assert facts is not None
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    caches = model.config.num_key_value_heads * model.config.head_dim * 2
    assert (facts.cache_width, facts.layers) == (caches, config.num_hidden_layers)


def _uses(source: str, name: str) -> list[str]:
    return [f"{name}.{rest}" for rest in source.split(f"{name}.")[1:]]


def test_an_agent_loop_worker_is_started_with_what_ours_gives_one_in_its_place() -> None:
    """`SeamlessAgentLoopManager._start_worker` repeats the options and the arguments."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager

    source = "".join(inspect.getsource(AgentLoopManager._init_agent_loop_workers).split())
    given = "self.config,self.llm_client,self.teacher_client,self.reward_loop_worker_handles,)"
    assert f").remote({given}" in source and "NodeAffinitySchedulingStrategy(node_id=node_id,soft=True)" in source
    assert 'name=f"agent_loop_worker_{i}"+f"_{uuid4().hex[:8]}"' in source


def test_what_a_manager_gives_its_workers() -> None:
    """`SeamlessAgentLoopManager._give` does the same, and remembers it."""
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

    source = "".join(inspect.getsource(AgentLoopManagerTQ.generate_sequences).split())
    assert "chunkes=prompts.chunk(len(self.agent_loop_workers))" in source
    assert "worker.generate_sequences.remote(chunk)" in source
