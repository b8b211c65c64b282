"""Every mistake of a command line is found at once, with the key, the value and the way out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from omegaconf import DictConfig
from support.mistakes import composed

from seamless_verl.config.mistakes import find_mistakes, own_keys, with_own_keys
from seamless_verl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROPE = f"{ACTOR}.megatron.override_transformer_config.apply_rope_fusion"


@pytest.fixture(params=["accelerator", "cpu"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SEAMLESS_PLATFORM", request.param)
    return str(request.param)


def found(*arguments: str) -> tuple[dict[str, str], DictConfig | None]:
    """The way out of each mistake by its key, and the config that is checked for more."""
    checked: list[DictConfig] = []

    def inspect(config: DictConfig, overrides: Sequence[str]) -> None:
        checked.append(config)

    mistakes = find_mistakes(with_own_keys(arguments), lambda parts: composed(tuple(parts)), inspect)
    return {mistake.key: mistake.way_out for mistake in mistakes}, checked[-1] if checked else None


def test_several_mistakes_in_one_command() -> None:
    ways_out, config = found(
        "data.train_batch_sise=8",
        f"+{ACTOR}.ppo_mini_batch_size=4",
        "+data.mine=1",
        "+data.mine=2",
        "~data.no_such_key",
        "trainer.logger=[console",
        f"{ACTOR}.megatron.no_such_key=1",
        "trainer.nnodes=3",
    )
    assert ways_out == {
        "trainer.logger": "Close it with ]",
        "data.train_batch_sise": ways_out["data.train_batch_sise"],
        f"{ACTOR}.megatron.no_such_key": "Leave it out: verl takes no other keys there",
        f"{ACTOR}.ppo_mini_batch_size": f"Write {ACTOR}.ppo_mini_batch_size=4",
        "data.mine": "Write +data.mine=2 once",
        "data.no_such_key": "Leave ~data.no_such_key out",
    }
    assert ways_out["data.train_batch_sise"].startswith("Did you mean data.train_batch_size")
    assert config is not None and config.trainer.nnodes == 3 and config.data.mine == 2
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 4  # as it was meant


def test_what_is_wrong_with_the_rest_is_found_too() -> None:
    def inspect(config: DictConfig, overrides: Sequence[str]) -> None:
        assert overrides == ["trainer.nnodes=3"] and config.trainer.nnodes == 3
        raise ConfigError("trainer.nnodes", 3, "are too many", "Set fewer")

    arguments = ["model_engine=megatrom", "trainer.nnodes=3"]
    mistakes = find_mistakes(arguments, lambda parts: composed(tuple(parts)), inspect)
    assert [str(mistake) for mistake in mistakes][1:] == ["trainer.nnodes=3: are too many. Set fewer"]
    assert (mistakes[0].key, mistakes[0].value) == ("model_engine", "megatrom")
    assert mistakes[0].way_out.startswith("Did you mean megatron?")


def test_keys_of_another_engine(platform: str) -> None:
    """They are one mistake, and the config is checked with that engine: on the CPU platform there is none."""
    keys = [f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.fsdp_config.fsdp_size=2"]
    ways_out, config = found(*keys, "trainer.nodes=1")
    assert list(ways_out) == ["model_engine", "trainer.nodes"] and config is not None
    assert ways_out["model_engine"].startswith("Add model_engine=dp")
    assert ("leave these keys out" in ways_out["model_engine"]) == (platform == "cpu")
    assert config.model_engine == ("megatron" if platform == "cpu" else "dp")
    assert platform == "cpu" or config.actor_rollout_ref.actor.fsdp_config.fsdp_size == 2


def test_keys_of_an_engine_that_was_not_chosen() -> None:
    key = f"{ACTOR}.megatron.tensor_model_parallel_size"
    ways_out, config = found("model_engine=dp", f"{key}=2", f"{ACTOR}.fsdp_config.fsdp_size=2")
    assert ways_out == {key: "Leave it out, or write model_engine=megatron"}
    assert config is not None and config.model_engine == "dp"


@pytest.mark.parametrize(
    "choice",
    ["model_engine=megatron", f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"],
)
def test_a_script_for_megatron_is_not_told_to_train_with_fsdp(platform: str, choice: str) -> None:
    """Nor is one that gives as many keys of Megatron as of FSDP."""
    offload, size = f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.fsdp_size"
    given = [f"{offload}=True"] if ".megatron." in choice else [f"{offload}=True", f"{size}=2"]
    ways_out, config = found(choice, *given)
    assert ways_out[offload] == f"Leave it out, or write {ACTOR}.megatron.param_offload"
    assert ways_out.get(size, "Leave it out") == "Leave it out" and len(ways_out) == len(given)
    assert config is not None and config.model_engine == "megatron"


def test_verls_config_for_megatron_chooses_it_too() -> None:
    name = "--config-name=ppo_megatron_trainer"
    mistakes = find_mistakes([name, f"{ACTOR}.fsdp_config.fsdp_size=2"], lambda parts: composed(()), lambda *_: None)
    assert [mistake.way_out for mistake in mistakes] == ["Leave it out"]
    assert mistakes[0].reason.endswith(f"and the engine is megatron, as {name} says")


def test_keys_that_only_our_platform_files_have(platform: str) -> None:
    """verl takes them with +, so they are taken; added twice they are refused, as verl's own are."""
    assert ROPE in own_keys() and "trainer.device" not in own_keys()
    ways_out, config = found(f"+{ROPE}=True", "trainer.nodes=1")
    assert list(ways_out) == ["trainer.nodes"] and config is not None
    assert config.actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion is True
    assert found(f"+{ROPE}=True", f"+{ROPE}=False")[0] == {ROPE: f"Write +{ROPE}=False once"}


def test_the_config_of_verls_experimental_trainer() -> None:
    ways_out, config = found(
        "--config-path=config",
        "--config-name=fully_async_ppo_trainer.yaml",
        "async_training.staleness_threshold=0.5",
        "trainer.nnodes=3",
    )
    assert ways_out["async_training.staleness_threshold"].startswith("The seamless trainer has seamless.max_staleness")
    assert ways_out["--config-name"].startswith("Leave --config-name and --config-path out")
    assert len(ways_out) == 2 and config is not None and config.trainer.nnodes == 3
