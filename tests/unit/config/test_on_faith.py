"""What a run uses that no test trains is said, and the table of it is kept true by the tests that train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.config import tiny_run, write_model

from seamless_verl.config.on_faith import (
    GPU,
    LINE_BEGINS,
    MODELS,
    TRAINED_MIXTURES,
    TRAINED_VISION,
    UNTRAINED,
    Untrained,
    on_faith,
)
from seamless_verl.config.settings import Settings

TESTS = Path(__file__).parents[2]
FOLDERS = ("integration/runs", "integration/recipes", "faults")
TRAINING = [*(file for folder in FOLDERS for file in (TESTS / folder).glob("*.py")), TESTS / "support/job.py"]
"""Files that run whole jobs; those of a part alone train no feature."""
CHOICES = [one for one in UNTRAINED if any(isinstance(value, str) for value in one.known)]


def said(folder: Path, *overrides: str, accelerator: bool = False) -> str | None:
    return on_faith(Settings.of(tiny_run(folder, *overrides), devices=1, accelerator=accelerator))


def test_a_job_of_what_tests_train_says_nothing(tmp_path: Path) -> None:
    assert said(tmp_path) is None
    assert said(tmp_path, accelerator=True) == f"{LINE_BEGINS}{GPU}"
    assert said(tmp_path, "trainer.v1.trainer_mode=sync", "distillation.enabled=True") is None


def test_what_no_test_trains_is_one_line(tmp_path: Path) -> None:
    write_model(tmp_path / "moe", num_experts=4)
    megatron = "actor_rollout_ref.actor.megatron"
    line = said(
        tmp_path,
        *(f"{megatron}.param_offload=True", f"{megatron}.expert_model_parallel_size=4"),
        *("algorithm.adv_estimator=rloo", f"actor_rollout_ref.model.path={tmp_path / 'moe'}"),
    )
    assert line == (
        f"{LINE_BEGINS}expert parallelism (expert_model_parallel_size=4), offloading (param_offload=True), "
        "an estimator (adv_estimator=rloo), a mixture of experts"
    )


def test_the_mixture_that_a_test_trains_needs_no_word(tmp_path: Path) -> None:
    write_model(tmp_path / "moe", num_experts=4, model_type="qwen3_moe", norm_topk_prob=True)
    assert said(tmp_path, f"actor_rollout_ref.model.path={tmp_path / 'moe'}") is None


@pytest.mark.parametrize("kind", TRAINED_MIXTURES)
def test_a_mixture_that_needs_no_word_is_made_and_trained(kind: str) -> None:
    """By the fixture `moe`, or a function of support/mixtures.py; neither is imported here, since both need torch."""
    made_by, maker = {
        "qwen3_moe": ("seamless_verl/tiny/models.py", "moe: Path"),
        "mixtral": ("tests/support/mixtures.py", "make_mixtral("),
        "glm4_moe": ("tests/support/mixtures.py", "make_glm("),
    }[kind]
    config = f"{kind.title().replace('_', '')}Config"
    assert config in (TESTS.parent / made_by).read_text(encoding="utf-8")
    assert any(maker in file.read_text(encoding="utf-8") for file in TRAINING)


def test_images_need_no_word_where_a_test_trains_such_a_model(tmp_path: Path) -> None:
    said_of = {}
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        write_model(tmp_path / kind, model_type=kind, vision_config={"depth": 2})
        path = f"actor_rollout_ref.model.path={tmp_path / kind}"
        fsdp = ("model_engine=dp", "actor_rollout_ref.actor.strategy=fsdp2")
        said_of[kind] = said(tmp_path, path), said(tmp_path, path, *fsdp)
    images = f"{LINE_BEGINS}images"
    assert said_of == {"qwen2_5_vl": (images, None), "qwen3_vl": (images, images)}


@pytest.mark.parametrize("kind", TRAINED_VISION)
def test_images_that_need_no_word_are_trained(kind: str) -> None:
    maker = {"qwen2_5_vl": "make_qwen_vision("}[kind]
    assert any(maker in file.read_text(encoding="utf-8") for file in TRAINING)


def values_in_tests(key: str) -> set[str]:
    """The values that tests which train give a setting, as they are written; a name is that of a parameter."""
    whole = re.escape(key).replace(r"\.", r"(?:\.|__)")
    *_, node, last = ("", *key.split("."))
    behind = rf"|\{{{node.upper()}\}}(?:\.|__)?{last}" if node else ""  # as f"{{MEGATRON}}vanilla_mbridge"
    name = rf"(?<![\w.]){whole}{behind}"
    given = re.compile(rf"(?:{name})(?:=|[\"']?[\]:=,]+ *)[\"']?([\w.\-]+)")
    return {value for file in TRAINING for value in given.findall(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("one", UNTRAINED, ids=lambda one: one.key)
def test_no_test_trains_what_the_table_calls_untrained(one: Untrained) -> None:
    known = {str(value) for value in one.known} | {"name", "loss"}  # of a parametrized test: see below
    assert values_in_tests(one.key) <= known, f"take these values of {one.key} into UNTRAINED as known, or its row out"


@pytest.mark.parametrize(
    "value", [v for one in CHOICES for v in one.known if isinstance(v, str) and v not in ("naive", "vanilla")]
)
def test_what_the_table_calls_trained_is_in_a_test_that_trains(value: str) -> None:
    """`naive` and `vanilla` are verl's defaults, and `dppo_tv` is what our own default sets."""
    word = {"dppo_tv": "correction.loss=dppo"}.get(value, value)
    assert any(re.search(rf"\b{re.escape(word)}\b", file.read_text(encoding="utf-8")) for file in TRAINING)


def test_no_test_trains_such_a_model() -> None:
    for key in MODELS:
        named = [file.name for file in TRAINING if re.search(rf"\b{key}\b", file.read_text(encoding="utf-8"))]
        assert named == [], f"take {key} out of MODELS"
