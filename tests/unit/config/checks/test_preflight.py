"""Each bad input is refused with its key, its value and a way out; a good one passes."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from support.config import assert_refused, compose_ours, refused, tiny_run, write_model

from seamless_verl.config import SeamlessConfig, checks, preflight, usable_cores
from seamless_verl.config.checks import CHECKS, Problem, Settings, find_problems
from seamless_verl.config.checks.model import check_adapter, check_context_parallel, check_layers
from seamless_verl.config.checks.modes import check_seamless
from seamless_verl.errors import ConfigError, ConfigErrors

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ROUTES, REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay", f"{ACTOR}.megatron.router_replay.mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
PATH = "actor_rollout_ref.model.path"
TORCH_LAYERS = "actor_rollout_ref.model.external_lib=seamless_verl.platform.engine_without_te"
POOL = (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=gloo")
CRITIC_MINI = "critic.ppo_mini_batch_size"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    *POOL,
    "trainer.v1.separate_async.parameter_sync_step=2",
)
STATIC = (
    f"{ACTOR}.use_dynamic_bsz=False",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.v1.trainer_mode=sync",),
        ("trainer.v1.trainer_mode=colocate_async",),
        STATIC,
    ],
)
def test_a_tiny_run_passes(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert preflight(tiny_run(tmp_path, *overrides), devices=1, accelerator=False) == []


@pytest.mark.parametrize("overrides", [SEPARATE, POOL, (*POOL, "trainer.v1.seamless.parameter_sync_step=2")])
def test_a_standalone_pool_passes_on_two_devices(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = tiny_run(tmp_path, *overrides)
    assert preflight(config, devices=2, accelerator=False) == []
    assert preflight(config, devices=None, accelerator=False) == []


@pytest.mark.parametrize(
    ("overrides", "key", "value", "way_out"),
    [
        ("trainer.v1.trainer_mode=sinc", "trainer.v1.trainer_mode", "sinc", "Did you mean sync?"),
        (
            f"{ROLLOUT}.logprobs_mode=raw_logits",
            f"{ROLLOUT}.logprobs_mode",
            "raw_logits",
            f"Set {ROLLOUT}.logprobs_mode=processed_logprobs or raw_logprobs",
        ),
        (
            f"+{ROLLOUT}.engine_kwargs.vllm.logprobs-mode=processed_logits",
            f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode",
            "processed_logits",
            "processed_logprobs or raw_logprobs",
        ),
        (
            "trainer.v1.trainer_mode=x",
            "trainer.v1.trainer_mode",
            "x",
            "colocate_async, separate_async, seamless",
        ),
        ("algorithm.adv_estimator=grppo", "algorithm.adv_estimator", "grppo", "Did you mean grpo?"),
        ("algorithm.kl_ctrl.type=fix", "algorithm.kl_ctrl.type", "fix", "Did you mean fixed?"),
        (f"{ACTOR}.policy_loss.loss_mode=gsspo", f"{ACTOR}.policy_loss.loss_mode", "gsspo", "Did you mean gspo?"),
        ("trainer.logger=[console,wandbb]", "trainer.logger", "wandbb", "Did you mean wandb?"),
        ("trainer.logger=1", "trainer.logger", "1", "Valid: wandb"),
        ("trainer.use_v1=False", "trainer.use_v1", False, "trainer.v1.trainer_mode=sync"),
        (
            "trainer.v1.sampler.custom_sampler.path=mine.py",
            "trainer.v1.sampler.custom_sampler.path",
            "mine.py",
            "trainer_mode=separate_async",
        ),
        (f"{ROLLOUT}.name=???", f"{ROLLOUT}.name", "???", f"Add {ROLLOUT}.name=vllm"),
        ("data.train_batch_size=???", "data.train_batch_size", "???", "Add data.train_batch_size="),
        ("data.train_batch_size=many", "data.train_batch_size", "many", "Set data.train_batch_size=1"),
        ("data.train_batch_size=10", "data.train_batch_size", 10, "Set data.train_batch_size=12"),
        (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name", "sglang", f"Set {ROLLOUT}.name=vllm"),
        (
            f"{ROLLOUT}.checkpoint_engine.backend=nccl",
            f"{ROLLOUT}.checkpoint_engine.backend",
            "nccl",
            "=gloo",
        ),
        (
            "actor_rollout_ref.hybrid_engine=False",
            "actor_rollout_ref.hybrid_engine",
            False,
            f"{ROLLOUT}.nnodes=1",
        ),
        ("++seamless.layuot=auto", "seamless.layuot", "auto", "Did you mean seamless.layout?"),
        (f"{PATH}=/no/such/model", PATH, "/no/such/model", f"Set {PATH} to a model folder"),
        (f"{PATH}=./model", PATH, "./model", f"Set {PATH} to a model folder"),
        (
            "algorithm.adv_estimator=gae",
            "critic.model.path",
            "~/models/deepseek-llm-7b-chat",
            "adv_estimator=grpo",
        ),
        (
            "data.train_files=/no/train.parquet",
            "data.train_files",
            "/no/train.parquet",
            "Set data.train_files",
        ),
        ("data.val_files=null", "data.val_files", None, "Set data.val_files=<file>.parquet"),
        ("data.train_batch_size=128", "data.train_batch_size", 128, "Set data.train_batch_size=64 or less"),
    ],
)
def test_refused(tmp_path: Path, overrides: str, key: str, value: object, way_out: str) -> None:
    assert_refused(tiny_run(tmp_path, overrides), key, value, way_out)


@pytest.mark.parametrize(
    ("overrides", "key", "value", "way_out"),
    [
        ((*SEPARATE, "data.train_batch_size=16"), "data.train_batch_size", 16, "Set data.train_batch_size=8"),
        ((*SEPARATE, f"{ROLLOUT}.nnodes=0"), f"{ROLLOUT}.nnodes", 0, f"Set {ROLLOUT}.nnodes=1"),
        (
            ("algorithm.adv_estimator=gae", "critic.model.path=${actor_rollout_ref.model.path}", f"{CRITIC_MINI}=6"),
            CRITIC_MINI,
            6,
            f"Set {CRITIC_MINI}=2, or another divisor",
        ),
        (
            (*SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=naive"),
            f"{ROLLOUT}.checkpoint_engine.backend",
            "naive",
            "backend=gloo",
        ),
        (
            (*POOL, f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded"),
            f"{ROLLOUT}.checkpoint_engine.backend",
            "delta_sharded",
            "backend=nccl",
        ),
        (("seamless.layout=disaggregated", *POOL[1:]), f"{ROLLOUT}.nnodes", 0, f"Set {ROLLOUT}.nnodes=1"),
        (
            (*SEPARATE, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.n_gpus_per_node=1"),
            "trainer.n_gpus_per_node",
            2,
            "Lower trainer.n_gpus_per_node",
        ),
        (
            (
                "trainer.n_gpus_per_node=2",
                f"{ACTOR}.megatron.pipeline_model_parallel_size=4",
                "actor_rollout_ref.model.override_config.num_hidden_layers=4",
            ),
            f"{ACTOR}.megatron.pipeline_model_parallel_size",
            4,
            "a multiple of 4",
        ),
        (
            ("trainer.n_gpus_per_node=2", f"{ACTOR}.megatron.expert_model_parallel_size=4"),
            f"{ACTOR}.megatron.expert_model_parallel_size",
            4,
            "a multiple of 4",
        ),
        (
            (f"{ROLLOUT}.tensor_model_parallel_size=2",),
            f"{ROLLOUT}.tensor_model_parallel_size",
            2,
            "TP x DP x PP divides 1",
        ),
        (
            ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=1"),
            f"{ACTOR}.ppo_mini_batch_size",
            1,
            "a multiple of 2",
        ),
    ],
)
def test_refused_together(tmp_path: Path, overrides: tuple[str, ...], key: str, value: object, way_out: str) -> None:
    assert_refused(tiny_run(tmp_path, *overrides), key, value, way_out, devices=2)


def test_broken_interpolation_names_its_key(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "data.train_batch_size=${no.such.key}")
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=None: cannot be resolved"):
        preflight(config, devices=1, accelerator=False)


def test_devices_that_share_cores_bring_a_warning(tmp_path: Path) -> None:
    many = usable_cores() + 1
    shared = tiny_run(tmp_path, f"seamless.cpu.devices={many}")
    (warning,) = preflight(shared, devices=many, accelerator=False)
    assert f"seamless.cpu.devices={many}" in warning and "share cores" in warning
    parsed = SeamlessConfig.parse(shared.seamless)
    assert not parsed.cpu.pin and SeamlessConfig.parse({"cpu": {"devices": many - 1}}).cpu.pin


def test_a_pool_that_the_layout_does_not_have_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "seamless.layout=colocated", *POOL)
    assert_refused(config, f"{ROLLOUT}.nnodes", 1, f"Set {ROLLOUT}.nnodes=0, or seamless.layout=auto")
    assert preflight(tiny_run(tmp_path, "seamless.layout=colocated"), devices=1, accelerator=False) == []


def test_model_must_divide(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=8")
    assert_refused(config, f"{ROLLOUT}.tensor_model_parallel_size", 8, "a divisor of 4", devices=8)
    config = tiny_run(tmp_path, "trainer.n_gpus_per_node=4", f"{ACTOR}.megatron.pipeline_model_parallel_size=4")
    assert_refused(config, f"{ACTOR}.megatron.pipeline_model_parallel_size", 4, "a divisor of 2", devices=4)


def test_a_size_that_is_too_large_is_one_mistake(tmp_path: Path) -> None:
    """Neither the devices nor the model's 4 heads can be divided by it."""
    for key in (f"{ROLLOUT}.tensor_model_parallel_size", f"{ACTOR}.megatron.tensor_model_parallel_size"):
        (problem,) = refused(tiny_run(tmp_path, f"{key}=8"))
        assert problem.key == key and "does not divide the trainer's 1 devices" in problem.reason


def test_a_pool_without_devices_is_one_mistake(tmp_path: Path) -> None:
    """Also where everything is known that a plan of the memory needs, which such a pool cannot have."""
    config = tiny_run(tmp_path, "seamless.layout=disaggregated", *POOL[1:])
    write_model(tmp_path / "model", vocab_size=100, intermediate_size=64, tie_word_embeddings=True)
    assert_refused(config, f"{ROLLOUT}.nnodes", 0, f"Set {ROLLOUT}.nnodes=1")


def test_a_replica_need_not_divide_a_trainer_it_does_not_live_on(tmp_path: Path) -> None:
    wide = (*POOL, f"{ROLLOUT}.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2")
    assert preflight(tiny_run(tmp_path, *wide), devices=3, accelerator=False) == []
    separate = ("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2")
    assert_refused(
        tiny_run(tmp_path, *wide, *separate),
        f"{ROLLOUT}.tensor_model_parallel_size",
        2,
        "TP x DP x PP divides 1",
        devices=3,
    )
    apart = tiny_run(tmp_path, *wide, *separate, "actor_rollout_ref.hybrid_engine=False")
    assert preflight(apart, devices=3, accelerator=False) == []


def test_all_problems_come_at_once_and_survive_pickling(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, f"{PATH}=/no/model", "data.train_batch_size=10", "data.val_files=/no/val.parquet")
    problems = refused(config)
    assert [p.key for p in problems] == [PATH, "data.val_files", "data.train_batch_size"]
    error = ConfigErrors(*problems)
    assert isinstance(error, ConfigError) and error.key == PATH
    assert str(error).splitlines() == [str(problem) for problem in problems]
    copy = pickle.loads(pickle.dumps(error))
    assert list(map(vars, copy.mistakes)) == list(map(vars, problems)) and str(copy) == str(error)


def test_engines_that_only_verl_places_are_refused(tmp_path: Path) -> None:
    for name in ("trtllm", "sglang"):
        config = tiny_run(tmp_path, f"{ROLLOUT}.name={name}", TORCH_LAYERS)
        assert_refused(config, f"{ROLLOUT}.name", name, f"{ROLLOUT}.name=vllm", accelerator=True, devices=None)


@pytest.mark.parametrize(
    ("engines_return", "mode", "bypass", "key", "way_out"),
    [
        (True, "R3", True, None, ""),
        (False, "R2", False, None, ""),
        (False, "R3", True, REPLAY, f"Set {ROUTES}=True"),
        (True, "disabled", True, ROUTES, f"Set {REPLAY}=R3, or {ROUTES}=False"),
        (True, "R2", False, ROUTES, f"Set {REPLAY}=R3, or {ROUTES}=False"),
        (False, "R2", True, REPLAY, f"Set {REPLAY}=R3 with {ROUTES}=True, or {BYPASS}=False"),
    ],
)
def test_routes_are_replayed_by_whom_they_reach(
    tmp_path: Path, engines_return: bool, mode: str, bypass: bool, key: str | None, way_out: str
) -> None:
    asked = (f"{ROUTES}={engines_return}", f"{REPLAY}={mode}", f"{BYPASS}={bypass}")
    config = tiny_run(tmp_path, *asked, "seamless.correction.loss=null", "seamless.max_staleness=0")
    if key is None:
        preflight(config, devices=1, accelerator=False)
    else:
        assert [(problem.key, problem.way_out) for problem in refused(config)] == [(key, way_out)]


def test_routes_are_not_asked_for_without_megatron(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, f"{ROUTES}=True", f"{ACTOR}.strategy=fsdp2")
    problems = find_problems(Settings.of(config, devices=1, accelerator=False), [check_seamless])
    assert (ROUTES, f"Set {ROUTES}=False") in [(problem.key, problem.way_out) for problem in problems]


def test_routes_are_not_replayed_with_veomni(tmp_path: Path) -> None:
    key = f"{ACTOR}.veomni.router_replay.mode"
    assert_refused(tiny_run(tmp_path, f"+{key}=R3"), key, "R3", f"Set {key}=disabled, or use one of verl's own")


def test_an_accelerator_has_transformer_engine_or_layers_in_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(*overrides: str) -> list[Problem]:
        settings = Settings.of(tiny_run(tmp_path, *overrides), devices=1, accelerator=True)
        return find_problems(settings, [check_layers])

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for there in (True, False):
        monkeypatch.setattr("seamless_verl.config.checks.model.find_spec", lambda name, there=there: there or None)
        problems = layers()
        assert [problem.key for problem in problems] == [] if there else ["platform"]
    assert problems[0].way_out == "Install it, or set platform=accelerator_without_te"
    assert layers(TORCH_LAYERS) == layers("ray_kwargs.ray_init.address=auto") == []


def test_layers_in_plain_torch_have_no_context_parallelism(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.megatron.context_parallel_size"
    for layers, keys in ((TORCH_LAYERS, [key]), ("actor_rollout_ref.model.external_lib=null", [])):
        settings = Settings.of(tiny_run(tmp_path, f"{key}=2", layers), devices=2, accelerator=True)
        assert [problem.key for problem in find_problems(settings, [check_context_parallel])] == keys


@pytest.mark.parametrize("platform", ["cpu", "accelerator_without_te"])
def test_context_parallelism_is_refused_where_layers_are_plain_torch(tmp_path: Path, platform: str) -> None:
    key = "actor_rollout_ref.actor.megatron.context_parallel_size"
    layers = compose_ours(f"platform={platform}").actor_rollout_ref.model.external_lib
    config = tiny_run(
        tmp_path, f"{key}=2", "trainer.n_gpus_per_node=2", f"actor_rollout_ref.model.external_lib={layers}"
    )
    found = refused(config, devices=2, accelerator=platform != "cpu")
    assert [(one.value, one.way_out) for one in found if one.key == key] == [(2, f"Set {key}=1")]


def test_every_check_runs() -> None:
    """One that is in no tuple would be tested and never asked."""
    folder = Path(checks.__file__).parent
    made = {
        node.name
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and "check" in map(ast.unparse, node.decorator_list)
    }
    assert len(made) > 50 and made == {one.__name__ for one in CHECKS}


def test_both_platforms_without_transformer_engine_tell_megatron_the_same() -> None:
    with_torch, on_cpu = (compose_ours(f"platform={name}") for name in ("accelerator_without_te", "cpu"))
    for node in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        assert OmegaConf.select(with_torch, f"{node}.megatron") == OmegaConf.select(on_cpu, f"{node}.megatron")
    for node in ("actor_rollout_ref", "critic"):
        assert f"{node}.model.external_lib={with_torch[node].model.external_lib}".endswith(TORCH_LAYERS.split("=")[1])
    assert with_torch.trainer.device == compose_ours("platform=accelerator").trainer.device


def test_somebody_is_always_left_to_generate(tmp_path: Path) -> None:
    never = tiny_run(tmp_path, "seamless.lending=never")
    assert_refused(never, "seamless.lending", "never", "seamless.lending=marginal")
    both = (
        "seamless.resources=[{count: 1, devices: 1, tags: [train, rollout]}, {count: 1, devices: 1, tags: [rollout]}]"
    )
    mixed = tiny_run(tmp_path, "seamless.lending=never", both, f"{ROLLOUT}.checkpoint_engine.backend=gloo")
    assert "seamless.lending" in {problem.key for problem in refused(mixed, devices=2, accelerator=False)}
    assert preflight(tiny_run(tmp_path, "seamless.lending=never", *POOL), devices=2, accelerator=False) == []


def test_what_runs_ahead_can_be_trained(tmp_path: Path) -> None:
    far = tiny_run(tmp_path, "seamless.ahead=3")
    assert_refused(far, "seamless.ahead", 3, "seamless.max_staleness=3")


@pytest.mark.parametrize("handover", ["released", "cache_only"])
def test_memory_is_released_only_where_the_engine_frees_it(tmp_path: Path, handover: str) -> None:
    kept = tiny_run(tmp_path, f"seamless.handover={handover}", "actor_rollout_ref.rollout.free_cache_engine=False")
    assert_refused(kept, "seamless.handover", handover, "seamless.handover=resident")


@pytest.mark.parametrize("handover", ["resident", "cache_only", "released"])
def test_several_updates_a_step_generate_between_them_with_each_hand_over(tmp_path: Path, handover: str) -> None:
    several = ("trainer.v1.seamless.parameter_sync_step=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    config = tiny_run(tmp_path, *several, f"seamless.handover={handover}")
    assert preflight(config, devices=1, accelerator=False) == []


def test_several_updates_a_step_must_divide_the_batch(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *POOL, "trainer.v1.seamless.parameter_sync_step=3")
    assert_refused(config, "data.train_batch_size", 8, "Set data.train_batch_size=12", devices=2)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seamless.weights.kv=keep", "seamless.weights.kv='keep'"),
        ("seamless.max_staleness=0", "seamless.max_staleness=0"),
        ("seamless.correction.scale_lr=True", "seamless.correction.scale_lr=True"),
        ("seamless.correction.loss=null", "seamless.correction.loss=None"),
        ("seamless.watchdog.no_progress_s=60", "seamless.watchdog.no_progress_s=60"),
        ("seamless.restarts=1", "seamless.restarts=1"),
    ],
)
def test_what_only_our_trainer_reads_brings_a_warning_in_other_modes(
    tmp_path: Path, mode: str, setting: str, said: str
) -> None:
    (warning,) = preflight(tiny_run(tmp_path, f"trainer.v1.trainer_mode={mode}", setting), devices=1, accelerator=False)
    assert f"{said}: is not read by trainer.v1.trainer_mode={mode}" in warning
    assert preflight(tiny_run(tmp_path, setting), devices=1, accelerator=False) == []


def test_a_sampler_brings_a_warning_in_other_modes_and_so_does_each_of_its_options(tmp_path: Path) -> None:
    options = ["seamless.sampler.name=srpo", "seamless.sampler.threshold=0.9", "seamless.sampler.success=0.5"]
    config = tiny_run(tmp_path, "trainer.v1.trainer_mode=sync", *options)
    warnings = "\n".join(preflight(config, devices=1, accelerator=False))
    for option in ("name='srpo'", "threshold=0.9", "success=0.5"):
        assert f"seamless.sampler.{option}: is not read by trainer.v1.trainer_mode=sync" in warnings


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seamless.gateway.port=8000", "seamless.gateway.port=8000"),
        ("seamless.gateway.options=['--enable-log-deltas']", "options=['--enable-log-deltas']"),
        ("seamless.gateway.strict=true", "seamless.gateway.strict=True"),
    ],
)
def test_settings_of_a_gateway_that_is_off_bring_a_warning(tmp_path: Path, setting: str, said: str) -> None:
    (warning,) = preflight(tiny_run(tmp_path, setting), devices=1, accelerator=False)
    assert f"{said}: is not read while seamless.gateway.enabled=false" in warning
    on = preflight(tiny_run(tmp_path, setting, "seamless.gateway.enabled=true"), devices=1, accelerator=False)
    assert not [line for line in on if "is not read" in line]


@pytest.mark.parametrize("address", ["10.0.0.1:8000", "ftp://host"])
def test_a_public_address_is_a_host_or_the_url_of_a_server(tmp_path: Path, address: str) -> None:
    config = tiny_run(tmp_path, "seamless.gateway.enabled=true", f"seamless.gateway.public_address='{address}'")
    assert_refused(config, "seamless.gateway.public_address", address, "Set seamless.gateway.public_address=")


@pytest.mark.parametrize(("bound", "older", "warned"), [(1, 1, True), (1, 2, True), (0, 0, True), (1, 0, False)])
@pytest.mark.parametrize("policy", ["mask_older_than", "drop_if_older_than"])
def test_a_policy_that_leaves_nothing_out_brings_a_warning(
    tmp_path: Path, policy: str, bound: int, older: int, warned: bool
) -> None:
    policy = f"{policy}:{older}"
    config = tiny_run(tmp_path, f"seamless.max_staleness={bound}", f"seamless.tokens.policy={policy}")
    found = preflight(config, devices=1, accelerator=False)
    assert len(found) == warned
    assert not warned or f"seamless.tokens.policy='{policy}': leaves nothing out" in found[0]
    assert not warned or f"seamless.max_staleness={older + 1} or more" in found[0]


def test_samplings_that_our_bound_replaces_bring_a_warning(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.v1.sampler.max_off_policy_threshold=2")
    (warning,) = preflight(config, devices=1, accelerator=False)
    assert "max_off_policy_threshold=2" in warning and "seamless.max_staleness" in warning


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("separate_async.parameter_sync_step=2", "Set trainer.v1.seamless.parameter_sync_step=2 instead"),
        ("separate_async.num_warmup_batches=2", "Set seamless.ahead instead"),
        ("colocate_async.num_warmup_batches=0", "Set seamless.ahead instead"),
        ("separate_async.hybrid_rollout.enable_switch=True", "in seamless.layout=multiplexed seamless.lending decides"),
    ],
)
def test_settings_of_verls_asynchronous_modes_bring_a_warning(tmp_path: Path, override: str, way_out: str) -> None:
    override = f"trainer.v1.{override}"
    (warning,) = preflight(tiny_run(tmp_path, override), devices=1, accelerator=False)
    assert warning.startswith(f"{override}: is not read by the seamless trainer. ") and way_out in warning
    verls = tiny_run(tmp_path, override, "trainer.v1.trainer_mode=colocate_async")
    assert preflight(verls, devices=1, accelerator=False) == []


def test_no_hybrid_engine_is_what_a_disaggregated_layout_has(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *POOL, "actor_rollout_ref.hybrid_engine=False")
    (warning,) = preflight(config, devices=2, accelerator=False)
    assert "hybrid_engine=False: is not read by the seamless trainer. Leave it out" in warning


def test_an_adapter_beside_random_weights_is_refused(tmp_path: Path) -> None:
    lora = "actor_rollout_ref.model.lora"
    adapter = (f"++{lora}.rank=8", f"{ACTOR}.megatron.vanilla_mbridge=False")
    (problem,) = find_adapter(tiny_run(tmp_path, *adapter))
    key = f"{ROLLOUT}.load_format"
    assert (problem.key, problem.value) == (
        key,
        "dummy",
    ) and f"Set {key}=safetensors, or {lora}.merge" in problem.way_out
    assert find_adapter(tiny_run(tmp_path, *adapter, f"{key}=safetensors")) == []
    assert find_adapter(tiny_run(tmp_path, *adapter, f"++{lora}.merge=True")) == []
    assert find_adapter(tiny_run(tmp_path, *adapter, "trainer.v1.trainer_mode=sync")) == []


def test_an_adapter_that_megatron_would_not_train_is_refused(tmp_path: Path) -> None:
    model = "actor_rollout_ref.model"
    merged, rank, vanilla = f"++{model}.lora.merge=True", f"{model}.lora.rank", f"{ACTOR}.megatron.vanilla_mbridge"
    assert_refused(tiny_run(tmp_path, f"{model}.lora_rank=8", merged), rank, 0, f"Set {rank}=8")
    bridged = tiny_run(tmp_path, f"++{rank}=8", merged, f"{vanilla}=True")
    assert_refused(bridged, vanilla, True, f"Set {vanilla}=False")


def test_an_adapter_of_a_path_needs_its_rank(tmp_path: Path) -> None:
    model = "actor_rollout_ref.model"
    given = (
        f"{ACTOR}.strategy=fsdp2",
        f"++{model}.lora_adapter_path=/data/adapter",
        f"{ROLLOUT}.load_format=safetensors",
    )
    (problem,) = find_adapter(tiny_run(tmp_path, *given))
    assert (problem.key, problem.value) == (f"{model}.lora_rank", 0)
    assert f"{model}.lora_adapter_path unread" in problem.reason and f"Set {model}.lora_rank=N" in problem.way_out
    assert find_adapter(tiny_run(tmp_path, *given, f"++{model}.lora_rank=8")) == []


def find_adapter(config: DictConfig) -> list[Problem]:
    return find_problems(Settings.of(config, devices=1, accelerator=False), [check_adapter])


def test_the_gateway_needs_our_trainer_and_vllm(tmp_path: Path) -> None:
    mode = tiny_run(tmp_path, "seamless.gateway.enabled=true", "trainer.v1.trainer_mode=sync")
    assert_refused(mode, "seamless.gateway.enabled", True, "trainer.v1.trainer_mode=seamless")
    engine = tiny_run(tmp_path, "seamless.gateway.enabled=true", f"{ROLLOUT}.name=sglang", TORCH_LAYERS)
    assert_refused(engine, f"{ROLLOUT}.name", "sglang", f"{ROLLOUT}.name=vllm", accelerator=True, devices=None)


@pytest.mark.parametrize("enabled", [False, True])
def test_loops_that_need_the_gateway_are_refused_without_it(tmp_path: Path, enabled: bool) -> None:
    loops, agent = tmp_path / "loops.yaml", tmp_path / "agent.py"
    agent.write_text("async def run(task, endpoint): ...\n")
    target = "seamless_verl.agent_loops.loops.CallableAgentLoop"
    loops.write_text(f"- {{name: mine, _target_: {target}, agent: '{agent}:run'}}\n")
    key = f"{ROLLOUT}.agent.agent_loop_config_path"
    default = f"{ROLLOUT}.agent.default_agent_loop=mine"
    config = tiny_run(tmp_path, f"{key}={loops}", default, f"seamless.gateway.enabled={enabled}")
    if enabled:
        assert preflight(config, devices=1, accelerator=False) == []
    else:
        assert_refused(config, key, str(loops), "seamless.gateway.enabled=true")


def test_code_of_a_users_own_may_add_to_what_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(tmp_path, "algorithm.adv_estimator=mine")
    assert [problem.key for problem in refused(config)] == ["algorithm.adv_estimator"]
    ours = "actor_rollout_ref.model.external_lib=seamless_verl.platform.engine"
    assert refused(tiny_run(tmp_path, "algorithm.adv_estimator=mine", ours)), "this package adds nothing to the table"
    named = tiny_run(tmp_path, "algorithm.adv_estimator=mine", "actor_rollout_ref.model.external_lib=my_estimators")
    (warning,) = preflight(named, devices=1, accelerator=False)
    assert "algorithm.adv_estimator='mine': is known neither to verl nor to this package" in warning
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_estimators")
    assert len(preflight(config, devices=1, accelerator=False)) == 1


def test_a_loggers_package_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamless_verl.config.checks.hosts.find_spec", lambda name: None)
    config = tiny_run(tmp_path, "trainer.logger=[console,file,mlflow]")
    assert_refused(config, "trainer.logger", "mlflow", "take mlflow out of trainer.logger")
