"""How a run that ended early goes on: what is said of it, by its checkpoints and its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from seamless_verl.run_folder import register_resume
from seamless_verl.runtime.console import RUN_FILE, ResumeSettings


def settings(folder: Path, mode: str = "auto", path: str | None = None, save_freq: int = 10) -> ResumeSettings:
    return ResumeSettings(str(folder), mode, path, save_freq)


def test_the_same_command_resumes_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40\n")
    assert settings(tmp_path).hint() == (
        f"The same command resumes from step 40, whose checkpoint is {tmp_path / 'global_step_40'}"
    )
    assert (
        settings(tmp_path, "disable")
        .hint()
        .endswith(f"With trainer.resume_mode=auto it resumes from step 40, in {tmp_path / 'global_step_40'}")
    )
    assert settings(tmp_path, "resume_path", "/a/global_step_3").hint().endswith("resume_from_path=/a/global_step_3")


@pytest.mark.parametrize("tracker", [None, ""])
def test_without_a_checkpoint_it_begins_anew_and_saving_is_named_where_it_is_off(
    tmp_path: Path, tracker: str | None
) -> None:
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    assert settings(tmp_path).hint() == f"There is no checkpoint in {tmp_path}: the same command begins anew"
    assert "trainer.save_freq=N" in settings(tmp_path, save_freq=-1).hint()


def test_a_run_keeps_how_it_resumes_for_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = tmp_path / "run.json"
    assert ResumeSettings.of_run(run_file) is None
    monkeypatch.setenv(RUN_FILE, str(run_file))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    trainer = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_from_path": None, "save_freq": 5}
    register_resume(OmegaConf.create({"trainer": trainer}))
    assert ResumeSettings.of_run(run_file) == settings(tmp_path, save_freq=5)
