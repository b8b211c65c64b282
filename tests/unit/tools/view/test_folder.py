"""Which files are a run's, and which folders are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import RunDescription
from seamless_verl.runtime.locks import only_writer
from seamless_verl.tools.view.folder import RunFiles, find_run, folders_in

RUN = RunDescription("p/e", 1.0, "colocated")


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        find_run(path)
    assert caught.value.key == "FOLDER" and caught.value.value == str(path)
    assert "trainer.default_local_dir" in caught.value.way_out or "Give one of them" in caught.value.way_out
    return str(caught.value)


def test_a_run_is_found_in_its_folder_and_above_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "recipe" / "checkpoints" / "seamless"
    RUN.write(run)
    for folder in (run, run.parent, tmp_path):
        assert find_run(folder) == run


@pytest.mark.parametrize(
    "name", ["trajectories.sqlite", "trajectories-1.sqlite", "devices.trace.json", "metrics.jsonl"]
)
def test_each_file_of_a_run_is_enough(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert find_run(tmp_path) == tmp_path


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path / "nowhere")
    assert "it has no run" in refused(tmp_path)
    (tmp_path / "file").touch()
    assert "it is a file" in refused(tmp_path / "file")


def test_of_several_runs_the_user_chooses(tmp_path: Path) -> None:
    for name in "abcdefg":
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    message = refused(tmp_path)
    assert "it has 7 runs" in message and f"{tmp_path / 'a'}, " in message and "and 2 more" in message


def test_the_last_start_has_the_trace(tmp_path: Path) -> None:
    assert RunFiles.of(tmp_path).trace is None
    for name in ("devices", "devices-2", "devices-10"):
        (tmp_path / f"{name}.trace.json").touch()
    trace = RunFiles.of(tmp_path).trace
    assert trace is not None and trace.name == "devices-10.trace.json"


def test_journals_are_those_that_the_run_names_or_those_in_a_folder_that_was_moved(tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "fast" / "journal.sqlite", tmp_path / "run"
    elsewhere.parent.mkdir()
    elsewhere.write_text("x")
    replace(RUN, journals=(str(elsewhere),)).write(run)
    (run / "trajectories.sqlite").write_text("x")
    (run / "trajectories-1.sqlite").touch()
    assert RunFiles.of(run).journals == (elsewhere,)
    elsewhere.unlink()
    assert RunFiles.of(run).journals == (run / "trajectories.sqlite",)


def test_a_copy_of_a_run_has_the_journal_that_was_copied(tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    for folder in (first, copy):
        replace(RUN, journals=(str(first / "trajectories.sqlite"),)).write(folder)
        (folder / "trajectories.sqlite").write_text("x")
    assert RunFiles.of(copy).journals == (copy / "trajectories.sqlite",)
    assert RunFiles.of(first).journals == (first / "trajectories.sqlite",)


def test_folders_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    assert folders_in(tmp_path / "gone") == []
    (tmp_path / "link").symlink_to("/")
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    assert folders_in(tmp_path) == [tmp_path / "a"]
    assert "it has no run" in refused(Path("/proc/self"))


def test_it_runs_while_it_holds_its_lock_by_whatever_name_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run := tmp_path / "run").mkdir()
    (link := tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    for name in (run, Path(), Path("../run"), link):
        assert RunFiles.of(name).running is False
        with only_writer(run):
            assert RunFiles.of(name).running is True
        assert RunFiles.of(name).running is False
