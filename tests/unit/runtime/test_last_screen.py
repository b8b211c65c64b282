"""What the last screen of a run says, for what its processes kept: the cause, the way out, how to go on."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from seamless_verl.errors import ActorLostError, CheckpointError, NoProgressError
from seamless_verl.runtime.console import (
    LINES,
    RUN_FILE,
    UNKNOWN,
    ResumeSettings,
    describe,
    driver_killed,
    keep_cause,
    last_screen,
    stopped_by,
)


def through_actors(error: Exception, times: int) -> BaseException:
    """As the driver gets it, when that many actors raised it, one after the other."""
    for number in range(times):
        text = f'Traceback:\n  File "/lib/actor.py", line {times - number}, in method{times - number}\n{error!r}'
        error = RayTaskError(f"method{number}", text, error).as_instanceof_cause()
    return error


@pytest.mark.parametrize("times", [0, 1, 2])
def test_an_error_of_ours_is_complete_wherever_it_was_raised(times: int) -> None:
    error = CheckpointError(3, "/runs/a", "No space left on device")
    assert describe(through_actors(error, times)) == (
        "the checkpoint of step 3 could not be saved in /runs/a: No space left on device. Repair that, or set "
        "trainer.default_local_dir to a folder on another disk. trainer.max_actor_ckpt_to_keep=1 keeps one only"
    )


def test_an_error_of_others_is_named_with_the_place_where_it_was_raised_first() -> None:
    text = describe(through_actors(ValueError("no estimator\nof this name"), 2))
    assert text == "ValueError: no estimator of this name\nIt was raised in /lib/actor.py, line 2, in method2"
    with pytest.raises(KeyError) as raised:
        {}["here"]
    assert describe(raised.value).startswith(f"KeyError: 'here'\nIt was raised in {__file__}, line ")
    assert describe(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM])
def test_an_error_of_a_disk_names_the_file_and_a_way_out(code: int) -> None:
    text = describe(OSError(code, os.strerror(code), "/runs/a/metrics.jsonl"))
    assert os.strerror(code) in text and "'/runs/a/metrics.jsonl'. " in text and "name " in text


def test_the_first_cause_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = tmp_path / "run.json"
    keep_cause("nothing, without a supervisor")
    monkeypatch.setenv(RUN_FILE, str(run_file))
    keep_cause(ActorLostError("reward worker 0", "its process ended"))
    keep_cause("what failed of it")
    keep_cause(stopped_by(signal.SIGTERM), run_file)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    ResumeSettings(str(tmp_path), "auto", None, 10).keep(run_file)
    assert last_screen(run_file) == [
        "The run ended early: reward worker 0 died: its process ended",
        f"The same command resumes from step 40, whose checkpoint is {tmp_path / 'global_step_40'}",
    ]


def test_what_the_supervisor_knows_by_itself(tmp_path: Path) -> None:
    run_file = tmp_path / "run.json"
    assert last_screen(run_file) == [f"The run ended early: {UNKNOWN}"]
    keep_cause(driver_killed(signal.SIGKILL), run_file)
    (line,) = last_screen(run_file)
    assert "was ended by SIGKILL, by somebody, or by the kernel when memory was short" in line
    assert driver_killed(signal.SIGSEGV).endswith("SIGSEGV")


def test_a_long_cause_leaves_room_for_the_rest(tmp_path: Path) -> None:
    run_file = tmp_path / "run.json"
    keep_cause(NoProgressError("\n".join(f"line {number}" for number in range(50)), 60), run_file)
    lines = last_screen(run_file)
    assert len(lines) == LINES and lines[0].endswith("line 0") and lines[-1] == "..."


def test_a_folder_that_cannot_be_read_hides_nothing_but_the_step(tmp_path: Path) -> None:
    run_file, folder = tmp_path / "run.json", tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").mkdir()  # as a disk that fails: reading is an error
    ResumeSettings(str(folder), "auto", None, 10).keep(run_file)
    *_, line = last_screen(run_file)
    assert line.startswith("The same command resumes from the last complete checkpoint. Which one it is cannot be read")
