"""Which platform a config is for, and what is checked of it on a machine without an accelerator."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from socket import gethostname

import pytest
from omegaconf import OmegaConf
from support.config import tiny_run

from seamless_verl.check import without_platform
from seamless_verl.client import AdminFile
from seamless_verl.config import SeamlessConfig, preflight
from seamless_verl.config.checks import OF_THIS_MACHINE
from seamless_verl.errors import ConfigError
from seamless_verl.main_ppo import check_overrides, lacks_accelerator, uses_cpu
from seamless_verl.run_folder import clean_up, register_admin_files
from seamless_verl.runtime.console import RUN_FILE
from seamless_verl.runtime.locks import only_writer

GPUS = "trainer.device=cuda"


def test_which_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU platform can be chosen beside an accelerator, too."""
    cpu, cuda = (OmegaConf.create({"trainer": {"device": name}}) for name in ("cpu", "cuda"))
    assert uses_cpu(cpu) and not uses_cpu(cuda)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert lacks_accelerator(cuda) and not lacks_accelerator(cpu)
    monkeypatch.setenv("VERL_PLATFORM", "cuda")
    assert not lacks_accelerator(cuda)


def test_a_run_for_accelerators_is_refused_without_one_with_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = tiny_run(tmp_path, GPUS, "data.train_batch_size=10")
    with pytest.raises(ConfigError, match="platform=cpu") as refused:
        check_overrides(config, [])
    assert [mistake.key for mistake in refused.value.mistakes] == ["trainer.device", "data.train_batch_size"]
    with pytest.raises(ConfigError) as checked:
        check_overrides(config, [], anywhere=True)
    assert [mistake.key for mistake in checked.value.mistakes] == ["data.train_batch_size"]


def test_our_trainer_needs_its_own_settings(tmp_path: Path) -> None:
    """verl's config, such as ppo_megatron_trainer, does not have them; with verl's own modes it is taken."""
    config = tiny_run(tmp_path, "trainer.device=cpu")
    del config["seamless"]
    with pytest.raises(ConfigError) as refused:
        check_overrides(config, [])
    assert [mistake.key for mistake in refused.value.mistakes] == ["--config-name"]
    config.trainer.v1.trainer_mode = "sync"
    check_overrides(config, [])


@pytest.mark.parametrize("tree", [{"trainer": {"device": "cuda"}}, {"trainer": {"save_freq": -1}}, {"data": {}}])
def test_a_config_without_trainer_modes_is_refused_alone(tree: dict[str, object]) -> None:
    """An older verl's config, and those of its other programs; what else they lack follows from that."""
    config = OmegaConf.create(tree)
    OmegaConf.set_struct(config, True)
    with pytest.raises(ConfigError, match="is not built on seamless_ppo_trainer") as refused:
        check_overrides(config, [])
    assert [mistake.key for mistake in refused.value.mistakes] == ["--config-name"]
    assert not uses_cpu(config)


def test_a_run_for_accelerators_can_be_checked_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not here is a warning, and what was not checked is named."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    absent_files = ("data.val_files=/no/val.parquet", "actor_rollout_ref.model.path=/no/model")
    config = tiny_run(tmp_path, GPUS, *absent_files, "trainer.default_local_dir=/proc/no")
    with caplog.at_level(logging.WARNING):
        check_overrides(config, [], anywhere=True)
    *absent, unchecked = (record.getMessage() for record in caplog.records if record.name.startswith("seamless"))
    assert sorted(line.partition(":")[0] for line in absent) == [
        "actor_rollout_ref.model.path='/no/model'",
        "data.val_files='/no/val.parquet'",
    ]
    assert all(": does not exist" in line for line in absent)
    assert unchecked.startswith("not checked without an accelerator: installed versions")
    assert all(what in unchecked for what in OF_THIS_MACHINE.values())


def refused_keys(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        check_overrides(tiny_run(folder, "trainer.device=cpu", *overrides), [])
    return [mistake.key for mistake in refused.value.mistakes]


def test_all_mistakes_of_our_node_are_named_at_once(tmp_path: Path) -> None:
    bound, gateway = "seamless.max_staleness", "seamless.gateway.shards"
    wrong = (f"{bound}=-1", f"{gateway}=0", "seamless.no_such_key=1")
    assert refused_keys(tmp_path, *wrong) == ["seamless.no_such_key", bound, gateway]


def test_before_files_are_made_only_they_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    absent_files = ("data.val_files=/no/val.parquet", "actor_rollout_ref.model.path=/no/model")
    config = tiny_run(tmp_path, "trainer.device=cpu", *absent_files, "trainer.v1.sampler.max_off_policy_threshold=3")
    with caplog.at_level(logging.WARNING):
        check_overrides(config, [], unmade=True)
    (line,) = (record.getMessage() for record in caplog.records if record.name.startswith("seamless"))
    assert line.startswith("trainer.v1.sampler.max_off_policy_threshold=3: is not read")


def test_the_platform_of_the_check_command() -> None:
    assert without_platform(["--platform", "accelerator", "a=1"]) == (["a=1"], "accelerator")
    assert without_platform(["a=1", "--platform=cpu"]) == (["a=1"], "cpu")
    assert without_platform(["a=1"]) == (["a=1"], None)
    for wrong in (["--platform", "acelerator"], ["--platform=acelerator"]):
        with pytest.raises(ConfigError, match=r"--platform='acelerator': .*Did you mean accelerator\?"):
            without_platform(wrong)
    with pytest.raises(ConfigError, match="Valid: accelerator, accelerator_without_te, cpu"):
        without_platform(["a=1", "--platform"])


def test_another_machine_is_only_one_without_its_accelerator(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.default_local_dir=/proc/no")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir"):
        preflight(config, devices=1, accelerator=False)


def test_what_names_a_runs_gateways_is_removed_when_its_processes_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = tmp_path / "run.json"
    monkeypatch.setenv(RUN_FILE, str(run_file))
    seamless = SeamlessConfig.parse({"gateway": {"enabled": True, "shards": 2}})
    register_admin_files(OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}}), seamless)
    journals = [seamless.gateway.journal_of(shard, str(tmp_path)) for shard in range(2)]
    for journal in journals:
        AdminFile("http://h:1", "k", "r", gethostname(), os.getpid()).write(AdminFile.beside(journal))
    with only_writer(journals[1]):  # of another run, which replaced the file
        clean_up(run_file)
    assert not AdminFile.beside(journals[0]).exists() and AdminFile.beside(journals[1]).exists()
    run_file.with_name("admin-files").unlink()
    clean_up(run_file)  # a run without a gateway
