"""What a run would trip over once it had started: reward, resume, lengths and steps; each is refused before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.checkpoints import with_weights
from support.config import assert_refused, refused, tiny_plain, tiny_run, write_model

from seamless_verl.config import preflight
from seamless_verl.config.checks import Settings
from seamless_verl.config.checks.resuming import RESUME_ANOTHER, check_resume
from seamless_verl.runtime.checkpoint_marker import record_finite

REWARD, ROLLOUT = "reward.custom_reward_function", "actor_rollout_ref.rollout"
RESUME = "trainer.resume_from_path"
FUNCTION = """
import os
from math import *{star}
if os.name:
    def compute_score(data_source, solution_str, ground_truth): ...
other, (third, *fourth) = 1, (2, 3)
"""

MEGATRON = "actor_rollout_ref.actor.megatron"


def reward(folder: Path, text: str = FUNCTION.format(star="").replace("from math import *", "")) -> Path:
    file = folder / "reward.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", ["compute_score", "other", "third", "fourth", "os"])
def test_a_reward_function_that_is_there(tmp_path: Path, name: str) -> None:
    for path in (reward(tmp_path), f"file://{tmp_path}/reward.py"):
        config = tiny_plain(tmp_path, f"{REWARD}.path={path}", f"{REWARD}.name={name}")
        assert preflight(config, devices=1, accelerator=False) == []


def test_a_reward_function_that_only_running_would_find(tmp_path: Path) -> None:
    for text in (FUNCTION.format(star=""), "def __getattr__(name): ...", "globals()['score'] = print"):
        config = tiny_plain(tmp_path, f"{REWARD}.path={reward(tmp_path, text)}", f"{REWARD}.name=score")
        assert preflight(config, devices=1, accelerator=False) == []


def test_a_reward_function_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, path, name = reward(tmp_path), f"{REWARD}.path", f"{REWARD}.name"
    config = tiny_plain(tmp_path, f"{path}={file}", f"{name}=compute_scores")
    assert_refused(config, name, "compute_scores", "Did you mean compute_score? It has: compute_score")
    assert_refused(tiny_plain(tmp_path, f"{path}={file}", f"{name}=zz"), name, "zz", "It has: compute_score")
    file = reward(tmp_path, "import os\nLIMIT = 3\nclass Judge: ...\nasync def grade(): ...\ndef _own(): ...")
    assert_refused(tiny_plain(tmp_path, f"{path}={file}", f"{name}=zz"), name, "zz", "It has: Judge, grade")
    reward(tmp_path, "import os\nLIMIT = 3")
    assert_refused(tiny_plain(tmp_path, f"{path}={file}", f"{name}=zz"), name, "zz", "It has: LIMIT, os")
    reward(tmp_path, "\n".join(f"def f{number:02}(): ..." for number in range(20)))
    assert_refused(tiny_plain(tmp_path, f"{path}={file}", f"{name}=zz"), name, "zz", "f11 and 8 more")
    reward(tmp_path)
    assert_refused(tiny_plain(tmp_path, f"{path}={file}", f"{name}=null"), name, None, f"Add {name}=")
    missing = f"{tmp_path}/rewards.py"
    assert_refused(tiny_plain(tmp_path, f"{path}={missing}"), path, missing, f"Set {path} to a .py file")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_refused(tiny_plain(tmp_path, f"{path}=~/reward.py"), path, "~/reward.py", f"Set {path}={file}")
    reward(tmp_path, "def compute_score(:")
    assert_refused(tiny_plain(tmp_path, f"{path}={file}"), name, "compute_score", "Correct the file")
    other = tmp_path / "reward.txt"
    other.touch()
    assert_refused(tiny_plain(tmp_path, f"{path}={other}"), path, str(other), "a .py file")


def test_a_reward_function_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mypackage").mkdir()
    reward(tmp_path / "mypackage")
    for path in ("pkg://mypackage.reward", "pkg://mypackage/reward"):
        good = tiny_plain(tmp_path, f"{REWARD}.path={path}", f"{REWARD}.name=compute_score")
        assert preflight(good, devices=1, accelerator=False) == []
        bad = tiny_plain(tmp_path, f"{REWARD}.path={path}", f"{REWARD}.name=compute")
        assert_refused(bad, f"{REWARD}.path", path, "Did you mean compute_score?")
    bad = tiny_plain(tmp_path, f"{REWARD}.path=pkg://nosuch.reward")
    assert_refused(bad, f"{REWARD}.path", "pkg://nosuch.reward", f"{REWARD}.path=<file>.py")
    brought = tiny_plain(
        tmp_path, f"{REWARD}.path=pkg://nosuch.reward", "ray_kwargs.ray_init.runtime_env.working_dir=there"
    )
    assert preflight(brought, devices=1, accelerator=False) == []


def test_the_legacy_key_counts(tmp_path: Path) -> None:
    config = tiny_plain(tmp_path, "++custom_reward_function.path=/no/reward.py", "++custom_reward_function.name=f")
    assert_refused(config, "custom_reward_function.path", "/no/reward.py", "defines f")
    unnamed = tiny_plain(tmp_path, "++custom_reward_function.path=/no/reward.py", f"{REWARD}.name=compute_score")
    way_out = f"Add custom_reward_function.name=compute_score, or write {REWARD}.path=/no/reward.py instead, where"
    assert_refused(unnamed, "custom_reward_function.name", None, way_out)


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    return path


def test_resuming_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (checkpoint(tmp_path, 5), "checkpoints/global_step_5"):
        config = tiny_plain(tmp_path, "trainer.resume_mode=resume_path", f"{RESUME}={path}")
        assert preflight(config, devices=1, accelerator=False) == []


@pytest.mark.parametrize(
    ("path", "way_out"),
    [
        ("checkpoints", "Set trainer.resume_from_path to a checkpoint's own folder"),
        ("checkpoints/global_step_7", "trainer.resume_mode=auto"),
        ("nosuch/global_step_7", "trainer.resume_mode=auto"),
        ("nosuch", ".../global_step_<step>"),
        ("checkpoints/global_step_x", ".../global_step_<step>"),
        ("checkpoints/global_step_2", "trainer.resume_mode=auto"),
        ("null", "Add trainer.resume_from_path=..."),
    ],
)
def test_what_cannot_be_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, way_out: str) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (5, 15):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "global_step_2").mkdir()
    config = tiny_plain(tmp_path, "trainer.resume_mode=resume_path", f"{RESUME}={path}")
    assert_refused(config, RESUME, None if path == "null" else path, way_out)


def saved_by(folder: Path, file: str, step: int = 3) -> str:
    """The override for a folder whose newest checkpoint is of that step."""
    saved = folder / f"global_step_{step}" / "actor" / file
    saved.parent.mkdir(parents=True)
    saved.touch()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return f"trainer.default_local_dir={folder}"


FSDPS, MEGATRONS = "model_world_size_8_rank_0.pt", "model/dist_ckpt/metadata.json"


def test_the_newest_checkpoint_has_lost_its_actor(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    folder = saved_by(saved, MEGATRONS, step=3)
    (saved / "global_step_6").mkdir()
    (saved / "latest_checkpointed_iteration.txt").write_text("6")
    way_out = f"Set trainer.resume_mode=resume_path and {RESUME}={saved}/global_step_3"
    assert_refused(tiny_plain(tmp_path, folder), "trainer.default_local_dir", str(saved), way_out)
    (saved / "global_step_3" / "actor").rename(tmp_path / "elsewhere")
    assert_refused(tiny_plain(tmp_path, folder), "trainer.default_local_dir", str(saved), "trainer.resume_mode=disable")


def test_a_checkpoint_whose_weights_are_not_finite(tmp_path: Path) -> None:
    folder = saved_by(tmp_path / "saved", MEGATRONS)
    newest = with_weights(tmp_path / "saved" / "global_step_3", "BF16", [0x7FC0])
    anew = "an earlier checkpoint, or trainer.resume_mode=disable"
    assert_refused(tiny_plain(tmp_path, folder), "trainer.default_local_dir", str(tmp_path / "saved"), anew)
    named = tiny_plain(tmp_path, "trainer.resume_mode=resume_path", f"{RESUME}={newest}")
    assert_refused(named, RESUME, str(newest), anew)
    assert f"has weights that are not finite numbers, in {newest}/actor/model/" in str(refused(named)[0])
    record_finite(newest)  # as the run did that looked at what it saved
    assert preflight(tiny_plain(tmp_path, folder), devices=1, accelerator=False) == []


def test_a_checkpoint_of_the_last_step_leaves_nothing_to_train(tmp_path: Path) -> None:
    folder = saved_by(tmp_path / "saved", MEGATRONS, step=80)
    for steps, warnings in ((80, 1), (81, 0), (40, 1)):
        found = preflight(
            tiny_plain(tmp_path, folder, f"trainer.total_training_steps={steps}"), devices=1, accelerator=False
        )
        assert len(found) == warnings
        for warning in found:
            assert warning.startswith(f"trainer.total_training_steps={steps}: leaves nothing to train after")
            assert "Set trainer.total_training_steps above 80" in warning and "trainer.resume_mode=disable" in warning


def test_resume_modes(tmp_path: Path) -> None:
    config = tiny_plain(tmp_path, "trainer.resume_mode=resume_from_path")
    assert_refused(config, "trainer.resume_mode", "resume_from_path", "Did you mean resume_path?")
    unread = tiny_plain(tmp_path, f"{RESUME}=somewhere")
    (warning,) = preflight(unread, devices=1, accelerator=False)
    assert f"{RESUME}='somewhere'" in warning and "Set trainer.resume_mode=resume_path" in warning


@pytest.mark.parametrize("steps", [0, -1, "many", True, 1.5])
def test_a_run_has_a_step(tmp_path: Path, steps: object) -> None:
    key = "trainer.total_training_steps"
    assert_refused(tiny_plain(tmp_path, f"{key}={steps}"), key, steps, f"{key}=null")
    assert preflight(tiny_plain(tmp_path, f"{key}=1"), devices=1, accelerator=False) == []


def test_epochs(tmp_path: Path) -> None:
    assert_refused(tiny_plain(tmp_path, "trainer.total_epochs=0"), "trainer.total_epochs", 0, "trainer.total_epochs=1")


LENGTHS = ("data.max_prompt_length=100", "data.max_response_length=50")


def test_lengths_that_fit(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LENGTHS, f"{ROLLOUT}.max_model_len=150")
    write_model(tmp_path / "model", max_position_embeddings=150)
    assert preflight(config, devices=1, accelerator=False) == []


@pytest.mark.parametrize("length", ["149", "null"])
@pytest.mark.parametrize("nested", [False, True])
def test_prompt_and_response_fit_together(tmp_path: Path, length: str, nested: bool) -> None:
    config = tiny_run(tmp_path, *LENGTHS, f"{ROLLOUT}.max_model_len={length}")
    limit = {"max_position_embeddings": 149}
    write_model(tmp_path / "model", **({"text_config": limit} if nested else limit))
    assert_refused(config, "data.max_response_length", 50, "Set data.max_response_length=49 or less")
    (problem,) = refused(config)
    assert "150 tokens" in problem.reason and "max_model_len=150" not in problem.way_out
    assert ("max_model_len=149" if length == "149" else "max_position_embeddings=149") in problem.reason


def test_a_shorter_engine_can_be_made_longer(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LENGTHS, f"{ROLLOUT}.max_model_len=149")
    write_model(tmp_path / "model", max_position_embeddings=150)
    assert_refused(config, "data.max_response_length", 50, f"=49 or less, or {ROLLOUT}.max_model_len=150")


def test_a_shorter_engine_can_be_made_longer_where_the_models_limit_is_not_known(tmp_path: Path) -> None:
    config = tiny_run(
        tmp_path, *LENGTHS, f"{ROLLOUT}.max_model_len=149", "actor_rollout_ref.model.path=hdfs://models/name"
    )
    found = [one for one in refused(config) if one.key == "data.max_response_length"]
    longer = f", or {ROLLOUT}.max_model_len=150, if the model has as many positions"
    assert [one.way_out for one in found] == [f"Set data.max_response_length=49 or less{longer}"]


def test_the_engine_is_no_longer_than_the_model(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LENGTHS, f"{ROLLOUT}.max_model_len=300")
    write_model(tmp_path / "model", max_position_embeddings=200)
    assert_refused(config, f"{ROLLOUT}.max_model_len", 300, f"Set {ROLLOUT}.max_model_len=200 or less")


def test_a_prompt_that_leaves_no_room(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LENGTHS, f"{ROLLOUT}.max_model_len=100")
    longer = f", or {ROLLOUT}.max_model_len=150, if the model has as many positions"
    assert_refused(config, "data.max_response_length", 50, f"Lower both to 100 together{longer}")
    own = tiny_run(tmp_path, *LENGTHS, f"{ROLLOUT}.response_length=60", f"{ROLLOUT}.max_model_len=150")
    assert_refused(own, f"{ROLLOUT}.response_length", 60, f"Set {ROLLOUT}.response_length=50 or less")


def test_an_unset_variable_is_named_with_the_keys_that_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_DATA", raising=False)
    config = tiny_run(tmp_path, "data.train_files='${oc.env:MY_DATA}/a'", "data.val_files='${oc.env:MY_DATA}/b'")
    way_out = "Write MY_DATA=... before the command, or set data.train_files and data.val_files"
    with pytest.raises(ValueError) as caught:
        preflight(config, devices=1, accelerator=False)
    assert str(caught.value) == f"$MY_DATA=None: the environment variable MY_DATA is not set. {way_out}"


@pytest.mark.parametrize(("train", "mini", "instead"), [(10, 4, 2), (9, 4, 3), (7, 4, 1), (8, 16, 8)])
def test_a_train_batch_can_also_be_cut_otherwise(tmp_path: Path, train: int, mini: int, instead: int) -> None:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    config = tiny_plain(tmp_path, f"data.train_batch_size={train}", f"{key}={mini}")
    assert_refused(config, "data.train_batch_size", train, f", or {key}={instead}")
    mended = tiny_plain(tmp_path, f"data.train_batch_size={train}", f"{key}={instead}")
    assert preflight(mended, devices=1, accelerator=False) == []


def test_working_directory_is_told(tmp_path: Path) -> None:
    (problem,) = refused(tiny_plain(tmp_path, f"{REWARD}.path=mine/reward.py"))
    assert os.getcwd() in problem.reason


def test_a_clusters_checkpoint_may_be_on_another_machine(tmp_path: Path) -> None:
    folder = saved_by(tmp_path / "saved", FSDPS)
    there = tiny_plain(tmp_path, folder, "ray_kwargs.ray_init.address=head:6379")
    assert not check_resume(Settings.of(there, devices=1, accelerator=True))


def test_the_newest_checkpoint_is_of_another_engine(tmp_path: Path) -> None:
    saved, key = tmp_path / "saved", "trainer.default_local_dir"
    folder = saved_by(saved, FSDPS)
    assert_refused(tiny_plain(tmp_path, folder), key, str(saved), "trainer.resume_mode=disable, or model_engine=dp")
    anew = tiny_plain(tmp_path, folder, "trainer.resume_mode=disable")
    assert preflight(anew, devices=1, accelerator=False) == []
    (saved / "latest_checkpointed_iteration.txt").write_text("4")  # verl begins anew where it is not there
    assert preflight(tiny_plain(tmp_path, folder), devices=1, accelerator=False) == []


def test_a_checkpoint_of_the_runs_own_engine(tmp_path: Path) -> None:
    folder = saved_by(tmp_path / "saved", MEGATRONS)
    assert preflight(tiny_plain(tmp_path, folder), devices=1, accelerator=False) == []
    fsdp = tiny_plain(tmp_path, folder, "actor_rollout_ref.actor.strategy=fsdp2")
    found = check_resume(Settings.of(fsdp, devices=1, accelerator=True))
    assert [problem.way_out.endswith("model_engine=megatron") for problem in found] == [True]


@pytest.mark.parametrize(
    ("file", "key", "others"),
    [
        ("model/huggingface/adapter/adapter_config.json", "lora.rank", [f"{MEGATRON}.vanilla_mbridge=False"]),
        ("lora_train_meta.json", "lora_rank", ["actor_rollout_ref.actor.strategy=fsdp2"]),
    ],
)
def test_the_newest_checkpoint_has_an_adapter_of_another_rank(
    tmp_path: Path, file: str, key: str, others: list[str]
) -> None:
    folder, key = saved_by(tmp_path / "saved", file), f"actor_rollout_ref.model.{key}"
    (tmp_path / "saved" / "global_step_3" / "actor" / file).write_text('{"r": 8}')
    for rank, refusals in ((4, [(key, 4)]), (8, []), (0, [])):
        config = tiny_plain(tmp_path, folder, f"{key}={rank}", *others)
        found = check_resume(Settings.of(config, devices=1, accelerator=True))
        assert [(problem.key, problem.value) for problem in found] == refusals


@pytest.mark.parametrize("text", ["[8]", '{"r": ', "\xff"])
def test_a_damaged_file_of_an_adapter_is_named(tmp_path: Path, text: str) -> None:
    name = "model/huggingface/adapter/adapter_config.json"
    folder = saved_by(tmp_path / "saved", name)
    file = tmp_path / "saved" / "global_step_3" / "actor" / name
    file.write_bytes(text.encode("latin-1"))
    config = tiny_plain(tmp_path, folder, "actor_rollout_ref.model.lora.rank=4", f"{MEGATRON}.vanilla_mbridge=False")
    (problem,) = check_resume(Settings.of(config, devices=1, accelerator=True))
    assert problem.value == str(tmp_path / "saved" / "global_step_3") and problem.way_out == RESUME_ANOTHER
    assert problem.reason.startswith(f"actor/{name} of the checkpoint") and "is damaged: " in problem.reason


def test_how_a_long_prompt_is_cut_cannot_be_chosen(tmp_path: Path) -> None:
    for way in ("error", "left"):
        assert preflight(tiny_plain(tmp_path, f"data.truncation={way}"), devices=1, accelerator=False) == []
    (warning,) = preflight(tiny_plain(tmp_path, "data.truncation=right"), devices=1, accelerator=False)
    assert warning.startswith("data.truncation='right': is not read by verl 0.9.1")
    assert warning.endswith("data.filter_overlong_prompts=True leaves such prompts out")
