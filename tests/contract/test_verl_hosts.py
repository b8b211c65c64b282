"""Pins what our trainer overrides, calls and reads in verl: after an upgrade, a failing test names what changed."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from support.hosts import attributes, found, listed, parameters, signature
from verl.trainer.ppo.core_algos import kl_penalty

from seamless_verl.agent_loops.rows import GREEDY_UNLESS, SAMPLES
from seamless_verl.config.checks.keys import KL_ESTIMATORS
from seamless_verl.config.verl_keys import RESERVED_COLUMNS
from seamless_verl.platform.adaptation import plain_class

BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer."
BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync."
LOOPS = "verl.experimental.agent_loop.agent_loop:"
BATCH = "transfer_queue.metadata.KVBatchMeta"
# Methods of verl that our subclasses override, with the signatures they were written for.
OVERRIDDEN = {
    BASE + "__init__": "(self, config: omegaconf.dictconfig.DictConfig)",
    BASE + "_build_replay_buffer": "(self) -> verl.trainer.ppo.v1.replay_buffer.ReplayBuffer",
    BASE + "_init_dataloader": "(self)",
    BASE + "_balance_batch": "(self, batch: transfer_queue.metadata.KVBatchMeta, metrics,"
    " logging_prefix='global_seqlen', keep_minibatch=False)",
    BASE + "_init_resource_pool_mgr": "(self)",
    BASE + "_setup": "(self)",
    BASE + "get_llm_client": "(self) -> verl.workers.rollout.llm_server.LLMServerClient",
    BASE + "_rollout_server_managers": "(self) -> list",
    BASE + "_get_n_gpus_for_throughput": "(self) -> int",
    BASE + "_compute_old_log_prob": f"(self, batch: {BATCH}, metrics: dict) -> {BATCH}",
    BASE + "_compute_values": f"(self, batch: {BATCH}, metrics: dict) -> {BATCH}",
    BASE + "_get_required_batch_multiple": "(self, dp_size: int) -> int",
    BASE + "_compute_advantage": f"(self, batch: {BATCH}, metrics: dict) -> {BATCH}",
    BASE + "_update_actor": f"(self, batch: {BATCH}, metrics: dict) -> {BATCH}",
    BASE + "_update_critic": f"(self, batch: {BATCH}, metrics: dict) -> {BATCH}",
    BASE + "_validate": "(self) -> dict[str, float]",
    BASE + "_val_metrics_update": "(self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns,"
    " expected_acc_counts: dict[tuple[str, str], int] | None = None) -> dict[str, float]",
    BASE + "_load_checkpoint": "(self)",
    BASE + "_save_checkpoint": "(self)",
    BASE + "fit": "(self, agent_loop_manager: verl.experimental.agent_loop.agent_loop.AgentLoopManager)",
    BASE + "prepare_step": "(self) -> dict",
    BASE + "_next_train_batch": "(self, num_prompts: int | None = None) -> tensordict._td.TensorDict",
    BASE + "_reissue_inflight_prompts": "(self, partition_id: str = 'train') -> int",
    BASE + "on_init_end": "(self)",
    BASE + "on_train_begin": "(self)",
    BASE + "on_sample_begin": "(self)",
    BASE + "on_sample_end": "(self)",
    BASE + "on_step_end": "(self)",
    BUFFER + "_has_enough_samples": "(self, global_steps: int, partition_id: str, batch_size: int,"
    " sampleable_keys: set[str]) -> bool",
    BUFFER + "_materialize_batch": "(self, partition_id: str, selected_prompt_uids: list[str],"
    " partition_snapshot: dict[str, dict]) -> transfer_queue.metadata.KVBatchMeta",
    BUFFER + "_sync_metadata_from_transfer_queue": "(self)",
    BUFFER + "_terminal_eviction_reasons": "(self, global_steps: int, partition_id: str)"
    " -> tuple[set[str], set[str], set[str], collections.Counter]",
    BUFFER + "_stale_terminal_keys": "(self, global_steps: int, partition_id: str) -> set[str]",
    BUFFER + "_wait_for_next_poll": "(self, partition_id: str, last_debug_time: float) -> float",
    "verl.utils.tracking:Tracking.log": "(self, data, step, backend=None)",
    LOOPS + "AgentLoopBase.run": "(self, sampling_params: dict[str, typing.Any], **kwargs)"
    " -> verl.experimental.agent_loop.agent_loop.AgentLoopOutput",
    LOOPS + "AgentLoopOutput.as_dict": "(self) -> dict[str, typing.Any]",
}
# What we call, with its parameters by name and in order.
CALLED = {
    BASE + "init": "self",
    "verl.trainer.ppo.core_algos:agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens"
    " global_batch_size loss_scale_factor",
    "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories": "data batch_keys adv_estimator gamma lam"
    " num_repeat norm_adv_by_std_in_grpo config",
    "verl.trainer.ppo.ray_trainer:compute_advantage": "data adv_estimator gamma lam num_repeat norm_adv_by_std_in_grpo"
    " config",
    BASE + "_add_async_warmup_batches": "self num_warmup_batches",
    BASE + "_add_prompts_to_generate": "self num_prompts",
    BASE + "_submit_batch_to_rollout": "self batch",
    BASE + "_resolve_filter_groups_metric": "self",
    BASE + "_stop_rollout_profiling": "self",
    BUFFER + "__init__": "self trainer_mode trainer_config max_off_policy_threshold max_off_policy_strategy"
    " sampler_kwargs poll_interval refill_fn filter_groups_metric train_batch_size gen_batch_size"
    " max_inflight_gen_batches sync_refill_failed_groups",
    BUFFER + "_sync_metadata_from_transfer_queue": "self",
    BUFFER + "_clear_groups": "self partition_id uids",
    LOOPS + "AgentLoopBase.__init__": "self trainer_config server_manager tokenizer processor dataset_cls data_config"
    " hf_model_type **kwargs",
    LOOPS + "create_continuous_token_builder": "tokenizer * model_family hf_model_type chat_template_kwargs"
    " mm_processor_kwargs processor **builder_kwargs",
    "verl.utils.tokenizer.continuous_token:ContinuousTokenBuilder.build_initial_tokens": "self messages * tools"
    " images videos audios mm_inputs_out",
    LOOPS + "DictConfigWrap": "config",
    LOOPS + "ToolListWrap": "tools",
    LOOPS + "AgentLoopWorker._compute_score": "self outputs kwargs",
    "verl.experimental.reward_loop.reward_loop:RewardLoopWorker.compute_score": "self data",
    "transfer_queue:get_client": "",
    LOOPS + "AgentLoopWorker._compute_teacher_logprobs": "self output prompt_ids response_ids validate sample_kwargs",
    LOOPS + "AgentLoopWorker._compute_multi_modal_inputs": "self output input_ids",
    LOOPS + "AgentLoopWorker._compute_position_ids": "self input_ids attention_mask multi_modal_inputs"
    " mm_processor_kwargs",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.__init__": "self *args **kwargs",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences": "self prompts",
    "verl.trainer.main_ppo:run_ppo": "config task_runner_class",
    "verl.trainer.ppo.utils:need_critic": "config",
    "verl.trainer.ppo.utils:need_reference_policy": "config",
    "verl.trainer.ppo.v1.trainer_base:register_trainer": "name",
    "verl.utils.config:omega_conf_to_dataclass": "config dataclass_type",
    "verl.utils.config:validate_config": "config use_reference_policy use_critic",
    "verl.utils.debug:marked_timer": "name timing_raw color domain category",
    "verl.utils.device:auto_set_device": "config",
    "verl.utils.logging_utils:configure_verl_logging": "",
    "verl.utils.rollout_trace:rollout_trace_attr": "sample_index step rollout_n name validate trace",
    "verl.utils.tensordict_utils:assign_non_tensor_data": "tensor_dict key val",
    "verl.utils.tensordict_utils:assign_non_tensor_stack": "tensor_dict key val",
    "verl.utils.tensordict_utils:list_of_dict_to_tensordict": "list_of_dicts",
    "verl.utils.tracking:Tracking.__init__": "self project_name experiment_name default_backend config",
    "verl.utils.tracking:Tracking.finish": "self exit_code",
    "transfer_queue:init": "conf",
    "transfer_queue:close": "",
    "transfer_queue:async_kv_batch_put": "keys partition_id fields tags data_parser",
    "verl.utils.tensordict_utils:concat_tensordict": "data",
    "verl.utils.tensordict_utils:get": "tensordict key default",
    "verl.utils.tensordict_utils:index_select_tensor_dict": "batch indices",
    "verl.utils.tensordict_utils:pop": "tensordict key default",
    "transfer_queue:kv_batch_get": "keys partition_id select_fields",
    "transfer_queue:kv_batch_put": "keys partition_id fields tags data_parser",
    "transfer_queue:kv_clear": "keys partition_id",
    "transfer_queue:kv_list": "partition_id",
}
# What we read of its objects, or set on them.
HELD = {
    BASE[:-1]: "config trainer_mode parameter_sync_step local_trigger_step global_steps timing_raw curr_step_profile"
    " _pending_sync_metrics use_critic role_worker_mapping mapping resource_pool_manager actor_rollout_wg critic_wg"
    " ref_policy_wg replay_buffer checkpoint_manager logger total_training_steps train_dataset train_dataloader"
    " agent_loop_manager steps_per_epoch",
    BUFFER[:-1]: "partitions finished_keys pending_keys running_keys prompt_global_steps",
    LOOPS + "AgentLoopBase": "config rollout_config",
    LOOPS + "AgentLoopMetrics": "generate_sequences",
    LOOPS + "AgentLoopOutput": "prompt_ids response_ids response_mask response_logprobs reward_score num_turns metrics"
    " extra_fields",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ": "agent_loop_workers_class agent_loop_workers config"
    " llm_client teacher_client reward_loop_worker_handles",
    "verl.experimental.reward_loop:RewardLoopManager": "reward_loop_workers",
    "verl.trainer.main_ppo:TaskRunnerV1": "config trainer agent_loop_manager init_agent_loop_manager run",
    "verl.trainer.ppo.utils:Role": "Actor ActorRollout ActorRolloutRef RefPolicy Critic RewardModel TeacherModel",
    "transfer_queue:KVBatchMeta": "keys partition_id fields",
}
# The methods of verl's worker groups that compute; the others that its trainer calls do not.
COMPUTING = {
    "actor_rollout_wg": "compute_log_prob update_actor",
    "ref_policy_wg": "compute_ref_log_prob",
    "critic_wg": "infer_batch train_mini_batch",
}
OTHERS = {"init_model", "load_checkpoint", "save_checkpoint", "start_profile", "stop_profile", "reset", "set_loss_fn"}


@pytest.mark.parametrize("symbol", OVERRIDDEN)
def test_verl_still_has_what_we_override(symbol: str) -> None:
    assert str(signature(found(symbol, "seamless-trainer"))) == OVERRIDDEN[symbol]


@pytest.mark.parametrize("symbol", CALLED)
def test_what_we_call_takes_what_it_took(symbol: str) -> None:
    assert parameters(found(symbol, "seamless-trainer")) == CALLED[symbol]


@pytest.mark.parametrize(("owner", "name"), listed(HELD))
def test_its_objects_hold_what_we_read(owner: str, name: str) -> None:
    assert name in attributes(found(owner, "seamless-trainer"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_run_prompt", "self prompt sampling_params trajectory trace"),
        ("_run_agent_loop", "self sampling_params trajectory * agent_name trace **kwargs"),
    ],
)
def test_verls_worker_of_agent_loops_has_what_ours_overrides(name: str, expected: str) -> None:
    worker = plain_class(found("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ", "seamless-loops"))
    assert parameters(getattr(worker, name)) == expected


def test_what_verls_worker_does_for_a_prompt_is_what_ours_does() -> None:
    worker = plain_class(found("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ", "seamless-loops"))
    source = inspect.getsource(worker._run_prompt)
    assert re.findall(r'prompt(?:\.pop\(|\[)"(\w+)"', source) == ["uid", SAMPLES, GREEDY_UNLESS]
    assert set(re.findall(r'"status": "(\w+)"|status = "(\w+)"', source)) == {
        ("running", ""),
        ("failure", ""),
        ("", "failure"),
        ("", "finished"),
    }
    assert set(re.findall(r"await ([\w.]+)\(", source)) == {"tq.async_kv_put", "_settle_session_tasks"}
    assert 'if not trajectory["validate"] and not do_sample:' in source


def test_the_names_of_columns_that_verl_computes_are_reserved() -> None:
    """Those of a row, and those that the trainer puts beside them."""
    output = found(LOOPS + "AgentLoopOutput", "seamless-loops")
    row = inspect.getsource(output.as_dict) + inspect.getsource(
        plain_class(
            found("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ", "seamless-loops")
        )._agent_loop_postprocess
    )
    names = set(re.findall(r'(?:output|field)\["(\w+)"\] = ', row)) | set(output.model_fields)
    trainer = inspect.getsource(inspect.getmodule(found(BASE[:-1], "seamless-trainer")))
    lists = re.findall(r"(?:select_fields=|fields = |fields\.append\()\[?([^\])]*)[\])]", trainer)
    names |= {name for listed in lists for name in re.findall(r'"(\w+)"', listed)}
    of_the_prompt = {"uid", "reward_model", "data_source", "raw_prompt"}
    renamed = {"prompt_ids", "response_ids", "response_logprobs", "reward_score", "multi_modal_data"}
    assert names - of_the_prompt - renamed <= RESERVED_COLUMNS


@pytest.mark.parametrize(
    "name",
    [
        *("RayWorkerGroup", "LLMServerManager", "register_trainer"),
        *("Tracking", "tqdm", "pprint", "compute_advantage_for_multi_trajectories"),
    ],
)
def test_the_names_rebound_during_set_up_and_training_exist(name: str) -> None:
    assert name in vars(inspect.getmodule(found(BASE[:-1], "seamless-trainer")))


def test_with_bypass_mode_old_logprobs_are_a_copy_of_the_engines() -> None:
    source = inspect.getsource(found(BASE + "_compute_old_log_prob", "seamless-trainer"))
    assert 'data["old_log_probs"] = data.pop("rollout_log_probs")' in source


def test_reward_workers_are_called_for_scores_alone() -> None:
    scoring = inspect.getsource(found(LOOPS + "AgentLoopWorker._compute_score", "seamless-loops"))
    assert "await selected_reward_loop_worker_handle.compute_score.remote(data)" in scoring
    module = inspect.getsource(inspect.getmodule(found(LOOPS + "AgentLoopWorker", "seamless-loops")))
    assert module.count("selected_reward_loop_worker_handle") == scoring.count("selected_reward_loop_worker_handle")


def test_what_set_up_calls_on_the_server_manager() -> None:
    source = inspect.getsource(found(BASE[:-1], "seamless-trainer"))
    assert set(re.findall(r"\bLLMServerManager\.(\w+)\(", source)) == {"create", "create_empty"}
    assert set(re.findall(r"llm_server_manager\.(\w+)", source)) == {"get_replicas", "get_client"}
    assert '"_enable_hybrid_replicas"' in source


def test_each_step_is_logged_once_and_nothing_else_is_printed_that_the_file_has() -> None:
    source = inspect.getsource(found(BASE + "fit", "seamless-trainer"))
    logged = re.findall(r"self\.logger\.log\(data=(\w+), step=self\.global_steps\)", source)
    assert logged == ["val_metrics", "metrics"]
    assert set(re.findall(r'pprint\(f"(\w+ validation metrics)', source)) == {
        "Initial validation metrics",
        "Final validation metrics",
    }


def test_the_trainer_calls_no_other_computation() -> None:
    source = inspect.getsource(found(BASE[:-1], "seamless-trainer"))
    asked = set(re.findall(r"self\.(actor_rollout_wg|ref_policy_wg|critic_wg)\.(\w+)\(", source))
    assert {call for call in asked if call[1] not in OTHERS} == set(listed(COMPUTING))


def test_the_steps_of_a_run_are_those_that_our_task_runner_repeats() -> None:
    run = plain_class(found("verl.trainer.main_ppo:TaskRunnerV1", "seamless-trainer")).run
    steps = re.findall(r"[\w.]+\([^()]*\)$", textwrap.dedent(inspect.getsource(run)), re.MULTILINE)
    assert steps == [
        "configure_verl_logging()",
        "get_trainer_cls(config.trainer.v1.trainer_mode)",
        "OmegaConf.resolve(config)",
        "tq.init(config.transfer_queue)",
        "trainer_cls(config=config)",
        "self.trainer.init()",
        "self.init_agent_loop_manager()",
        "self.trainer.fit(self.agent_loop_manager)",
        'getattr(self.trainer, "logger", None)',
        "tracking.finish(exit_code=0 if succeeded else 1)",
        "tq.close()",
    ]


@pytest.mark.parametrize("name", ['"latest_checkpointed_iteration.txt"', 'f"global_step_', '"data.pt"'])
def test_a_checkpoint_is_written_under_the_names_that_we_look_for(name: str) -> None:
    assert name in inspect.getsource(found(BASE + "_save_checkpoint", "partial-checkpoints"))


@pytest.mark.parametrize("name", ["_TQ_CONTROLLER", "_TQ_STORAGE"])
def test_the_queue_keeps_its_actors_where_their_deaths_are_looked_for(name: str) -> None:
    assert name in vars(found("transfer_queue:interface", "seamless-trainer"))


@pytest.mark.parametrize(
    ("word", "in_v0"),
    [
        *(("trainer.balance_batch", True), ("esi_redundant_time", True), ("on_batch_end", True)),
        *(("reward_baselines", True), ("sum_pi_squared", True), ("gdpo", True)),
        *(("data.sampler", False), ("data.truncation", False)),
    ],
)
def test_verls_v1_trainers_do_not_read_what_the_checks_call_unread(word: str, in_v0: bool) -> None:
    """`checks/unused.py` has the settings, and `checks/corrections.py` the estimators that need the others."""
    base = found("verl.trainer.ppo.v1.trainer_base:PPOTrainer", "seamless-trainer")
    folder = Path(inspect.getfile(base)).parent
    v1 = [*folder.glob("*.py"), folder.parents[1] / "main_ppo.py"]
    assert not any(word in file.read_text(encoding="utf-8") for file in v1)
    assert (word in (folder.parent / "ray_trainer.py").read_text(encoding="utf-8")) is in_v0


def test_an_advantage_is_computed_of_these_columns() -> None:
    """So GDPO, which reads `prompts`, `attention_mask` and the parts of a reward, cannot be."""
    source = inspect.getsource(
        found("verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage", "seamless-trainer")
    )
    (fields,) = re.findall(r"fields = (\[\"uid\".*\])", source)
    assert set(re.findall(r"\w+", fields)) == {
        *("uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
    }


def test_the_kl_estimators_that_the_checks_accept_are_those_that_verl_computes() -> None:
    for name in KL_ESTIMATORS:
        for word in (name, f"{name}+"):
            assert kl_penalty(torch.zeros(1), torch.zeros(1), word) == 0
    with pytest.raises(NotImplementedError):
        kl_penalty(torch.zeros(1), torch.zeros(1), "nosuch")
