"""seamless-verl doctor of a run: what was recorded is scored again by the checkpoint that generated it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.journal import call_started, session_opened, write

from seamless_verl.cli.main import main
from seamless_verl.journal import CallEnded, ChunkAppended, SqliteJournal
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens

pytestmark = pytest.mark.integration
PROMPT, TOKENS, VERSION = [5, 6, 7], 40, 3


@pytest.fixture(scope="module")
def generated(nano: Path) -> tuple[list[int], Callable[[float], list[float]]]:
    """Ids after the prompt, and their logprobs at a temperature."""
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(0).integers(20, 200, TOKENS).tolist()
    model = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]

    def at(temperature: float) -> list[float]:
        found = (logits / temperature).log_softmax(-1)[torch.arange(TOKENS), torch.tensor(ids)]
        return [float(one) for one in found]

    return ids, at


def run_with(folder: Path, model: Path, ids: list[int], recorded: list[float]) -> Path:
    """A run whose call has half of its tokens of an older version."""
    shutil.copytree(model, folder / f"global_step_{VERSION}" / "actor" / "huggingface")
    journal = SqliteJournal(folder / "trajectories.sqlite")
    half = TOKENS // 2
    older = TokenChunk(tokens(ids[:half]), logprobs([-9.0] * half), VERSION - 1, "r0")
    own = TokenChunk(tokens(ids[half:]), logprobs(recorded[half:]), VERSION, "r0")
    events = (ChunkAppended("c", older), ChunkAppended("c", own), CallEnded("c", Finish.STOP, {"content": "hi"}))
    write(journal, session_opened(), call_started(prompt=PROMPT), *events)
    journal.close()
    return folder


def test_tokens_of_a_checkpoints_version_have_its_logprobs(
    nano: Path,
    tmp_path: Path,
    generated: tuple[list[int], Callable[[float], list[float]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids, at = generated
    assert main(["doctor", str(run_with(tmp_path, nano / "model", ids, at(1.0)))]) == 0
    assert (
        "version 3: 1 calls, 20 tokens: 0.0000 nats on the mean, 0.00 at most; 0 calls above 0.1"
        in capsys.readouterr().out
    )


def test_another_temperature_is_named(
    nano: Path,
    tmp_path: Path,
    generated: tuple[list[int], Callable[[float], list[float]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids, at = generated
    assert main(["doctor", str(run_with(tmp_path, nano / "model", ids, at(0.5)))]) == 1
    assert (
        "session s, call c: " in (out := capsys.readouterr().out)
        and "temperature: its record is that of about 0.5" in out
    )


def test_a_folder_without_the_models_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SqliteJournal(tmp_path / "trajectories.sqlite").close()
    assert main(["doctor", str(tmp_path)]) == 2
    assert "has no global_step_*/actor/huggingface/*.safetensors" in capsys.readouterr().err
