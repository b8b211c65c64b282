"""What we rely on in host libraries, pinned: an upgrade fails here, by the name of what moved."""

from __future__ import annotations

import importlib
import inspect
from multiprocessing import spawn
from typing import Any

import pytest

from seamless_verl.platform.adaptation import Adaptation
from seamless_verl.platform.megatron.adapt import ADAPTATIONS as MEGATRON
from seamless_verl.platform.process_group import DEFAULT_BACKEND
from seamless_verl.platform.vllm.adaptations import ADAPTATIONS as VLLM
from seamless_verl.platform.zygote.command import ADAPTATIONS as ZYGOTE
from seamless_verl.trainer.host import plain_class

BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer."
BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync."
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer."
# Methods of verl that our subclasses override, and calls they make, with the signatures they were written for.
OVERRIDDEN = {
    BASE + "__init__": "(self, config: omegaconf.dictconfig.DictConfig)",
    BASE + "_build_replay_buffer": "(self) -> verl.trainer.ppo.v1.replay_buffer.ReplayBuffer",
    BASE + "_init_resource_pool_mgr": "(self)",
    BASE + "_setup": "(self)",
    BASE + "get_llm_client": "(self) -> verl.workers.rollout.llm_server.LLMServerClient",
    BASE + "_rollout_server_managers": "(self) -> list",
    BASE + "_get_n_gpus_for_throughput": "(self) -> int",
    BASE + "_add_async_warmup_batches": "(self, num_warmup_batches: int | float) -> None",
    BASE + "_compute_old_log_prob": "(self, batch: transfer_queue.metadata.KVBatchMeta, metrics: dict)"
    " -> transfer_queue.metadata.KVBatchMeta",
    BASE + "_validate": "(self) -> dict[str, float]",
    BASE + "_load_checkpoint": "(self)",
    BASE + "_save_checkpoint": "(self)",
    BASE + "prepare_step": "(self) -> dict",
    BASE + "on_init_end": "(self)",
    BASE + "on_train_begin": "(self)",
    BASE + "on_sample_end": "(self)",
    BASE + "on_step_end": "(self)",
    BUFFER + "_has_enough_samples": "(self, global_steps: int, partition_id: str, batch_size: int,"
    " sampleable_keys: set[str]) -> bool",
    BUFFER + "_stale_terminal_keys": "(self, global_steps: int, partition_id: str) -> set[str]",
    SERVER + "abort_all_requests": "(self, reset_prefix_cache: bool = True, reject_request: bool = False)"
    " -> dict[str, typing.Any]",
    SERVER + "resume_engine_generation": "(self)",
    SERVER + "set_global_steps": "(self, global_steps: int)",
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase.run": "(self, sampling_params: dict[str, typing.Any],"
    " **kwargs) -> verl.experimental.agent_loop.agent_loop.AgentLoopOutput",
    "verl.trainer.main_ppo:run_ppo": "(config, task_runner_class) -> None",
    "verl.trainer.ppo.v1.trainer_base:register_trainer": "(name: str)",
    "verl.workers.rollout.llm_server:LLMServerManager.get_client": "(self, client_cls: "
    "type[verl.workers.rollout.llm_server.LLMServerClient] | None = None, **kwargs)"
    " -> verl.workers.rollout.llm_server.LLMServerClient",
    "verl.checkpoint_engine.base:CheckpointEngineManager.update_weights": "(self, global_steps: int = None)",
    "verl.checkpoint_engine.base:CheckpointEngine.build_topology": "(actor_wg_world_size: int, rollout_world_size: int,"
    " metadata: list[dict]) -> tuple[dict[str, list[typing.Any]], dict[str, list[typing.Any]]]",
    "verl.workers.engine_workers:TrainingWorker.__init__": "(self, config:"
    " verl.workers.config.engine.TrainingWorkerConfig)",
}


@pytest.mark.parametrize("symbol", OVERRIDDEN)
def test_verl_still_has_what_we_override(symbol: str) -> None:
    found: Any = Adaptation("seamless-trainer", symbol, "verl 0.9.1", "overridden").verify()
    assert str(inspect.signature(inspect.unwrap(found))) == OVERRIDDEN[symbol]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_run_prompt", ["self", "prompt", "sampling_params", "trajectory", "trace"]),
        ("_run_agent_loop", ["self", "sampling_params", "trajectory", "agent_name", "trace", "kwargs"]),
        ("_agent_loop_postprocess", ["self", "output", "validate", "kwargs"]),
    ],
)
def test_verls_worker_of_agent_loops_has_what_ours_overrides(name: str, parameters: list[str]) -> None:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    found = inspect.signature(getattr(plain_class(AgentLoopWorkerTQ), name)).parameters
    assert [one for one in found if one != "_ray_trace_ctx"] == parameters


@pytest.mark.parametrize("name", ["RayWorkerGroup", "LLMServerManager", "register_trainer"])
def test_the_names_rebound_while_verl_sets_up_are_there(name: str) -> None:
    assert name in vars(importlib.import_module("verl.trainer.ppo.v1.trainer_base"))


@pytest.mark.parametrize(
    "adaptation",
    [*MEGATRON, *VLLM, DEFAULT_BACKEND, *ZYGOTE],
    ids=lambda a: f"{a.name}-{a.symbol.split(':')[1]}",
)
def test_every_adapted_symbol_is_where_it_was(adaptation: Adaptation) -> None:
    adaptation.verify()
    assert adaptation.written_for and adaptation.reason


def test_multiprocessing_spawns_by_a_command_of_the_form_that_forks_of_the_zygote_run() -> None:
    executable, *options, flag, code, last = spawn.get_command_line(tracker_fd=3, pipe_handle=4)
    assert executable == spawn.get_executable() and flag == "-c" and last == "--multiprocessing-fork"
    assert all(option.startswith("-") for option in options)
    assert code == "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=3, pipe_handle=4)"


def test_the_platform_answers_all_that_verl_asks_of_one() -> None:
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    platform = PlatformRegistry.get("cpu")
    assert platform is not None and not getattr(platform, "__abstractmethods__", None)
    asked = {n for n, v in vars(PlatformBase).items() if getattr(v, "__isabstractmethod__", False)}
    assert asked <= set(vars(platform))
    assert PlatformRegistry.registered_names()[-1] == "cpu"  # probed last: never beside an accelerator
