"""The command itself: whatever is wrong with it ends with code 2, one message, and no folder left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from support.config import TINY, tiny_files
from support.paths import RECIPES

from seamless_verl.config import register_search_path
from seamless_verl.config.composing import FULL_ERROR, HERE, composing, remove_run_folder
from seamless_verl.errors import ConfigError
from seamless_verl.run_folder import exclusive_checkpoint_folder
from seamless_verl.runtime.locks import is_locked, only_writer

RECIPE = RECIPES / "arithmetic_grpo"


def run(folder: Path, *arguments: str, main: str = "main_ppo", **env: str) -> subprocess.CompletedProcess[str]:
    return ended(folder, sys.executable, "-m", f"seamless_verl.{main}", *arguments, **env)


def ended(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {name: value for name, value in os.environ.items() if name != "DATA"} | {"VERL_PLATFORM": "cpu"} | env
    return subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, timeout=300)


def composed(*overrides: str, config: str = "seamless_ppo_trainer") -> str:
    """What a refused command is told."""
    register_search_path()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setenv("SEAMLESS_PLATFORM", "cpu")
        with composing(overrides), initialize_config_dir(str(HERE), version_base=None):
            compose(config, list(overrides))
    return str(caught.value)


@pytest.fixture(autouse=True)
def untouched_environment() -> Iterator[None]:
    before = os.environ.get(FULL_ERROR)
    yield
    assert os.environ.get(FULL_ERROR) == before


@pytest.mark.parametrize(
    ("override", "said", "way_out"),
    [
        ("trainer.nnode=1", "trainer.nnode='1': is not a known key", "Did you mean trainer.nnodes?"),
        ("trainer.max_prompt_length=3", "is not a known key", "Did you mean data.max_prompt_length?"),
        ("trainer.nosuchthing=1", "is not a known key. A new key", "added as +trainer.nosuchthing=1"),
        ("foo=1", "foo='1': is not a known key. A new key", "added as +foo=1"),
        ("seamless.layuot=auto", "is not a known key", "Did you mean seamless.layout?"),
        ("platfrom=cpu", "platfrom='cpu': is not a known key", "Did you mean platform?"),
        (
            "platform=cpus",
            "platform='cpus': there is no such config",
            "Did you mean cpu?",
        ),
        ("+platform=cpu", "platform='cpu': hydra refuses it", "leave +platform=cpu out"),
        ("+trainer.nnodes=2", "trainer.nnodes='2': hydra refuses it", "leave +trainer.nnodes=2 out"),
        ("trainer.nnodes=[1", "trainer.nnodes='[1': a bracket is not closed", "Close it with ]"),
        ("data.seed=a=b=[", "data.seed='a=b=[': a bracket is not closed", "Close it with ]"),
        ('data.seed=a="b', "cannot be read", "'data.seed=\"...\"'"),
        ("seamless.gateway.options=--a=b", "cannot be read", "Quote special characters"),
        ("~trainer.nosuch", "trainer.nosuch=None: hydra refuses it", "leave ~trainer.nosuch out"),
        ("trainer.nnodes=1,2", "trainer.nnodes='1,2': hydra refuses it", "leave trainer.nnodes=1,2 out"),
        ("nosuch@trainer=x", "nosuch@trainer='x': hydra refuses it", "group 'nosuch' does not exist"),
    ],
)
def test_a_bad_override_is_named_among_good_ones(override: str, said: str, way_out: str) -> None:
    printed = composed("trainer.total_epochs=2", override, "data.seed=1")
    assert printed.startswith(override.lstrip("+~").partition("=")[0] + "=")
    assert said in printed and way_out in printed


def test_a_config_that_is_not_there() -> None:
    assert "--config-name='nosuch': there is no such config" in composed(config="nosuch")


def test_a_folder_of_hydras_that_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match=r"hydra.run.dir='/proc/nope': cannot be made"), composing([]):
        os.mkdir("/proc/nope")
    with pytest.raises(FileNotFoundError), composing([]) as begin:
        begin()
        os.mkdir("/proc/nope")


def test_a_job_reports_its_own_errors() -> None:
    with pytest.raises(KeyError), composing([]):
        raise KeyError("ours")
    with pytest.raises(InstantiationException), composing([]) as begin:
        begin()
        assert FULL_ERROR not in os.environ
        raise InstantiationException("the job's")


def test_the_users_wish_for_full_errors_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL_ERROR, "0")
    with composing([]) as begin:
        assert os.environ[FULL_ERROR] == "1"
        begin()
        assert os.environ[FULL_ERROR] == "0"


@pytest.mark.parametrize("main", ["main_ppo", "check"])
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["+platform=cpu"], "platform='cpu': hydra refuses it"),
        (["--config-dir", str(RECIPE), "--config-name", "config"], "$DATA=None: the environment variable DATA is not"),
        (["seamless.max_staleness=${no.such}"], "seamless.max_staleness=None: cannot be resolved"),
    ],
)
def test_the_whole_command_ends_with_code_2_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], printed: str, main: str
) -> None:
    done = run(tmp_path, *arguments, main=main)
    assert done.returncode == 2 and printed in done.stderr and done.stdout == ""
    assert printed in done.stderr.splitlines()[0], done.stderr
    assert not list(tmp_path.iterdir())


def test_a_refused_run_leaves_an_earlier_ones_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "main_ppo.log").write_text("an earlier run's")
    files = tiny_files(tmp_path / "files")
    done = run(tmp_path, *files, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=0", "hydra.run.dir=kept")
    assert done.returncode == 2 and "trainer.total_training_steps=0: must be" in done.stderr
    assert (tmp_path / "kept" / "main_ppo.log").read_text() == "an earlier run's"


def hydras(folder: Path) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    for name in ("config", "hydra", "overrides"):
        (folder / ".hydra" / f"{name}.yaml").write_text("{}")
    (folder / "main_ppo.log").touch()
    return folder


def test_a_run_folder_goes_with_the_folders_of_its_date(tmp_path: Path) -> None:
    folder = hydras(tmp_path / "outputs" / "2030-01-02" / "03-04-05")
    other = hydras(tmp_path / "outputs" / "2030-01-02" / "03-04-06")
    remove_run_folder(folder)
    assert not folder.exists() and other.exists()
    remove_run_folder(other)
    assert not list(tmp_path.iterdir())
    named = hydras(tmp_path / "mine" / "run")
    remove_run_folder(named)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


@pytest.mark.parametrize("name", ["main_ppo.log", "notes.log", "data", ".hydra/mine.yaml"])
def test_a_run_folder_with_anything_in_it_stays_whole(tmp_path: Path, name: str) -> None:
    folder = hydras(tmp_path / "run")
    (folder / name).write_text("something")
    before = sorted(folder.rglob("*"))
    remove_run_folder(folder)
    assert sorted(folder.rglob("*")) == before


def test_pythons_own_options_reach_the_child(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("""
import os, sys
from seamless_verl import main_ppo
if main_ppo.SUPERVISED in os.environ:
    print(sys.warnoptions[-1], sys.flags.utf8_mode, sys.argv[1:])
else:
    sys.exit(main_ppo.main())
""")
    command = [sys.executable, "-W", "ignore", "-X", "utf8=1", "-B", str(script), "-W", "a=1"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ignore 1 ['-W', 'a=1']\n"


def test_a_check_says_what_the_run_would_and_starts_nothing(tmp_path: Path) -> None:
    files = tiny_files(tmp_path / "files")
    mine = (*TINY, "trainer.default_local_dir=mine", "hydra.run.dir=run folder")
    done = run(tmp_path, *files, *mine, main="check")
    assert done.returncode == 0
    (line,) = (done.stdout + done.stderr).splitlines()
    assert "chosen: seamless.correction.loss=" in line and "seamless.max_staleness=" in line
    settled = ("seamless.correction.loss=null", "seamless.max_staleness=1")
    done = run(tmp_path, *files, *mine, *settled, main="check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = ("trainer.total_training_steps=0", "data.train_batch_size=7")
    refused = run(tmp_path, *files, *mine, *wrong, main="check")
    assert refused.returncode == 2 and refused.stderr == run(tmp_path, *files, *mine, *wrong).stderr
    assert "trainer.total_training_steps=0: must be" in refused.stderr and len(refused.stderr.splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_a_check_says_how_it_is_used(tmp_path: Path, asked: str) -> None:
    done = run(tmp_path, "trainer.total_training_steps=0", asked, main="check")
    assert (done.returncode, done.stderr) == (0, "") and "--unmade" in done.stdout
    assert not list(tmp_path.iterdir())


def test_an_environment_in_which_a_run_computes_wrong_numbers_is_refused(tmp_path: Path) -> None:
    refused = run(tmp_path, *TINY, *tiny_files(tmp_path), main="check", PYTHONOPTIMIZE="1")
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 2 and line.startswith("PYTHONOPTIMIZE='1': "), refused.stderr


def test_the_check_is_a_command_too(tmp_path: Path) -> None:
    """With its options first, and with hydra's."""
    command = (sys.executable, "-m", "seamless_verl.cli", "check")
    assert "usage: python -m seamless_verl.check" in ended(tmp_path, *command, "--help").stdout
    wrong = ("--unmade", *tiny_files(tmp_path / "files"), *TINY, "data.train_batch_size=7")
    done, same = ended(tmp_path, *command, *wrong), run(tmp_path, *wrong, main="check")
    assert (done.returncode, done.stdout, done.stderr) == (same.returncode, same.stdout, same.stderr)
    assert done.returncode == 2 and "data.train_batch_size=7" in done.stderr
    assert "check" in ended(tmp_path, *command[:-1], "--help").stdout


def test_an_interrupted_check_is_silent_even_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "hydra").mkdir()
    # many short sleeps: a signal that comes just before a sleep begins is handled only when that one has ended
    slow = "import time\nprint('begun', flush=True)\nfor _ in range(6000):\n    time.sleep(0.1)"
    (tmp_path / "hydra" / "__init__.py").write_text(slow)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "VERL_PLATFORM": "cpu"}
    command = [sys.executable, "-m", "seamless_verl.check", *TINY]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None and one.stdout.readline() == "begun\n"
        one.send_signal(signal.SIGINT)
        _, printed = one.communicate(timeout=120)
    assert (one.returncode, printed) == (130, "")


def test_two_runs_do_not_write_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, folder = tiny_files(tmp_path / "files"), tmp_path / "made" / "saved"
    mine = (*files, *TINY, f"trainer.default_local_dir={folder}", "hydra.run.dir=run folder")
    with only_writer(folder):
        refused = [run(tmp_path, *mine), run(tmp_path, *mine, main="check")]
        config = OmegaConf.create({"trainer": {"default_local_dir": str(folder), "save_freq": -1}})
        OmegaConf.update(config, "trainer.v1.trainer_mode", "seamless", force_add=True)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        with pytest.raises(ConfigError, match="another run writes there now"), exclusive_checkpoint_folder(config):
            pass  # as for one that was checked before the other began
    for one in refused:
        (line,) = one.stderr.splitlines()
        assert one.returncode == 2 and f"trainer.default_local_dir='{folder}': another run writes there now" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "made"]
    assert [path.name for path in folder.parent.iterdir()] == ["saved-lock"]
    with exclusive_checkpoint_folder(config):
        assert is_locked(folder)
    assert not is_locked(folder)


def test_a_check_can_come_before_data_and_model(tmp_path: Path) -> None:
    files = ("data.train_files=t.parquet", "data.val_files=v.parquet", "actor_rollout_ref.model.path=out/model")
    done = run(tmp_path, *TINY, *files, main="check", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    for printed in (
        "data.train_files='t.parquet'",
        "data.val_files='v.parquet'",
        "actor_rollout_ref.model.path='out/mo",
    ):
        assert f"\n{printed}" in f"\n{done.stderr}"
    done = run(tmp_path, "--unmade", *TINY, *files, main="check", HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "t.parquet").write_text("no parquet")  # what is there may be made anew
    done = run(tmp_path, "--unmade", *TINY, *files, "data.train_batch_size=7", main="check")
    assert done.returncode == 2
    assert [line.partition("=")[0] for line in done.stderr.splitlines()] == ["data.train_batch_size"]
    done = run(tmp_path, *TINY, *files, main="check", HF_HUB_OFFLINE="1")
    assert "data.train_files" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("trainer.total_training_steps=0", "--cfg", "job"),
        ("--cfg", "job", "trainer.total_training_steps=0"),
        ("trainer.total_training_steps=0", "--config-dir", "configs"),
        ("-m", "trainer.total_training_steps=0,-1"),
    ],
)
def test_a_check_takes_options_where_a_run_does(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "configs").mkdir()
    done = run(tmp_path, *arguments, main="check")
    assert "unrecognized" not in done.stderr and "Traceback" not in done.stderr
    assert "total_training_steps: 0" in done.stdout or "trainer.total_training_steps=0: must" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]


@pytest.mark.parametrize(
    ("recipe", "wrong", "printed"),
    [
        (RECIPE.name, "trainer.nnode=1", "Did you mean trainer.nnodes?"),
        *((file.parent.name, "data.train_batch_size=7", "multiple of") for file in RECIPES.glob("*/run.sh")),
    ],
)
def test_a_recipe_refuses_a_wrong_setting_before_it_makes_anything(
    tmp_path: Path, recipe: str, wrong: str, printed: str
) -> None:
    script = str(RECIPES / recipe / "run.sh")
    hub = {"HF_HUB_OFFLINE": "0"}  # the recipes for clusters name models of the hub, and none is read
    done = ended(tmp_path, script, wrong, PYTHON=sys.executable, DATA=str(tmp_path / "data"), **hub)
    assert done.returncode == 2 and printed in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.iterdir())
