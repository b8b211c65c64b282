"""Runs of `megatron_process` in several layouts, and what transformers says of the same sequences."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import torch

from support.forkserver import launch

MODULE = "support.megatron_process"


def sequences() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(n)] for n in (5, 17, 40, 3, 90, 33, 64, 12)]


def run(
    environ: dict[str, str], folder: Path, model: Path, *, world: int = 1, module: str = MODULE, **more: Any
) -> list[dict[str, Any]]:
    """What each rank of `module` has written; `more` is the rest of the case."""
    case = {"model": str(model), "out": str(folder), "world": world, "sequences": sequences(), **more}
    (folder / "case.json").write_text(json.dumps(case))
    command = ["-c", f"from {module} import main; main()", str(folder / "case.json")]
    ranks = [launch(environ, *command, str(r), stderr=subprocess.STDOUT) for r in range(world)]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)[-4000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world)]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def reference(model: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """transformers' model in fp32, of weights that were rounded to `dtype`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").float()


@torch.no_grad()
def logprobs_of(model: Any) -> list[torch.Tensor]:
    """Of `sequences()` by transformers' model; entry t is the logprob of token t + 1."""
    rows = []
    for ids in (torch.tensor(s) for s in sequences()):
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        rows.append(logits.gather(1, ids[1:, None])[:, 0])
    return rows


def measured_logprobs(results: list[dict[str, Any]], step: int) -> list[torch.Tensor]:
    """Gather the ranks' log-probabilities in the order of `sequences()`; data ranks took every dp-th."""
    owners = [r["logprobs"][step] for r in results if r["logprobs"]]
    return [owners[i % len(owners)][i // len(owners)][:-1] for i in range(len(sequences()))]


def losses(results: list[dict[str, Any]]) -> torch.Tensor:
    """The loss of each update: the mean over data-parallel ranks."""
    return torch.tensor([r["losses"] for r in results if r["losses"]]).mean(0)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of the probabilities of two models, given the logprobs of the same tokens."""
    return float(torch.corrcoef(torch.stack([one.exp(), other.exp()]))[0, 1])
