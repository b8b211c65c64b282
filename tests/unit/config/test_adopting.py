"""What follows from the `seamless:` node or a joined cluster is set in verl's fields, unless the user set these."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from support.config import TINY, compose_ours, refused, tiny_run

from seamless_verl.config.adopting import (
    COMMAND,
    DPPO,
    LOSS_MODE,
    MEGATRON_KEYS,
    PARTS,
    PIN_VARIABLE,
    adopt,
    adopt_base_weights,
    adopt_cluster,
    adopt_correction,
    adopt_drafts,
    adopt_engine,
    adopt_parsers,
)
from seamless_verl.config.checks import find_problems, preflight
from seamless_verl.config.checks.devices import check_cores, check_devices
from seamless_verl.config.checks.hosts import OF_THE_CLUSTER, RAY_INIT, check_joined
from seamless_verl.config.checks.model import check_adapter
from seamless_verl.config.roles import OWN_DRAFTS, joins_cluster, starts_cluster
from seamless_verl.config.settings import Settings
from seamless_verl.platform.cores import PIN
from seamless_verl.run_folder import writes_locally

ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
INNER = f"{ENGINE}.structured_outputs_config.reasoning_parser"
ON = ("trainer.v1.trainer_mode=seamless", "seamless.gateway.enabled=true")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*ON, 'seamless.gateway.options=["--reasoning-parser=qwen3"]'), "qwen3"),
        ((*ON, 'seamless.gateway.options=["--reasoning-parser","qwen3"]'), "qwen3"),
        ((*ON, 'seamless.gateway.options=["--reasoning_parser=qwen3"]', f"+{ENGINE}.reasoning_parser=qwen3"), "qwen3"),
        ((*ON, 'seamless.gateway.options=["--reasoning_parser=qwen3"]', f"+{INNER}=qwen3"), None),
        ((*ON, 'seamless.gateway.options=["--tool-call-parser=hermes"]'), None),
        (('seamless.gateway.options=["--reasoning-parser=qwen3"]',), None),
    ],
)
def test_engines_read_reasoning_as_the_gateway_does(
    tmp_path: Path, overrides: tuple[str, ...], expected: str | None
) -> None:
    config = tiny_run(tmp_path, "trainer.device=cpu", *overrides)
    adopt_parsers(config)
    assert OmegaConf.select(config, f"{ENGINE}.reasoning_parser") == expected


@pytest.mark.parametrize("key", [f"{ENGINE}.reasoning_parser", f"{ENGINE}.reasoning-parser", INNER])
def test_engines_that_read_it_otherwise_are_refused(tmp_path: Path, key: str) -> None:
    options = 'seamless.gateway.options=["--reasoning-parser=qwen3"]'
    config = tiny_run(tmp_path, "trainer.device=cpu", *ON, options, f"+{key}=glm45")
    (problem,) = refused(config)
    assert (problem.value, problem.reason.split(",")[0]) == ("--reasoning-parser=qwen3", "engines have glm45")


LORA, FORMAT = "actor_rollout_ref.model.lora", "actor_rollout_ref.rollout.load_format"
ADAPTER = (f"++{LORA}.rank=8", "actor_rollout_ref.actor.megatron.vanilla_mbridge=False")


def test_engines_read_the_base_of_an_adapter_from_its_files(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *ADAPTER)
    words = adopt(config, ADAPTER)
    assert words is not None and words.splitlines()[0].startswith(f"chosen: {FORMAT}=safetensors, since engines")
    assert OmegaConf.select(config, FORMAT) == "safetensors"
    assert find_problems(Settings.of(config, devices=1, accelerator=False), [check_adapter]) == []
    assert adopt_base_weights(config, ADAPTER) is None, "what is chosen stays"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (*ADAPTER, f"{FORMAT}=dummy"),
        (*ADAPTER, f"{FORMAT}=auto"),
        (*ADAPTER, f"++{LORA}.merge=True"),
        (*ADAPTER, "trainer.v1.trainer_mode=sync"),
    ],
)
def test_engines_read_what_they_are_told_to(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = tiny_run(tmp_path, *overrides)
    before = OmegaConf.select(config, FORMAT)
    assert adopt_base_weights(config, overrides) is None and OmegaConf.select(config, FORMAT) == before


OURS = "trainer.v1.trainer_mode=seamless"
LOSS = (OURS, "seamless.correction.loss=dppo")
CLIP = "actor_rollout_ref.actor.clip_ratio_high"


def test_a_loss_is_set_where_verl_has_its_defaults(tmp_path: Path) -> None:
    config = compose_ours(*TINY, *LOSS)
    assert {key: OmegaConf.select(config, key) for key in DPPO} == {key: verls for key, (verls, _) in DPPO.items()}
    adopt_correction(config)
    assert {key: OmegaConf.select(config, key) for key in DPPO} == {key: value for key, (_, value) in DPPO.items()}
    tiny = tiny_run(tmp_path, *LOSS, "seamless.max_staleness=4")
    adopt_correction(tiny)
    assert preflight(tiny, devices=1, accelerator=False) == []


def test_what_the_user_set_of_a_loss_stays(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LOSS, f"{CLIP}=0.3", "actor_rollout_ref.actor.clip_ratio=0.2")
    adopt_correction(config, ["actor_rollout_ref.actor.clip_ratio=0.2"])
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.15, 0.3)


def test_another_loss_beside_it_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LOSS, "actor_rollout_ref.actor.policy_loss.loss_mode=m2po")
    adopt_correction(config)
    (problem,) = refused(config)
    assert problem.key == "seamless.correction.loss" and "loss_mode=m2po" in problem.reason


def test_verls_trainers_keep_their_loss(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.v1.trainer_mode=sync", "seamless.correction.loss=dppo")
    before = OmegaConf.to_container(config)
    adopt_correction(config)
    assert OmegaConf.to_container(config) == before
    preflight(config, devices=1, accelerator=False)


def chosen(config: DictConfig) -> tuple[str | None, int, str]:
    """The correction, the bound, and verl's loss."""
    loss = OmegaConf.select(config, LOSS_MODE) or "vanilla"
    return config.seamless.correction.loss, config.seamless.max_staleness, loss


def test_by_default_old_tokens_are_trained_by_a_loss_that_corrects(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, OURS)
    words = adopt_correction(config)
    assert words is not None and "loss=dppo" in words and "max_staleness=4" in words
    assert chosen(config) == ("dppo", 4, "dppo_tv")
    assert adopt_correction(config) is None, "what is chosen stays"
    assert preflight(config, devices=1, accelerator=False) == []


CORRECTION = "algorithm.rollout_correction"


ALL_THE_SAME = f"{CLIP}=0.28 is set (seamless.correction.loss=dppo asks for DPPO's all the same)"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((f"{CLIP}=0.28",), ALL_THE_SAME),
        ((f"{LOSS_MODE}=gspo",), f"{LOSS_MODE}=gspo is set;"),
        ((f"{CORRECTION}.bypass_mode=False",), f"{CORRECTION}.bypass_mode=False is set;"),
        (
            (f"{CLIP}=0.28", f"{LOSS_MODE}=gspo", f"{CORRECTION}.rollout_is=token"),
            f"{LOSS_MODE}=gspo, {CLIP}=0.28 and 1 more are set;",
        ),
        (("seamless.tokens.policy=mask_older_than",), "seamless.tokens.policy=mask_older_than is set (seamless."),
        (("distillation.enabled=True",), "distillation.enabled=True is set;"),
        (("seamless.max_staleness=0", f"{CLIP}=0.28"), "seamless.max_staleness=0 trains nothing old ("),
    ],
)
def test_what_decided_for_the_runs_own_loss_is_named(tmp_path: Path, overrides: tuple[str, ...], why: str) -> None:
    words = adopt_correction(tiny_run(tmp_path, OURS, *overrides), overrides)
    assert words is not None and f"chosen: seamless.correction.loss=null, since {why}" in words


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{LOSS_MODE}=gspo",), (None, 1, "gspo")),
        ((f"{LOSS_MODE}=vanilla",), (None, 1, "vanilla")),
        ((f"{LOSS_MODE}=m2po",), (None, 4, "m2po")),
        ((f"{CORRECTION}.rollout_is=token",), (None, 4, "vanilla")),
        ((f"{CLIP}=0.28",), (None, 1, "vanilla")),
        (("actor_rollout_ref.actor.clip_ratio=0.2",), (None, 1, "vanilla")),
        (("actor_rollout_ref.actor.clip_ratio_c=10",), (None, 1, "vanilla")),
        ((f"{CORRECTION}.bypass_mode=False",), (None, 1, "vanilla")),
        ((f"{CORRECTION}.bypass_mode=True",), ("dppo", 4, "dppo_tv")),
        (("seamless.max_staleness=0",), (None, 0, "vanilla")),
        (("seamless.max_staleness=2",), ("dppo", 2, "dppo_tv")),
        (("seamless.correction.loss=null",), (None, 1, "vanilla")),
        (("seamless.tokens.policy=mask_older_than",), (None, 1, "vanilla")),
    ],
)
def test_a_run_that_says_how_it_trains_keeps_that(
    tmp_path: Path, overrides: tuple[str, ...], expected: tuple[str | None, int, str]
) -> None:
    config = tiny_run(tmp_path, OURS, *overrides)
    adopt_correction(config, overrides)
    assert chosen(config) == expected
    assert preflight(config, devices=1, accelerator=False) == [], "what was chosen needs no warning"


ADDRESS = "10.0.0.1:6379"
CPU = ("platform=cpu",)


def settings_of(config: object, devices: int | None = None) -> Settings:
    return Settings.of(config, devices=devices, accelerator=False)  # type: ignore[arg-type]


def test_what_the_cpu_platform_sets_of_a_cluster_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_ours(*CPU)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    adopt_cluster(config)
    assert config == compose_ours(*CPU), "a run that starts its own cluster"
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    assert {problem.key for problem in check_joined(settings_of(config))} > {f"{RAY_INIT}.num_cpus"}
    adopt_cluster(config)
    assert check_joined(settings_of(config)) == []
    assert [OmegaConf.select(config, f"{RAY_INIT}.{name}") for name in OF_THE_CLUSTER] == [None] * len(OF_THE_CLUSTER)
    assert OmegaConf.select(config, COMMAND) is None and OmegaConf.select(config, PIN_VARIABLE) == "0"
    assert PIN_VARIABLE.endswith(f".{PIN}")


def test_what_the_user_set_of_a_cluster_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    overrides = (
        f"{RAY_INIT}.num_cpus=4",
        f"+{RAY_INIT}.resources={{a: 1}}",
        f"{COMMAND}=python",
        f"+{PIN_VARIABLE}='1'",
    )
    config = compose_ours(*CPU, *overrides)
    adopt_cluster(config, overrides)
    found = {problem.key: problem.way_out for problem in check_joined(settings_of(config))}
    assert found == {
        f"{RAY_INIT}.num_cpus": "Remove it, or start the nodes with ray start --num-cpus",
        f"{RAY_INIT}.resources": "Remove it, or start the nodes with ray start --resources",
    }
    assert OmegaConf.select(config, COMMAND) == "python" and OmegaConf.select(config, PIN_VARIABLE) == "1"


def test_an_address_among_the_settings_joins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = compose_ours(*CPU, f"+{RAY_INIT}.address=auto")
    adopt_cluster(config)
    assert check_joined(settings_of(config)) == []


def test_a_cluster_of_its_own_is_joined_by_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`local` starts one, whatever RAY_ADDRESS names and whatever runs here."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(ADDRESS)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    config = tiny_run(tmp_path, f"{RAY_INIT}.num_cpus=4", f"{RAY_INIT}.address=local")
    for variable in ("", "local", ADDRESS):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert check_joined(settings_of(config)) == [] and writes_locally(config)
        assert not joins_cluster(settings_of(config)) and starts_cluster(settings_of(config))
    unnamed = tiny_run(tmp_path)
    for variable, joins, starts in (("local", False, True), ("", False, False), (ADDRESS, True, False)):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert joins_cluster(settings_of(unnamed)) is joins and starts_cluster(settings_of(unnamed)) is starts


def test_an_accelerators_config_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    config = compose_ours("platform=accelerator", f"{RAY_INIT}.num_cpus=4")
    adopt_cluster(config)
    assert [problem.key for problem in check_joined(settings_of(config))] == [f"{RAY_INIT}.num_cpus"]


def test_cores_of_this_machine_are_not_those_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(tmp_path, *CPU, "seamless.cpu.devices=999", "trainer.n_gpus_per_node=500")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    alone = find_problems(settings_of(config, devices=2), [check_devices, check_cores])
    assert {problem.key for problem in alone} == {"trainer.n_gpus_per_node", "seamless.cpu.devices"}
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    assert find_problems(settings_of(config, devices=2), [check_devices, check_cores]) == []


@pytest.mark.parametrize(("engine", "has"), [("megatron", True), ("dp", False)])
def test_another_engine_is_not_given_megatrons_settings(engine: str, has: bool) -> None:
    """Of the CPU platform's file, which sets them for Megatron."""
    config = compose_ours("platform=cpu", f"model_engine={engine}")
    parts = [OmegaConf.select(config, part) for part in PARTS]
    assert all("megatron" in part for part in parts)
    adopt_engine(config)
    assert ["megatron" in part for part in parts] == [has] * len(parts)


def test_what_is_taken_back_of_megatron_is_what_the_platform_has_set() -> None:
    config = compose_ours("platform=cpu", "model_engine=dp")
    for part in PARTS:
        assert set(OmegaConf.select(config, f"{part}.megatron")) == set(MEGATRON_KEYS)


@pytest.mark.parametrize(
    "override",
    [
        "+{}.tensor_model_parallel_size=2",
        "{}.vanilla_mbridge=false",
        "{}.override_transformer_config.apply_rope_fusion=true",
    ],
)
def test_what_the_user_set_for_megatron_stays_to_be_refused(override: str) -> None:
    override = override.format("actor_rollout_ref.actor.megatron")
    config = compose_ours("platform=cpu", "model_engine=dp", override)
    adopt_engine(config, [override])
    key = override.lstrip("+").partition("=")[0]
    assert OmegaConf.select(config, key) is not None
    assert set(OmegaConf.select(config, "actor_rollout_ref.actor.megatron")) == {key.split(".")[3]}
    assert "megatron" not in OmegaConf.select(config, "critic")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("trainer.v1.trainer_mode=seamless", "seamless.drafts=suffix"), OWN_DRAFTS),
        (("trainer.v1.trainer_mode=seamless",), None),
        (("trainer.v1.trainer_mode=sync", "seamless.drafts=suffix"), None),
    ],
)
def test_engines_draft_where_they_are_asked_to(
    tmp_path: Path, overrides: tuple[str, ...], expected: dict[str, object] | None
) -> None:
    config = tiny_run(tmp_path, *overrides)
    adopt_drafts(config)
    assert OmegaConf.select(config, f"{ENGINE}.speculative_config") == expected
