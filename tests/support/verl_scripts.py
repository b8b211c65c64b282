"""What verl's example scripts give to hydra, read from a checkout of verl without starting anything.

A script runs in an empty environment whose PATH has a few harmless tools and, in place of Python and uv, a stub that
records its arguments: nothing is trained, installed or fetched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

TOOLS = ("awk", "basename", "bash", "cat", "cut", "dirname", "env", "expr", "grep", "mkdir", "sed", "seq", "tr")
STUBS = ("python", "python3", "uv", "ray", "hf", "hostname", "date", "nvidia-smi", "pip", "pip3", "sleep")
STUB = """#!{bash}
all=("$@")
for ((i = 0; i < $#; i++)); do
  if [ "${{all[i]}}" = -m ]; then printf '%s\\0' "${{all[@]:i + 1}}" >>"$RECORD"; printf '\\0' >>"$RECORD"; exit 0; fi
done
exit {code}
"""
MAINS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.experimental.fully_async_policy.fully_async_main")
NAMES = ("trainer.project_name=", "trainer.experiment_name=")
HOME = "/home/user"  # the data of most scripts are below it
GIVEN = {  # what some scripts ask their user for
    "HDFS_ROOT": "/data",
    "DATA_ROOT": "/data",
    "RAY_DATA_HOME": "/data",
    "LORA_ADAPTER_PATH": "/data/adapter",
    "KIMI_K2_6_MODEL_PATH": "/data/models/kimi",
    "BASH_FUNC_ulimit%%": "() { :; }",  # more than this machine may allow
}
ASKED = {"grpo_trainer/run_qwen3_vl_30b_a3b_fsdp.sh": {"INFER_BACKEND": "vllm"}}  # others have a choice of their own
ANSWER_NO = ("python", "python3")  # `python3 -c "import torch_npu"`: there is none


def scripts_of(root: Path) -> dict[str, list[str]]:
    """The arguments of each script under `root`/examples that starts a trainer of verl's, by its path there."""
    scripts = {
        str(file.relative_to(root / "examples")): file
        for file in sorted((root / "examples").rglob("*.sh"))
        if any(name in file.read_text(encoding="utf-8") for name in MAINS)
    }
    return {name: arguments_of(file, root, ASKED.get(name, {})) for name, file in scripts.items()}


def arguments_of(script: Path, root: Path, asked: dict[str, str]) -> list[str]:
    """What one script gives to verl's main: the last call, where it makes several."""
    with TemporaryDirectory() as folder:
        tools, record = Path(folder, "bin"), Path(folder, "record")
        tools.mkdir()
        bash = shutil.which("bash")
        for tool in TOOLS:
            (tools / tool).symlink_to(shutil.which(tool) or tool)
        for stub in STUBS:
            (tools / stub).write_text(STUB.format(bash=bash, code=int(stub in ANSWER_NO)))
            (tools / stub).chmod(0o755)
        environment = {"HOME": HOME, "PATH": str(tools), "RECORD": str(record), "PWD": str(root), **GIVEN, **asked}
        subprocess.run([str(bash), script], cwd=root, env=environment, capture_output=True, timeout=60, check=False)
        calls = record.read_text(encoding="utf-8").split("\0\0") if record.exists() else []
    taken = [call.split("\0") for call in calls if call.split("\0")[0] in MAINS]
    return [text for text in taken[-1][1:] if not text.startswith(NAMES)] if taken else []


MATTERS = re.compile(
    r"[+~]*(model_engine|actor_rollout_ref\.hybrid_engine|algorithm\.(adv_estimator|use_kl_in_reward|rollout_correction)"
    r"|reward\.reward_model\.(enable|enable_resource_pool|nnodes|n_gpus_per_node|rollout\.(name|tensor_model_parallel_size))"
    r"|distillation\.(enabled|nnodes|n_gpus_per_node|distillation_loss\.(loss_mode|use_policy_gradient))"
    r"|data\.(train_batch_size|max_prompt_length|max_response_length|truncation|sampler)"
    r"|actor_rollout_ref\.model\.(lora|use_fused_kernels|mtp\.enable\b)"
    r"|trainer\.(nnodes|n_gpus_per_node|use_v1|v1|balance_batch|esi_redundant_time)|skip\.|async_training\.|rollout\."
    r"|\w+\.actor\.(strategy|model_engine|engine\.(tp|pp)|policy_loss|tau_|calculate_sum_pi|use_kl_loss|use_dynamic_bsz"
    r"|ppo_(mini_batch_size|micro_batch_size_per_gpu|max_token_len_per_gpu)|fsdp_config\.model_dtype"
    r"|ulysses_sequence_parallel_size|\w+\.router_replay|megatron\.(grad_offload|vanilla_mbridge|\w+_parallel_size))"
    r"|\w+\.ref\.megatron\.(grad_offload|\w+_parallel_size)"
    r"|\w+\.rollout\.(name|n|max_model_len|\w+_parallel_size|enable_rollout_routing_replay|calculate_log_probs"
    r"|disaggregation|full_determinism|router_config_path|multi_turn\.enable|agent\.default_agent_loop))"
)
"""The keys of which scripts differ in what is refused: of names, paths, rates and logging none."""


QUIET = ("data.truncation=error", "trainer.balance_batch=True", "algorithm.use_kl_in_reward=False", "trainer.nnodes=1")


def facts_of(arguments: Sequence[str]) -> list[str]:
    """The overrides of a script that matter, sorted, `A.` for `actor_rollout_ref.`; of verl's own engine, too."""
    named = any(text.startswith("model_engine=") for text in arguments)
    other = "megatron" if any(text.startswith("--config-name=") and "megatron" in text for text in arguments) else "dp"
    facts = {text for text in arguments if MATTERS.match(text) and text not in QUIET}
    engine = set() if named else {f"model_engine={other}"}
    return [text.replace("actor_rollout_ref.", "A.", 1) for text in sorted(facts | engine)]
