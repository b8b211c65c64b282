"""Pins what we override, call and read of verl's workers, weights and servers: a failing test names a change."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.hosts import attributes, found, listed, parameters, signature

ACTOR = "verl.workers.engine_workers:ActorRolloutRefWorker."
TRAINING = "verl.workers.engine_workers:TrainingWorker."
MEGATRON = "verl.workers.engine.megatron.transformer_impl:MegatronEngine."
LM_HEAD = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead."
WEIGHTS = "verl.checkpoint_engine.base:"
ENGINE = WEIGHTS + "CheckpointEngine."
MANAGER = WEIGHTS + "CheckpointEngineManager."
SERVERS = "verl.workers.rollout.llm_server:LLMServerManager."
CLIENT = "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient."
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer."
REPLICA = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica."
RECEIVER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver."
EXTENSION = "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension."
SENDER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender."
GROUP = "verl.single_controller.ray:RayWorkerGroup."
DECORATOR = "verl.single_controller.base.decorator"
WEIGHT = "tuple[str, torch.Tensor], NoneType, NoneType]"
# Methods of verl that our subclasses override, with the signatures they were written for.
OVERRIDDEN = {
    ACTOR + "init_model": "(self)",
    ACTOR + "load_checkpoint": "(self, local_path, hdfs_path=None, del_local_after_load=False)",
    TRAINING + "load_checkpoint": "(self, local_path, hdfs_path=None, del_local_after_load=False)",
    ACTOR + "save_checkpoint": "(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)",
    "verl.experimental.separation.engine_workers:DetachActorWorker.restore_model_from_cpu": "(self, n)",
    TRAINING + "__init__": "(self, config: verl.workers.config.engine.TrainingWorkerConfig)",
    TRAINING + "infer_batch": "(self, data: tensordict._td.TensorDict) -> tensordict._td.TensorDict",
    TRAINING + "save_checkpoint": "(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)",
    TRAINING + "train_mini_batch": "(self, data: tensordict._td.TensorDict) -> tensordict._td.TensorDict",
    "verl.utils.megatron.router_replay_patch:RouterReplay.get_replay_topk": "(self, scores, topk, num_groups=None,"
    " group_topk=None, default_compute_topk=None)",
    GROUP + "spawn": "(self, prefix_set)",
    ENGINE + "prepare": "(self) -> dict[str, typing.Any]",
    ENGINE + "build_topology": "(actor_wg_world_size: int, rollout_world_size: int,"
    " metadata: list[dict]) -> tuple[dict[str, list[typing.Any]], dict[str, list[typing.Any]]]",
    ENGINE + "init_process_group": "(self, **kwargs)",
    ENGINE + "finalize": "(self)",
    ENGINE + "send_weights": f"(self, weights: Generator[{WEIGHT}, global_steps: int | None = None)",
    ENGINE + "receive_weights": f"(self, global_steps: int | None = None) -> Generator[{WEIGHT}",
    CLIENT + "generate": "(self, request_id, *, prompt_ids: list[int], sampling_params: dict[str, typing.Any],"
    " image_data: Optional[list[Any]] = None, video_data: Optional[list[Any]] = None,"
    " audio_data: Optional[list[Any]] = None, mm_processor_kwargs: Optional[dict[str, Any]] = None, **kwargs: Any)"
    " -> verl.workers.rollout.replica.TokenOutput",
    SERVER + "abort_all_requests": "(self, reset_prefix_cache: bool = True, reject_request: bool = False)"
    " -> dict[str, typing.Any]",
    SERVER + "resume_engine_generation": "(self)",
    SERVER + "clear_kv_cache": "(self)",
    SERVER + "set_global_steps": "(self, global_steps: int)",
    SERVER + "_get_worker_extension_cls": "(self) -> str",
    SERVER + "_preprocess_engine_kwargs": "(self, engine_kwargs: dict) -> None",
    RECEIVER + "__init__": "(self, zmq_handle: str, device: torch.device, use_shm: bool = False)",
    RECEIVER + "receive_weights": "(self, on_bucket_received: <built-in function callable>)",
    SENDER + "async_send_weights": "(self, weights)",
    SENDER + "_init_socket": "(self)",
    REPLICA + "get_ray_class_with_init_args": "(self) -> verl.single_controller.ray.base.RayClassWithInitArgs",
}
# What we call, with its parameters by name and in order.
CALLED = {
    "verl.experimental.separation.engine_workers:DetachActorWorker.__init__": "self config role distillation_config"
    " **kwargs",
    SERVER + "sleep": "self",
    SERVER + "wake_up": "self tags",
    ACTOR + "execute_checkpoint_engine": "self method *args **kwargs",
    MEGATRON + "get_per_tensor_param": "self base_sync_done **kwargs",
    MEGATRON + "to": "self device model optimizer grad",
    MEGATRON + "initialize": "self",
    MEGATRON + "load_checkpoint": "self local_path hdfs_path del_local_after_load **kwargs",
    "verl.workers.engine.base:BaseEngine.train_batch": "self data loss_function",  # wrapped, and the next one
    MEGATRON + "optimizer_step": "self",
    LM_HEAD + "_lm_head_logits_processor": "self logits label temperature * calculate_sum_pi_squared calculate_entropy"
    " distillation_use_topk distillation_only logits_processor_func batch data_format",  # wrapped, and called
    LM_HEAD + "forward_step": "self batch_iter model logits_processor_func postprocess_micro_batch_func",  # replaced
    MEGATRON + "forward_backward_batch": "self data loss_function forward_only",  # wrapped
    "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead.forward_step": "self batch_iter model"
    " logits_processor_func postprocess_micro_batch_func",  # replaced
    "verl.workers.engine.megatron.transformer_impl:prepare_micro_batches": "data dp_group num_batches_divided_by"
    " same_micro_num_in_dp min_num_micro_batch use_dynamic_bsz_balance",  # replaced, and called
    "megatron.core.tensor_parallel:gather_from_sequence_parallel_region": "input_ tensor_parallel_output_grad group"
    " output_split_sizes use_global_buffer",
    LM_HEAD + "postprocess_micro_batch_func": "self output data forward_only loss_function local_cp_size",
    "verl.utils.megatron.tensor_parallel:vocab_parallel_entropy": "vocab_parallel_logits",
    "verl.utils.debug.metrics:calculate_debug_metrics": "data",
    "verl.trainer.ppo.rollout_corr_helper:compute_rollout_corr_metrics_from_logprobs": "log_prob rollout_log_prob"
    " response_mask",
    "verl.trainer.distillation.losses:agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens"
    " global_batch_size loss_scale_factor",  # replaced
    "verl.trainer.distillation.losses:distillation_ppo_loss": "config distillation_config model_output data dp_group"
    " student_logits data_format",  # wrapped
    MEGATRON + "save_checkpoint": "self local_path hdfs_path global_step max_ckpt_to_keep **kwargs",
    "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager.remove_previous_save_local_path": "self path",
    "verl.utils.tensordict_utils:index_select_tensor_dict": "batch indices",
    "verl.utils.tensordict_utils:nested_tensor_from_tensor_list": "tensors ragged_idx",
    "verl.workers.engine_workers:maybe_fix_3d_position_ids": "data",  # replaced, and the next one
    "verl.workers.engine.base:maybe_fix_3d_position_ids": "data",
    "verl.workers.utils.losses:get_policy_loss_fn": "name",  # replaced
    "verl.trainer.ppo.core_algos:register_policy_loss": "name",
    "verl.workers.engine:EngineRegistry.register": "model_type backend device vendor",
    MANAGER + "__init__": "self config actor_wg replicas",
    MANAGER + "build_process_group": "self rollout",
    MANAGER + "update_weights": "self global_steps",
    WEIGHTS + "CheckpointEngineWorker.__init__": "self rollout_config model_config server_adapter *args **kwargs",
    WEIGHTS + "CheckpointEngineWorker.execute_checkpoint_engine": "self method *args **kwargs",
    WEIGHTS + "CheckpointEngineRegistry.register": "backend",
    WEIGHTS + "split_weight_chunks": "weights bucket_size meta_only",
    WEIGHTS + "merge_weight_chunks": "chunks bucket_size",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead": "model_config engine_config optimizer_config"
    " checkpoint_config",  # registered for the CPU platform, as the next
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithValueHead": "model_config engine_config optimizer_config"
    " checkpoint_config",
    EXTENSION + "update_weights_from_ipc": "self peft_config base_sync_done use_shm",
    SERVER + "collective_rpc": "self method timeout args kwargs",
    "verl.workers.rollout.utils:ensure_async_iterator": "iterable",
    "verl.workers.rollout.utils:qwen2_5_vl_dedup_image_tokens": "prompt_ids processor",
    "verl.workers.rollout.utils:run_uvicorn": "app server_args server_address",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:run_uvicorn": "app server_args server_address",  # replaced
    SERVER + "run_server": "self args",
    "verl.utils.tracking:RLInsightLogger.enabled": "",
    "verl.utils.import_utils:import_external_libs": "external_libs",
    "verl.utils.ray_utils:auto_await": "func",
    "verl.utils:normalize_token_ids": "tokenized_output",
    DECORATOR + ":dispatch_lazy_compute_data_proto": "mesh_name worker_group *args **kwargs",
    DECORATOR + ":collect_lazy_compute_data_proto": "mesh_name worker_group *args **kwargs",
    DECORATOR + ":dispatch_one_to_all": "worker_group *args **kwargs",
    DECORATOR + ":register": "dispatch_mode execute_mode blocking materialize_futures",
    "verl.single_controller.ray:RayClassWithInitArgs.__init__": "self cls *args **kwargs",
    GROUP + "__init__": "self resource_pool ray_cls_with_init bin_pack name_prefix detached worker_names worker_handles"
    " ray_wait_register_center_timeout **kwargs",
    SERVERS + "__init__": "self config worker_group rollout_resource_pool start_rank load_balancer_cls",
    SERVERS + "_initialize_llm_servers": "self start_rank",
    SERVERS + "_init_global_load_balancer": "self",
    SERVERS + "get_client": "self client_cls **kwargs",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.add_servers": "self servers",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.remove_servers": "self server_ids",
    REPLICA + "launch_servers": "self",
    REPLICA + "sleep": "self",
    "verl.workers.rollout.replica:TokenOutput": "* token_ids log_probs routed_experts stop_reason num_preempted"
    " extra_fields",
    REPLICA + "__init__": "self replica_rank config model_config gpus_per_node is_reward_model is_teacher_model"
    " name_suffix",
}
# What we read of its objects, or set on them.
HELD = {
    ACTOR[:-1]: "actor ref role rank layered_summon rollout checkpoint_engine",
    TRAINING[:-1]: "engine rank",
    MEGATRON[
        :-1
    ]: "engine_config tf_config module bridge vanilla_bridge _qat_enabled is_param_offload_enabled optimizer"
    " get_data_parallel_rank get_data_parallel_size is_mp_src_rank_with_outputs checkpoint_mananager eval_mode",
    "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager": "previous_saved_paths",
    "verl.workers.config:McoreEngineConfig": "strategy use_megatron_fsdp tensor_model_parallel_size"
    " pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size override_transformer_config",
    WEIGHTS + "CheckpointEngineWorker": "checkpoint_engine",
    WEIGHTS + "TensorMeta": "offset chunk_size",
    MANAGER[:-1]: "actor_wg replicas",
    SENDER[:-1]: "socket",
    DECORATOR + ":Dispatch": "ONE_TO_ALL DP_COMPUTE",
    GROUP[:-1]: "workers world_size",
    SERVERS[:-1]: "rollout_replica_class worker_group server_addresses server_handles rollout_replicas"
    " global_load_balancer",
    CLIENT[:-1]: "config",
    SERVER[:-1]: "replica_rank engine global_steps _server_address node_rank config",
    REPLICA[:-1]: "server_class config model_config replica_rank world_size workers server_handle"
    " servers server_address _server_handle _server_address",
}
# Whether a group's method returns what its workers returned, or replies that are still to come.
WAITS = {
    ACTOR + "compute_log_prob": True,
    ACTOR + "compute_ref_log_prob": True,
    ACTOR + "update_actor": True,
    ACTOR + "execute_checkpoint_engine": False,
    WEIGHTS + "CheckpointEngineWorker.execute_checkpoint_engine": False,
    TRAINING + "infer_batch": False,
    TRAINING + "train_mini_batch": False,
}


@pytest.mark.parametrize("symbol", OVERRIDDEN)
def test_verl_still_has_what_we_override(symbol: str) -> None:
    assert str(signature(found(symbol, "seamless-workers"))) == OVERRIDDEN[symbol]


@pytest.mark.parametrize("symbol", CALLED)
def test_what_we_call_takes_what_it_took(symbol: str) -> None:
    assert parameters(found(symbol, "seamless-workers")) == CALLED[symbol]


@pytest.mark.parametrize(("owner", "name"), listed(HELD))
def test_its_objects_hold_what_we_read(owner: str, name: str) -> None:
    assert name in attributes(found(owner, "seamless-workers"))


def test_a_replica_can_be_launched_again_beside_its_workers() -> None:
    """`SeamlessServers.start_again` gives a copy of the replica an empty list, which the launch fills."""
    source = inspect.getsource(found(REPLICA + "launch_servers", "seamless-workers"))
    changed = set(re.findall(r"self\.(\w+) = |self\.(\w+)\.append\(", source))
    assert {attribute or listed_in for attribute, listed_in in changed} == {
        *("servers", "_server_handle", "_server_address")
    }


@pytest.mark.parametrize("symbol", WAITS)
def test_a_groups_method_waits_where_it_waited(symbol: str) -> None:
    registered = getattr(found(symbol, "seamless-workers"), found(f"{DECORATOR}:MAGIC_ATTR", "seamless-workers"))
    assert registered["blocking"] is WAITS[symbol]


@pytest.mark.parametrize("loss", ["vanilla", "dppo_tv", "cispo"])
def test_a_policy_loss_is_called_with_what_ours_take(loss: str) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from seamless_verl.algorithms.interpolated import interpolated_loss
    from seamless_verl.algorithms.m2po import m2po_loss

    assert parameters(interpolated_loss) == parameters(m2po_loss) == parameters(get_policy_loss_fn(loss))


def test_the_groups_of_megatrons_optimizers_are_those_that_step() -> None:
    """So a learning rate that is set there is the one of the next step."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

    group = {"lr": 1.0}
    one = SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=[group]))
    groups = MegatronOptimizer.param_groups.fget(one)
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(param_groups=groups)])
    assert ChainedOptimizer.param_groups.fget(chain)[0] is group


def test_megatron_measures_the_gradients_and_then_steps_by_these_methods() -> None:
    """So a step whose norm is not finite is left out there; verl's other engines look at the norm themselves."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer

    chained, single = inspect.getsource(ChainedOptimizer.step), inspect.getsource(MixedPrecisionOptimizer.step)
    assert (
        chained.index("self.get_grad_norm()") < chained.index("clip_grad_by") < chained.index("self.step_with_ready_")
    )
    assert single.index("self.clip_grad_norm(") < single.index("self.step_with_ready_grads()")
    assert "super().step()" in inspect.getsource(LayerWiseDistributedOptimizer.step)
    norm = inspect.getsource(
        found("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step", "finite-updates")
    )
    assert "if not torch.isfinite(grad_norm):" in norm and "return grad_norm" in norm
    assert "= self.optimizer.step()" in inspect.getsource(found(MEGATRON + "optimizer_step", "finite-updates"))


def test_the_export_of_weights_gathers_over_the_groups_of_the_models_sizes_alone() -> None:
    """So a rank that has the whole model waits for no other one; `weights/background.py` has the sizes."""
    from mbridge.core import bridge, util

    export = inspect.getsource(bridge.Bridge.export_weights)
    assert set(re.findall(r"group=self\.mpu\.(\w+)_group", export)) == {"pp", "ep", "etp", "tp"}
    assert export.count("torch.distributed.") == export.count("group=self.mpu.")
    for helper in (util.broadcast_from_megatron_pp, util.broadcast_str_from_megatron_pp):
        source = inspect.getsource(helper)
        used = re.findall(r"torch\.distributed\.(?!get_)\w+\(", source)
        assert used and source.count("group=mpu.get_pipeline_model_parallel_group()") >= len(used)


def test_so_does_megatron_bridges() -> None:
    from seamless_verl.platform.megatron.bridge import import_bridge

    import_bridge()
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion import model_bridge, param_mapping, peft_bridge

    from seamless_verl.weights.background import BARS

    mappings, peft = inspect.getsource(param_mapping), inspect.getsource(peft_bridge)
    names = inspect.getsource(model_bridge.MegatronModelBridge._megatron_global_param_names_all_pp_ranks)
    stream = inspect.getsource(model_bridge.MegatronModelBridge.stream_weights_megatron_to_hf)
    collective = r"torch\.distributed\.(?!get_|is_)\w+\("
    sources = (mappings, peft, names, stream)
    groups = [re.findall(collective + r"[^#]*?group=([\w.]+)", source) for source in sources]
    assert [len(found) for found in groups] == [len(re.findall(collective, source)) for source in sources]
    assert set(groups[0]) == {"self.pp_group", "self.tp_group", "self.ep_group"}
    for name in BARS:
        assert inspect.signature(getattr(AutoBridge, name)).parameters["show_progress"].default is True
    assert groups[1:] == [["parallel_state.get_expert_model_parallel_group", "pp_group"], ["pp_group"], []]


def test_megatrons_weights_stay_until_a_step_unless_it_is_told_otherwise() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    settings = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert settings.enable_cuda_graph is False and settings.cuda_graph_impl == "none"
    assert settings.num_moe_experts is None
    assert settings.moe_permute_fusion is False  # which Megatron-Bridge's mixtures change
    assert DistributedDataParallelConfig().overlap_param_gather is False
    assert "ddp_config: DistributedDataParallelConfig" in inspect.getsource(DistributedDataParallel.__init__)


def test_the_class_rebound_for_standalone_replicas_exists() -> None:
    found("verl.workers.rollout.replica:ResourcePoolManager", "tag-pools")


def test_a_standalone_worker_takes_the_arguments_that_ours_takes() -> None:
    source = inspect.getsource(found(REPLICA + "get_ray_class_with_init_args", "seamless-workers"))
    given = re.findall(r"^ +(\w+)=(\S+),$", source, re.MULTILINE)
    assert given == [
        ("cls", "rollout_worker_actor_cls"),
        *((name, f"self.{field}") for name, field in [("rollout_config", "config"), ("model_config", "model_config")]),
        ("replica_rank", "self.replica_rank"),
    ]


def test_the_caches_that_verl_clears_after_a_load_are_those_that_we_do() -> None:
    source = inspect.getsource(found(SERVER + "clear_kv_cache", "seamless-workers"))
    cleared = {"reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"}
    assert set(re.findall(r"self\.engine\.(\w+)\(", source)) == cleared


def test_nccl_relays_walk_the_weights_that_the_sender_walks() -> None:
    """So every rank of the sender's host is given the same ones. Its module needs cupy, which only a GPU has."""
    import verl.checkpoint_engine

    source = Path(verl.checkpoint_engine.__file__).with_name("nccl_checkpoint_engine.py").read_text(encoding="utf-8")
    assert "multi_sender: bool = True," in source
    assert "await self._relay_weights(weights)" in source
    relay = source[source.index("async def _relay_weights") :]
    assert "split_weight_chunks(" in relay[: relay.index("async def receive_weights")]
