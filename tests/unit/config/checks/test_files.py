"""The model folder and the data files: what they must hold, and what is said when they do not."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pyarrow import parquet
from support.config import ROW, assert_refused, refused, tiny_run, write_model, write_rows

from seamless_verl.config import preflight
from seamless_verl.config.checks.agents import LOOPS
from seamless_verl.config.paths import lock_error
from seamless_verl.errors import ConfigError
from seamless_verl.run_folder import exclusive_checkpoint_folder
from seamless_verl.runtime.locks import lock_file, only_writer

PATH = "actor_rollout_ref.model.path"


@pytest.mark.parametrize("size", [32, 64, 128])
def test_head_sizes_that_run(tmp_path: Path, size: int) -> None:
    config = tiny_run(tmp_path)
    write_model(tmp_path / "model", head_dim=size)
    assert preflight(config, devices=1, accelerator=False) == []


def test_model_folder_without_a_config(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json is not JSON" in str(refused(config)[0])
    (tmp_path / "model" / "config.json").unlink()
    assert "has no config.json" in str(refused(config)[0])


def test_every_file_that_is_missing_is_named(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "data.train_files=[/no/a.parquet,/no/b.parquet]")
    assert [error.value for error in refused(config)] == ["/no/a.parquet", "/no/b.parquet"]


def test_home_is_not_expanded_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tiny_run(tmp_path, f"{PATH}=~/model")
    assert_refused(config, PATH, "~/model", f"Set {PATH}={tmp_path}/model")


def test_hub_id_is_refused_only_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(tmp_path, f"{PATH}=seamless-test/not-in-any-cache")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert preflight(config, devices=1, accelerator=False) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(config, PATH, "seamless-test/not-in-any-cache", "set HF_HUB_OFFLINE=0")


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_missing_column(tmp_path: Path, column: str) -> None:
    config = tiny_run(tmp_path)
    file = write_rows(tmp_path / "train.parquet", {name: ROW[name] for name in ROW if name != column})
    assert_refused(config, "data.train_files", str(file), "the file with columns prompt, data_source, reward_model")
    assert f"lacks the column {column} " in str(refused(config)[0])


def test_missing_answer_and_unreadable_file(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    file = write_rows(tmp_path / "val.parquet", {**ROW, "reward_model": {"style": "rule"}})
    assert_refused(config, "data.val_files", str(file), "reward_model.ground_truth")
    file.write_text("not parquet")
    assert_refused(config, "data.val_files", str(file), "Set data.val_files to a parquet file")


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_file_without_rows(tmp_path: Path, name: str) -> None:
    config = tiny_run(tmp_path)
    file = write_rows(tmp_path / f"{name}.parquet")
    parquet.write_table(parquet.read_table(file).slice(0, 0), file)
    assert_refused(config, f"data.{name}_files", str(file), f"Set data.{name}_files to a file with prompts")
    both = f"data.{name}_files=[{file}, {write_rows(tmp_path / 'more.parquet')}]"
    assert preflight(tiny_run(tmp_path / "other", both), devices=1, accelerator=False) == []


@pytest.mark.parametrize("column", ["rm_scores", "session_id", "values"])
def test_a_column_with_the_name_of_one_that_the_run_computes(tmp_path: Path, column: str) -> None:
    config = tiny_run(tmp_path)
    file = write_rows(tmp_path / "val.parquet", {**ROW, column: 1})
    assert_refused(config, "data.val_files", str(file), f"Rename it in the file, for example to my_{column}")
    assert f"its column {column} has a name of what the run computes" in str(refused(config)[0])


def test_prompts_that_are_texts_and_no_messages(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    file = write_rows(tmp_path / "train.parquet", {**ROW, "prompt": "What is 1 + 1?"})
    assert_refused(config, "data.train_files", str(file), '[{"role": "user", "content": ...}]')


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, why in [
        (tmp_path / "file" / "checkpoints", "/file: Not a dir"),
        (Path("/proc/checkpoints"), "/proc: "),
    ]:
        config = tiny_run(tmp_path, f"trainer.default_local_dir={folder}")
        assert_refused(config, "trainer.default_local_dir", str(folder), "to a folder of yours")
        assert why in str(refused(config)[0])


def test_a_folder_whose_lock_cannot_be_made_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a volume that is mounted; here a folder has the lock's name."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    key, folder, never = "trainer.default_local_dir", tmp_path / "ckpt", "trainer.save_freq=-1"
    for made in (folder, lock_file(folder)):
        made.mkdir()
    config = tiny_run(tmp_path, f"{key}={folder}", never)
    assert_refused(config, key, str(folder), f"Set {key}={folder}/run")
    said = r"its lock .*/ckpt-lock cannot be made: Is a directory"
    with pytest.raises(ConfigError, match=said), exclusive_checkpoint_folder(config):
        pass
    config.trainer.v1.trainer_mode = "sync"  # which saves nothing here, and needs no lock
    assert preflight(config, devices=1, accelerator=False) == []
    inside = tiny_run(tmp_path, f"{key}={folder}/run", never)
    assert preflight(inside, devices=1, accelerator=False) == []
    with exclusive_checkpoint_folder(inside):
        assert lock_file(folder / "run").is_file()


def test_a_folder_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system refuses the name, as it refuses others to look into a folder that is not theirs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    key, folder = "trainer.default_local_dir", tmp_path / ("x" * 300) / "a"
    for gateway in ("seamless.gateway.enabled=false", "seamless.gateway.enabled=true"):
        config = tiny_run(tmp_path, f"{key}={folder}", gateway)
        assert_refused(config, key, str(folder), f"or set {key} to another place")
        assert "cannot be read: File name too long" in str(refused(config)[0])
    journal = "seamless.gateway.journal"
    assert_refused(tiny_run(tmp_path, f"{journal}={folder}", "seamless.gateway.enabled=true"), journal, str(folder), "")
    newest = f"/{'y' * 300}/global_step_1"
    named = tiny_run(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}")
    assert_refused(named, "trainer.resume_from_path", newest, "")


@pytest.mark.parametrize("key", [LOOPS])
def test_a_file_that_may_not_be_looked_at(tmp_path: Path, key: str) -> None:
    file = f"{tmp_path}/{'x' * 300}.py"
    found = [one for one in refused(tiny_run(tmp_path, f"{key}={file}")) if one.key == key]
    assert [one.reason for one in found] == ["cannot be read: File name too long"]


@pytest.mark.parametrize("key", [LOOPS, PATH])
def test_a_file_that_may_not_be_read(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so that the file system's answer is made up."""
    config = tiny_run(tmp_path)
    file = tmp_path / "model" / "config.json" if key == PATH else tmp_path / "file.py"
    if key != PATH:
        file.touch()
        OmegaConf.update(config, key, str(file), force_add=True)
    whole = Path.read_bytes

    def read(path: Path) -> bytes:
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    found = [one for one in refused(config) if one.key == key]
    assert len(found) == 1 and found[0].reason.endswith("cannot be read: Permission denied")


def test_the_place_of_a_lock_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "run"
    assert lock_error(folder) is None and not folder.parent.exists()
    assert lock_error(Path("/proc/self/run")) is not None
    assert lock_error(tmp_path / ("x" * 253)) == "File name too long"
    with only_writer(folder):
        assert lock_error(folder) is None

    def without_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    assert lock_error(folder) == "No locks available" == lock_error(tmp_path / "other")


def test_a_data_set_or_reward_of_the_users_own_has_its_own_columns(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "data.custom_cls.path=mine.py")
    write_rows(tmp_path / "train.parquet", {"anything": 1})
    assert preflight(config, devices=1, accelerator=False) == []


def test_another_prompt_column_is_named_in_both_sets(tmp_path: Path) -> None:
    train, val = refused(tiny_run(tmp_path, "data.prompt_key=messages"))
    assert (train.key, val.key) == ("data.train_files", "data.val_files")
    assert "lacks the column messages " in str(train)
    assert "Set data.prompt_key to the column" in train.way_out


def test_what_an_environment_variable_gives_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/proc/nope")
    config = tiny_run(tmp_path, "trainer.default_local_dir='${oc.env:DATA}/checkpoints'")
    with pytest.raises(ConfigError) as caught:
        preflight(config, devices=1, accelerator=False)
    (mistake,) = caught.value.mistakes
    assert str(mistake) == (
        "$DATA='/proc/nope': trainer.default_local_dir='/proc/nope/checkpoints', which it is part of, cannot be made "
        "in /proc: No such file or directory. Set DATA to another value, or set trainer.default_local_dir to a folder "
        "of yours"
    )


@pytest.mark.parametrize(("free", "save_freq", "warned"), [(0, 1, True), (0, -1, False), (10**12, 1, False)])
def test_less_room_than_one_checkpoint_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, save_freq: int, warned: bool
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    config = tiny_run(tmp_path, f"trainer.default_local_dir={tmp_path}/saved", f"trainer.save_freq={save_freq}")
    write_model(tmp_path / "model", vocab_size=1000, intermediate_size=256)
    found = preflight(config, devices=1, accelerator=False)
    text = f"trainer.default_local_dir='{tmp_path}/saved': has 0.0 GB free, and the actor's part of a checkpoint takes"
    assert [line.startswith(text) for line in found] == [True] * warned
