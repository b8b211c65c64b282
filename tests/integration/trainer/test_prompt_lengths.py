"""What verl does with a prompt that is too long, and the warnings about verl's own data sets before training."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.config import ROW, compose_verl, write_rows

from seamless_verl.trainer import prompt_lengths as prompts

pytestmark = pytest.mark.integration
LONG = {**ROW, "prompt": [{"role": "user", "content": "1" * 30}]}


def dataset(file: Path, nano: Path, kind: type | None = None, **settings: Any) -> Any:
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = compose_verl(*(f"data.{name}={value}" for name, value in settings.items())).data
    return (kind or RLHFDataset)(str(file), AutoTokenizer.from_pretrained(nano / "model"), config)


def test_verl_cuts_off_the_beginning_whatever_its_truncation_says() -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase
    from verl.utils.dataset import rl_dataset

    loop = SimpleNamespace(rollout_config=SimpleNamespace(prompt_length=3))
    assert AgentLoopBase._cap_text_prompt_length(loop, [1, 2, 3, 4, 5]) == [3, 4, 5]
    assert inspect.getsource(rl_dataset).count("self.truncation") == 1, "it is read now"


def test_verls_sets_are_scanned(nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    class Own(RLHFDataset):  # type: ignore[misc]
        pass

    short, long = write_rows(tmp_path / "short.parquet"), write_rows(tmp_path / "long.parquet", LONG, 8)
    sets = {
        "data.train_files": dataset(short, nano, max_prompt_length=20),
        "data.val_files": dataset(long, nano, max_prompt_length=20),
        "filtered": dataset(long, nano, max_prompt_length=20, filter_overlong_prompts=True),
        "own": dataset(long, nano, Own, max_prompt_length=20),
    }
    scans = prompts.prompt_scans(sets)
    caplog.clear()
    prompts.warn_of_long_prompts(scans, 20)
    (text,) = caplog.messages
    assert "8 of 8 scanned prompts of data.val_files have more tokens, up to" in text
    longest = int(text.partition("up to ")[2].partition(",")[0])
    assert len(dataset(long, nano, max_prompt_length=longest, filter_overlong_prompts=True)) == 8, "as verl counts"
    assert len(dataset(long, nano, max_prompt_length=longest - 1, filter_overlong_prompts=True)) == 0


def test_a_large_set_is_scanned_evenly(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_SCANNED", 10)
    whole = dataset(write_rows(tmp_path / "rows.parquet", rows=64), nano)
    scanned = list(prompts.prompts_of(whole))
    assert len(scanned) == 10 and scanned[0] == ROW["prompt"]
