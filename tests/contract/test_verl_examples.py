"""Command lines as verl's example scripts have them, as `check --platform accelerator` sees them without a GPU.

Each passes, or is refused with all its mistakes at once. COMMANDS are of our own writing, one for each kind of script.
`verl_examples.json` says what is refused first of each script of verl's `examples/`, at commit 1dda039 of 2026-08-22,
and what of it matters; with SEAMLESS_VERL_EXAMPLES=<a checkout of verl> all of them are checked and compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mistakes import mistakes_of
from support.verl_scripts import facts_of, scripts_of

from seamless_verl.config.verl_keys import DEFAULT_ENGINE, engine_keys, engines

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:provider=hydra.searchpath")]
TABLE = json.loads((Path(__file__).parents[1] / "support/verl_examples.json").read_text(encoding="utf-8"))
CHECKOUT = "SEAMLESS_VERL_EXAMPLES"
SCRIPTS = scripts_of(Path(os.environ[CHECKOUT])) if CHECKOUT in os.environ else {}
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
GONE = "A new key is added as +"
# The way out of each key, wherever it is refused.
WAYS_OUT = {
    "model_engine": "Add model_engine=dp",
    f"{ROLLOUT}.name": f"Set {ROLLOUT}.name=vllm",
    f"{ROLLOUT}.engine_kwargs.sglang.attention_backend": f"added as +{ROLLOUT}.engine_kwargs.sglang.attention_backend=",
    f"{ROLLOUT}.multi_turn.tool_config_path": "Set",
    f"{ACTOR}.fsdp_config.model_dtype": f"Write {ACTOR}.fsdp_config.model_dtype=bfloat16",
    f"{ACTOR}.megatron.grad_offload": f"with {ACTOR}.megatron.param_offload",
    f"{ACTOR}.veomni.router_replay": "mode=disabled",
    f"{MODEL}.path": f"Set {MODEL}.path to a model folder or a hub id",
    f"{ACTOR}.model_engine": GONE,
    f"{ACTOR}.policy_loss": f"Set {ACTOR}.tau_",
    "reward.reward_model.enable_resource_pool": "reward.reward_model.nnodes",
    f"{ACTOR}.megatron.expert_model_parallel_size": "Lower it, or make trainer.nnodes x trainer.n_gpus_per_node a",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": f"Set {ACTOR}.ppo_micro_batch_size_per_gpu to a divisor of",
    f"{MODEL}.lora.merge": "merge=True",
    f"{MODEL}.lora_rank": f"Set {MODEL}.lora_rank=N",
    "actor_rollout_ref.hybrid_engine": f"{ROLLOUT}.nnodes=1",
    "reward.custom_reward_function.path": "Set reward.custom_reward_function.path to a .py file",
    "data.train_batch_size": "Set data.train_batch_size=1 or more",
    **{f"algorithm.rollout_correction.{name}": "bypass_mode=False, or " for name in ("rollout_is", "rollout_rs")},
    "algorithm.rollout_correction.loss_type": "Remove it, or ",
    "actor": "actor",  # the nearest of verl's, or all: it is of a package that adds an engine
    "--config-name": "Leave --config-name and --config-path out",
    "async_training": "The seamless trainer has ",
    "rollout": "The seamless trainer has ",
    f"{ACTOR}.engine": GONE,
}
DATA = ["data.train_files=/data/gsm8k/train.parquet", "data.val_files=/data/gsm8k/test.parquet"]
SIZES = ["data.train_batch_size=256", "data.max_prompt_length=512", "data.max_response_length=1024"]
BATCHES = [f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"]
LOGPROBS = [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8", f"{REF}.log_prob_micro_batch_size_per_gpu=8"]
RUN = ["trainer.n_gpus_per_node=8", "trainer.nnodes=1", 'trainer.logger=["console"]', "trainer.total_epochs=3"]
ONE_OF_8 = [f"{MODEL}.path=Qwen/Qwen3-8B", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"]
GRPO = [*DATA, *SIZES, *BATCHES, *LOGPROBS, *RUN, *ONE_OF_8, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=5"]
GRPO += [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.001", f"{ACTOR}.kl_loss_type=low_var_kl"]
FSDP = [f"{ACTOR}.fsdp_config.param_offload=False", f"{ACTOR}.fsdp_config.optimizer_offload=False"]
FSDP += [f"{REF}.fsdp_config.param_offload=True"]
MEGATRON = [f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron.pipeline_model_parallel_size=2"]
ROPE = f"+{ACTOR}.megatron.override_transformer_config.apply_rope_fusion=True"
CRITIC = ["critic.model.path=Qwen/Qwen3-8B", "critic.ppo_micro_batch_size_per_gpu=8", "critic.optim.lr=1e-5"]
DAPO = [f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.loss_agg_mode=token-mean"]
TURNS = [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.max_assistant_turns=5"]
# A command, and the keys that are refused of it.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "GRPO, Megatron": ([*GRPO, *MEGATRON], []),
    "GRPO, Megatron, a fusion that only our CPU platform sets": ([*GRPO, *MEGATRON, ROPE], []),
    "GRPO, a key that 0.9.1 has lost": (
        [*GRPO, *MEGATRON, f"{ACTOR}.megatron.grad_offload=True"],
        [f"{ACTOR}.megatron.grad_offload"],
    ),
    "GRPO, FSDP, which is verl's default engine": ([*GRPO, *FSDP], ["model_engine"]),
    "GRPO, FSDP, with its way out": ([*GRPO, *FSDP, "model_engine=dp"], []),
    "PPO with a critic, Megatron": (
        [*DATA, *SIZES, *BATCHES, *LOGPROBS, *RUN, *ONE_OF_8, *MEGATRON, *CRITIC, "algorithm.adv_estimator=gae"],
        [],
    ),
    "like DAPO, Megatron": ([*GRPO, *MEGATRON, *DAPO], []),
    "several turns with a tool file that is not here, in SGLang, with FSDP": (
        [*GRPO, *FSDP, *TURNS, f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.multi_turn.tool_config_path=/tools/none.yaml"],
        ["model_engine"],  # what hydra stops at
    ),
    "several turns, Megatron": ([*GRPO, *MEGATRON, *TURNS, f"{ROLLOUT}.multi_turn.format=hermes"], []),
    "verl's fully asynchronous trainer": (
        [
            "--config-name=fully_async_ppo_megatron_trainer.yaml",
            *GRPO,
            *MEGATRON,
            "async_training.staleness_threshold=1",
        ],
        ["--config-name"],
    ),
    "experts that do not fit the devices": (
        [*GRPO, f"{ACTOR}.megatron.expert_model_parallel_size=32"],
        [f"{ACTOR}.megatron.expert_model_parallel_size"],
    ),
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # the commands name models of the hub, and none is read
    monkeypatch.setenv("SEAMLESS_PLATFORM", "accelerator")
    monkeypatch.chdir(tmp_path)


def check_refusals(arguments: list[str], refused: list[str]) -> None:
    mistakes = mistakes_of(arguments)
    assert sorted(mistake.key for mistake in mistakes) == sorted(refused), [str(mistake) for mistake in mistakes]
    for mistake in mistakes:
        nodes = [mistake.key.rsplit(".", cut)[0] for cut in range(3)]
        way_out = next(WAYS_OUT[node] for node in nodes if node in WAYS_OUT)
        assert way_out in mistake.way_out
        assert mistake.value is not None and f"{mistake.key}={mistake.value!r}: " in str(mistake)


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_passes_or_has_all_its_refusals(kind: str) -> None:
    check_refusals(*COMMANDS[kind])


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_of_scripts_has_the_facts_of_a_checkout(script: str) -> None:
    assert TABLE[script]["overrides"] == facts_of(SCRIPTS[script])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_checkout_passes_or_has_all_its_refusals(script: str) -> None:
    check_refusals(SCRIPTS[script], TABLE[script]["first"])


def test_the_commands_refuse_the_same(tmp_path: Path) -> None:
    """`check` and the run itself, as processes, and what the table's test finds without one."""
    arguments, _ = COMMANDS["experts that do not fit the devices"]
    environment = {key: value for key, value in os.environ.items() if key != "SEAMLESS_PLATFORM"}

    def refused(*command: str) -> list[str]:
        argv = [sys.executable, "-m", *command, *arguments]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        return [line for line in done.stderr.splitlines() if line]

    texts = [str(mistake) for mistake in mistakes_of(arguments)]
    assert refused("seamless_verl.check", "--platform", "accelerator") == texts
    environment["SEAMLESS_PLATFORM"] = "accelerator"
    run = refused("seamless_verl.main_ppo")
    assert [line for line in run if not line.startswith("trainer.device=")] == texts and len(run) == len(texts) + 1
    assert list(tmp_path.iterdir()) == []  # no run folder is left


def test_what_verl_keeps_of_its_engines() -> None:
    """The engines, and a key of each that the others lack."""
    assert engines() == (DEFAULT_ENGINE, "megatron", "torchtitan", "veomni")
    for engine, key in {"dp": f"{ACTOR}.fsdp_config", "megatron": f"{ACTOR}.megatron"}.items():
        assert [name for name in engines() if key in engine_keys(name)] == [engine]


def test_scripts_are_read_by_running_them_with_stubs(tmp_path: Path) -> None:
    folder = tmp_path / "verl" / "examples"
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text(
        "set -eu\nNODES=${NODES:-2}\npython3 -c 'import torch_npu' && exit 1\n"
        "uv run python3 -m verl.trainer.main_ppo trainer.nnodes=$NODES trainer.project_name=x '+a.b=c d' \"$@\"\n"
    )
    (folder / "other.sh").write_text("echo nothing of verl\n")
    assert scripts_of(tmp_path / "verl") == {"run.sh": ["trainer.nnodes=2", "+a.b=c d"]}
