"""`seamless-verl plan --optimize`: plans as text and JSON, and what is refused with exit code 2."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from seamless_verl.cli.main import main
from seamless_verl.tools.compare.arms import JobFacts, Machines, arm_overrides, parse_arms
from seamless_verl.tools.simulator.calibration import Calibration, RatesSource
from seamless_verl.tools.simulator.machine import MachineProfile
from seamless_verl.tools.simulator.optimize import Prediction, Search
from seamless_verl.tools.simulator.scenario import SimulatedWorkload

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
}
FEW = ["plan", "--optimize", "--steps", "5"]


def calibration(folder: Path) -> Path:
    found = Calibration(
        MachineProfile(), SimulatedWorkload(), 32, 10, 2, 1, 2, RatesSource.MEAN, {"train": 0.1}, {"step_s": 1.0}
    )
    (folder / "c.json").write_text(found.to_json())
    return folder / "c.json"


def published(folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(MODEL))
    return [
        *("--device", "h800", "platform=accelerator", "model_engine=megatron", "algorithm.adv_estimator=grpo"),
        *(f"actor_rollout_ref.model.path={folder}", "data.train_batch_size=32", "data.max_response_length=2048"),
        "actor_rollout_ref.rollout.n=4",
    ]


def test_a_calibration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--calibration", str(calibration(tmp_path)), "--machines", "1x2"]
    arguments = ["plan", "platform=cpu", *FEW[1:], *given, "data.train_batch_size=16"]  # settings may stand anywhere
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 x 2 devices, times of ")
    for layout in ("colocated", "multiplexed", "disaggregated"):
        assert layout in text
    assert "'seamless.resources=[{count: 1, devices: 2, tags: [train, rollout]}]'" in text
    assert "with the recipe, the config file or the settings of your run for JOB" in text
    assert text.splitlines()[-1].startswith("seamless-verl compare JOB 'seamless.resources=")
    assert main([*arguments, "--json", "--top", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machines"] == {"count": 1, "devices": 2}
    first, second = found["plans"]
    assert (first["layout"], first["why_not_first"]) == ("colocated", "")
    assert second["why_not_first"] and second["tokens_per_s"] > 0


def test_the_comparison_that_is_printed_runs_the_best_plan_of_each_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arms are parsed, and each of them has the layout that it is called by, on as many devices as are planned,
    whatever the job's own fields of machines are."""
    job = ["data.train_batch_size=16", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    job += ["actor_rollout_ref.model.path=some/model", "trainer.nnodes=1", "trainer.n_gpus_per_node=2"]
    plans = [*FEW, "--calibration", str(calibration(tmp_path)), "--machines", "1x2", "platform=cpu", *job]
    assert main(plans) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    words = ["seamless-verl", "compare", "platform=cpu", *job]
    assert command[: len(words)] == words
    arms_at = command.index("--arms")
    assert main(["plan", *command[2:arms_at]]) == 0, "the job is checked without an arm, too"
    capsys.readouterr()
    assert command[arms_at + 2 :] == ["--seeds", "1", "--rounds", "3"]
    facts = JobFacts(Machines(1, 2), 16, 8, "gloo", by_tags=True)
    arms = parse_arms(command[arms_at + 1])
    assert sorted(arm.name for arm in arms) == ["colocated", "disaggregated", "multiplexed"]
    for arm in arms:
        assert main(["plan", *command[2:arms_at], *arm_overrides(arm, facts)]) == 0
        assert re.match(rf"{arm.name}: \d machines?, 2 devices", capsys.readouterr().out)


def test_a_recipe_is_compared_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["--config-dir", str(ROOT / "recipes/arithmetic_grpo"), "--config-name", "config"]
    given = ["--calibration", str(calibration(tmp_path)), "--machines", "1x2", "actor_rollout_ref.rollout.n=4"]
    search = "hydra.searchpath=[pkg://seamless_verl.config]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(tmp_path))
        assert main([*FEW, *given, *recipe, search]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:4] == ["seamless-verl", "compare", recipe[1], "actor_rollout_ref.rollout.n=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(tmp_path))
        assert main([*FEW, *given[:-1], *recipe, search]) == 2
    assert "actor_rollout_ref.rollout.n='8': the calibrated run had 4" in capsys.readouterr().err


def test_a_step_is_divided_only_as_its_mini_batches_allow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*FEW, "--calibration", str(calibration(tmp_path)), "--machines", "1x2", "--json", "--top", "50"]
    for mini, updates in ((16, {1}), (8, {1, 2}), (4, {1, 2, 4})):
        job = ["data.train_batch_size=16", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"]
        assert main([*given, *job]) == 0
        assert {plan["updates"] for plan in json.loads(capsys.readouterr().out)["plans"]} == updates


@pytest.mark.parametrize(("given", "kept"), [([], False), (["seamless.weights.kv=keep"], True)])
def test_a_cache_that_updates_keep_is_simulated_as_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], kept: bool
) -> None:
    searches, search = list[Search](), Search.run

    def run(self: Search, *args: Any, **more: Any) -> list[Prediction]:
        searches.append(self)
        return search(self, *args, **more)

    monkeypatch.setattr(Search, "run", run)
    assert main([*FEW, "--calibration", str(calibration(tmp_path)), "--machines", "1x2", *given]) == 0
    assert [one.keep_cache for one in searches] == [kept]


def test_published_figures_are_named_with_their_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW, "--machines", "2x4", "--top", "3", *published(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "arXiv 2412.19437" in text and "assumed:" in text
    assert "GB" in text and "TP 1 x PP 1" in text


def test_the_settings_of_a_plan_give_that_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a memory for which the trainer must be divided, and devices that only generate."""
    memory = ["seamless.device_memory_gb=32"]
    arguments = [*FEW, "--machines", "2x4", "--top", "50", "--json", *published(tmp_path), *memory]
    assert main(arguments) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    chosen = next(plan for plan in plans if plan["layout"] == "multiplexed" and plan["trainer"] != "TP 1 x PP 1")
    assert main(["plan", *published(tmp_path)[2:], *memory, *shlex.split(chosen["settings"])]) == 0
    text = capsys.readouterr().out
    tensor, pipeline = chosen["trainer"].split(" x ")
    assert f"{tensor} x {pipeline} x CP 1" in text and text.startswith("multiplexed")
    assert "checkpoint_engine.backend=nccl" in chosen["settings"]


def test_arguments_of_the_search_are_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "h100", "--steps", "12", "--top", "3", "platform=cpu"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "seamless-verl: --device='h100': is read by the search alone. Add --optimize to search, or leave it out",
        "seamless-verl: --top='3': is read by the search alone. Add --optimize to search, or leave it out",
    ]


def test_what_cannot_be_searched_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, device = ["--calibration", str(calibration(tmp_path)), "--machines", "1x2"], published(tmp_path)
    for arguments, message in (
        ([], "--optimize: needs the times of a device, or of a run of yours. Add --device NAME (a100, "),
        ([*given, "--device", "h100"], "--device='h100'"),
        ([*given, "--machines", "2"], "--machines='2'"),
        ([*given, "--machines", "0x8"], "--machines='0x8'"),
        ([*given, "--steps", "1"], "--steps=1"),
        ([*given, "--top", "0"], "--top=0"),
        (["--calibration", str(tmp_path / "none"), "--machines", "1x2"], "--calibration="),
        (["--device", "h9", "--machines", "1x2"], "--device='h9'"),
        (["--machines", "1x2", *device, "seamless.device_memory_gb=4"], "and has 4.0 GB"),
    ):
        assert main(["plan", "--optimize", *arguments]) == 2, arguments
        errors = capsys.readouterr().err
        assert message in errors and errors.count("\n") == 1, errors


def test_another_workload_than_the_calibrated_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lengths and its batch are those that were measured: what would not be read is named."""
    given = [*FEW, "--calibration", str(calibration(tmp_path)), "--machines", "1x2"]
    lengths = ["--median", "100", "--sigma", "0.5", "--turns", "2", "--tool-s", "1", "--tool-tokens", "9"]
    assert main([*given, *lengths, "data.train_batch_size=32", "actor_rollout_ref.rollout.n=8"]) == 2
    lines = capsys.readouterr().err.splitlines()
    options = ["--median=100", "--sigma=0.5", "--turns=2", "--tool-s=1.0", "--tool-tokens=9"]
    way_out = "Leave it out, or give --device instead of --calibration"
    assert lines[:5] == [
        f"seamless-verl: {option}: is for --device: a calibration has the lengths of its run. {way_out}"
        for option in options
    ]
    assert [line.partition(": the calibrated run had ")[::2] for line in lines[5:]] == [
        (
            "seamless-verl: data.train_batch_size='32'",
            "16, and its times are of that. Leave it out, or calibrate a run that has it",
        ),
        (
            "seamless-verl: actor_rollout_ref.rollout.n='8'",
            "4, and its times are of that. Leave it out, or calibrate a run that has it",
        ),
    ]
    assert main([*given, "data.train_batch_size=16", "actor_rollout_ref.rollout.n=4"]) == 0, "those of the run"


def test_updates_that_compute_the_prompt_of_a_group_once_are_faster_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of groups of 4, with prompts of 2,000 tokens and answers of some 500: three of four prompts are not computed."""
    given = [*FEW, *published(tmp_path), "--machines", "1x2", "--prompt-tokens", "2000", "data.max_prompt_length=4000"]
    given[given.index("platform=accelerator")] = "platform=accelerator_without_te"
    speeds = {}
    for setting in ("auto", "never"):
        assert main([*given, f"seamless.shared_prefixes={setting}"]) == 0
        said = capsys.readouterr().out.splitlines()[1]
        assert main([*given, "--json", f"seamless.shared_prefixes={setting}"]) == 0
        speeds[said] = json.loads(capsys.readouterr().out)["plans"][0]["tokens_per_s"]
    (shared, fast), (alone, slow) = speeds.items()
    assert alone == "updates: each sequence is computed alone (seamless.shared_prefixes=never)"
    assert re.search(r"of a group's 4 sequences is computed once .*, [56]\d% fewer tokens", shared)
    assert fast > 1.2 * slow
