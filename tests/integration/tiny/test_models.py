"""Sizes, and that a model's files depend on its size and seed alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tiny import SIZES, keep_or_make_model, make_model, models
from seamless_verl.tiny.models import MADE

pytestmark = pytest.mark.integration
BOUNDS = {
    "nano": (350_000, 450_000),
    "small": (2_700_000, 3_500_000),
    "medium": (18e6, 22e6),
    "moe": (550_000, 650_000),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_as_stated(size: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from seamless_verl.tiny.models import model_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(size))
    low, high = BOUNDS[size]
    assert low <= sum(weight.numel() for weight in model.parameters()) <= high


@pytest.mark.parametrize("size", SIZES)
def test_shapes_can_be_cut_in_two_and_run_by_vllm(size: str) -> None:
    shape = SIZES[size]
    assert not any(count % 2 for count in (shape.layers, shape.heads, shape.kv_heads, shape.hidden, shape.mlp))
    assert shape.head_dim >= 32
    assert shape.heads % shape.kv_heads == 0


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    first, again, other = (
        contents(make_model("nano", seed, tmp_path / name)) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_making_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    make_model("nano", 0, tmp_path / "model")
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_saved_model_loads_with_its_tokenizer_and_stop_token(nano: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(nano / "model")
    tokenizer = AutoTokenizer.from_pretrained(nano / "model")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_an_untrained_model_starts_near_uniform(nano: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    logits = AutoModelForCausalLM.from_pretrained(nano / "model")(torch.arange(64)[None]).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert entropy > 0.95 * torch.log(torch.tensor(logits.shape[-1]))


def test_no_token_has_a_gradient_far_from_the_others(nano: Path) -> None:
    """Each may be generated, so that one of them would turn a whole update."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(nano / "model")
    ids = torch.arange(model.config.vocab_size).roll(1)[None]
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=inputs, labels=ids).loss.backward()
    norms = inputs.grad[0].norm(dim=1)
    assert norms.max() < 20 * norms.median()


def test_an_unknown_size_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"size='huge'.*nano, small, medium"):
        make_model("huge", 0, tmp_path / "model")


def test_a_folder_that_holds_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_model("nano", 0, tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_model_in_the_way_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    make_model("nano", 0, tmp_path / "model")
    old = contents(tmp_path / "model")
    make_model("nano", 1, tmp_path / "model")
    assert contents(tmp_path / "model") != old
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_model_that_is_there_is_kept_and_another_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep_or_make_model("nano", 3, tmp_path / "model")
    first = contents(path)
    assert {name: first[name] for name in first if name != MADE} == contents(make_model("nano", 3, tmp_path / "again"))
    with monkeypatch.context() as patch:
        patch.setattr(models, "make_model", None)
        assert keep_or_make_model("nano", 3, path) == path
    keep_or_make_model("nano", 4, path)
    assert contents(path)["model.safetensors"] != first["model.safetensors"]
    make_model("nano", 4, path)  # whoever makes it otherwise leaves no word of it
    assert MADE not in contents(path)
    keep_or_make_model("nano", 3, path)
    assert contents(path) == first
    monkeypatch.setattr(models, "code_digest", lambda: "other code")
    keep_or_make_model("nano", 3, path)
    assert contents(path)[MADE] != first[MADE]
