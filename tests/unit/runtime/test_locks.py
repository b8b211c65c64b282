"""Which lock a path has: one, by whatever name or link it is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.runtime.locks import is_locked, lock_file, only_writer


def test_a_folder_has_one_lock_by_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "run").mkdir()
    (link := tmp_path / "elsewhere").symlink_to(folder)
    monkeypatch.chdir(folder)
    names = (folder, Path(), Path("..") / "run", link, link / ".." / "run")
    assert {lock_file(name) for name in names} == {tmp_path / "run-lock"}
    for name in names:
        with only_writer(name):
            assert all(map(is_locked, names))
            for other in names:
                with pytest.raises(BlockingIOError), only_writer(other):
                    pass
    assert not any(map(is_locked, names))


def test_what_is_not_there_yet_and_the_root_have_a_lock(tmp_path: Path) -> None:
    assert lock_file(tmp_path / "a" / "b") == tmp_path / "a" / "b-lock"
    (link := tmp_path / "link").symlink_to("to/come")
    with only_writer(link):
        assert is_locked(tmp_path / "to" / "come")
    assert lock_file(Path("/")).name == "-lock"


def test_a_volume_beside_which_nothing_can_be_made_has_its_lock_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    assert lock_file(volume) == volume / ".lock"
    with only_writer(volume):
        assert is_locked(volume)
        with pytest.raises(BlockingIOError), only_writer(volume):
            pass
    assert lock_file(tmp_path / "new") == tmp_path / "new-lock", "which is made there, or cannot be"
