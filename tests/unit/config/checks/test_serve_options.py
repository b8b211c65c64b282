"""What would end a run a minute after its start is refused before it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.config import assert_refused, refused, tiny_plain, tiny_run

from seamless_verl.config import preflight
from seamless_verl.config.checks import serve_options
from seamless_verl.config.checks.serve_options import check_engine_options
from seamless_verl.config.engine_kwargs import KEY, given
from seamless_verl.config.model import locate
from seamless_verl.config.settings import Settings

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "key", "value", "way_out"),
    [
        (f"+{KEY}.max_num_batched_tokenz=4", f"{KEY}.max_num_batched_tokenz", 4, "max-num-batched-tokens"),
        (f"+{KEY}.no_such_option=1", f"{KEY}.no_such_option", 1, "vllm serve --help=all"),
        (f"+{KEY}.no_such_option=0", f"{KEY}.no_such_option", 0, "vllm serve --help=all"),
        (f"+{KEY}.reasoning-parser=nosuch", f"{KEY}.reasoning_parser", "nosuch", "qwen3"),
        (f"{KEY}=--enforce-eager", KEY, "--enforce-eager", f"Write +{KEY}.<option>=<value>"),
        (f"{ROLLOUT}.max_num_seqs=abc", f"{ROLLOUT}.max_num_seqs", "abc", f"Set {ROLLOUT}.max_num_seqs=1"),
        (f"{ROLLOUT}.gpu_memory_utilization=1.5", f"{ROLLOUT}.gpu_memory_utilization", 1.5, "=0.5"),
        ("trainer.save_freq=x", "trainer.save_freq", "x", "Set trainer.save_freq=-1"),
        ("trainer.save_freq=null", "trainer.save_freq", None, "Add trainer.save_freq=..."),
        ("trainer.test_freq=1.5", "trainer.test_freq", 1.5, "Set trainer.test_freq=-1"),
    ],
)
def test_what_an_engine_or_verl_would_stumble_over(
    tmp_path: Path, override: str, key: str, value: object, way_out: str
) -> None:
    assert_refused(tiny_run(tmp_path, override), key, value, way_out)


def test_one_option_in_both_spellings(tmp_path: Path) -> None:
    (problem,) = refused(tiny_run(tmp_path, f"+{KEY}.max-model-len=8", f"+{KEY}.max_model_len=9"))
    assert (problem.key, problem.value) == (KEY, "max-model-len")


@pytest.mark.parametrize(
    "override",
    [
        f"+{KEY}.enforce-eager=true",
        f"+{KEY}.no-enforce-eager=true",
        f"+{KEY}.nothing_known=null",
        f"+{KEY}.disable_log_requests=false",
        f"+{KEY}.reasoning_parser=''",
        f"+{KEY}.tool_call_parser=hermess",
        f"{ROLLOUT}.max_num_batched_tokens=16k",
        f"+{KEY}.kv_cache_memory_bytes=1000000000",
        f"+{KEY}.scheduler_cls=mine.Scheduler",
        f"+{KEY}.reasoning_parser=qwen3",
        f"{ROLLOUT}.gpu_memory_utilization=1",
        "trainer.save_freq=-1",
    ],
)
def test_what_they_take(tmp_path: Path, override: str) -> None:
    preflight(tiny_plain(tmp_path, override), devices=1, accelerator=False)


def test_a_parser_that_a_plugin_may_bring_is_left_to_it(tmp_path: Path) -> None:
    own = (f"+{KEY}.reasoning_parser=mine", f"+{KEY}.reasoning_parser_plugin=mine.py")
    preflight(tiny_plain(tmp_path, *own), devices=1, accelerator=False)


@pytest.mark.parametrize(("kwargs", "value"), [({"a-b": 1}, 1), ({"a_b": 2}, 2), ({}, None), (None, None), ("x", None)])
def test_an_option_is_found_under_both_spellings(kwargs: object, value: object) -> None:
    assert given(kwargs, "a_b") == value


def test_dotted_options_of_one_group_are_several() -> None:
    several = {"speculative-config.model": "x", "speculative-config.num_speculative_tokens": 3}
    tree = {"actor_rollout_ref": {"rollout": {"name": "vllm", "engine_kwargs": {"vllm": several}}}}
    assert check_engine_options(Settings.of(tree, devices=1, accelerator=False)) == []


def test_a_parser_that_an_installed_plugin_may_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = [EntryPoint("mine", "mine.parsers:register", serve_options.PLUGINS)]
    monkeypatch.setattr(serve_options, "entry_points", lambda group: brought)
    preflight(tiny_plain(tmp_path, f"+{KEY}.reasoning_parser=mine"), devices=1, accelerator=False)


def test_a_hubs_model_beside_downloads_of_its_owner_is_left_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    downloaded = tmp_path / "Qwen" / "Qwen3-4B"
    downloaded.mkdir(parents=True)
    (downloaded / "config.json").write_text("{}")
    assert locate("model.path", "Qwen/Qwen3-nosuch") is None


def test_a_model_that_is_not_in_a_folder_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "runs").mkdir()
    config = tiny_plain(tmp_path, "actor_rollout_ref.model.path=runs/nope")
    assert_refused(config, "actor_rollout_ref.model.path", "runs/nope", "hf download runs/nope")
