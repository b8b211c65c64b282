"""A resumed run draws the same subset of its data as the first start, in the same order, without `data.seed`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import save
from support.config import ROW, compose_verl, write_rows

pytestmark = pytest.mark.integration


def trainer_of(tmp_path: Path, nano: Path, *settings: str) -> Any:
    """verl's data loaders as our trainer makes them, of twelve prompts of a hundred."""
    from transformers import AutoTokenizer

    from seamless_verl.trainer.prompt_names import PromptNames
    from seamless_verl.trainer.trainer import SeamlessTrainer

    files = {name: write_rows(tmp_path / f"{name}.parquet", ROW, 100) for name in ("train", "val")}
    trainer = SeamlessTrainer.__new__(SeamlessTrainer)
    trainer.config = compose_verl(
        *(f"data.{name}_files={file}" for name, file in files.items()),
        *("data.train_max_samples=12", "data.val_max_samples=5", "data.train_batch_size=4", "data.seed=null"),
        *("data.dataloader_num_workers=0", f"trainer.default_local_dir={tmp_path}", *settings),
    )
    trainer.tokenizer, trainer.processor = AutoTokenizer.from_pretrained(nano / "model"), None
    trainer.trainer_mode, trainer.parameter_sync_step, trainer.names = "seamless", 1, PromptNames()
    trainer.seamless = SimpleNamespace(gateway=SimpleNamespace(enabled=True))
    trainer._init_dataloader()
    return trainer


def drawn(trainer: Any) -> list[list[int]]:
    """The places in the files of the rows of both sets, and the order in which the first epoch takes those of one."""
    sets = [
        [int(i) for i in data.dataframe._indices.column(0)] for data in (trainer.train_dataset, trainer.val_dataset)
    ]
    return [*sets, list(trainer.train_dataloader.sampler)]


def test_a_resumed_run_has_the_subset_of_its_first_start(nano: Path, tmp_path: Path) -> None:
    from seamless_verl.trainer.checkpoints import PROMPTS, save_state

    first = trainer_of(tmp_path, nano)
    expected = drawn(first)
    assert drawn(trainer_of(tmp_path, nano)) != expected, "a run that is not resumed draws its own"
    save(tmp_path, 3)
    save_state(tmp_path / "global_step_3", {PROMPTS: first.names})
    place = f"trainer.resume_from_path={tmp_path}/global_step_3"
    for settings in (["trainer.resume_mode=auto"], ["trainer.resume_mode=resume_path", place]):
        resumed = trainer_of(tmp_path, nano, *settings)
        assert drawn(resumed) == expected and resumed.names.run == first.names.run
    assert drawn(trainer_of(tmp_path, nano, "trainer.resume_mode=disable")) != expected
    given = trainer_of(tmp_path, nano, "data.seed=7")
    assert given.config.data.seed == given.names.seed == 7 and drawn(given) != expected
