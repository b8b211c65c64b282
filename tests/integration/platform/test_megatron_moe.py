"""Mixtures of experts in Megatron on the host, as verl's engine builds them, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.megatron_runs import (
    correlation,
    logprobs_of,
    losses,
    made,
    measured_logprobs,
    reference,
    run,
    sequences,
)
from support.mixtures import make_glm, make_mixtral

pytestmark = [pytest.mark.integration, pytest.mark.slowest(4)]
FP32 = {"dtype": "float32", "transformer": {"moe_router_dtype": "fp32"}}
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "ep2": {"world": 2, "ep": 2},  # each rank has half of the experts, and its own sequences
    "etp2": {"world": 2, "tp": 2},  # half of each expert
    "etp2_ep2": {"world": 4, "tp": 2, "ep": 2},  # half of each of half of the experts
    "tp2_ep2": {"world": 2, "tp": 2, "ep": 2, "etp": 1},  # half of the experts, and half of each sequence
}


@pytest.fixture(scope="module")
def runs(
    environ: dict[str, str], moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Four updates in fp32 in every layout."""
    base = tmp_path_factory.mktemp("runs")
    return {
        name: run(environ, made(base / name), moe / "model", updates=4, **sizes, **FP32)
        for name, sizes in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_is_transformers_before_and_after_updates(
    runs: dict[str, list[dict[str, Any]]], moe: Path, tmp_path: Path, layout: str
) -> None:
    """Also a test of the weights: those that were loaded, and those that were exported after the updates."""
    results, model = runs[layout], reference(moe / "model", torch.float32)
    before, after = (torch.cat(measured_logprobs(results, step)) for step in (0, -1))
    assert (before - torch.cat(logprobs_of(model))).abs().max() < 1e-5
    assert (after - torch.cat(logprobs_of(trained(model, tmp_path, results)))).abs().max() < 1e-5
    assert (after - before).abs().max() > 0.5, "it has not learned"


def trained(model: Any, folder: Path, results: list[dict[str, Any]]) -> Any:
    """transformers' model with all weights that the first rank has exported, by their names in a checkpoint."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    file, weights = folder / "model.safetensors", results[0]["weights"]
    assert set(load_file(file)) == set(weights)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, metadata={"format": "pt"})
    return reference(folder, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_alike(runs: dict[str, list[dict[str, Any]]], layout: str) -> None:
    one, other = losses(runs["one"]), losses(runs[layout])
    assert other[-1] < other[0] - 0.5
    assert torch.allclose(one, other, atol=1e-2), (one, other)


def test_a_resumed_mixture_goes_on_bit_for_bit(environ: dict[str, str], moe: Path, tmp_path: Path) -> None:
    """In bf16, since Megatron does not load the state of an optimizer of fp32 weights."""
    case = {**LAYOUTS["ep2"], "updates": 4, "save_before_update": 2}
    whole = run(environ, made(tmp_path / "whole"), moe / "model", **case)
    checkpoint = tmp_path / "whole" / "checkpoint"
    resumed = run(environ, made(tmp_path / "resumed"), moe / "model", load=str(checkpoint), **LAYOUTS["ep2"], updates=2)
    for before, after in zip(whole, resumed, strict=True):
        assert (before["losses"][2:], before["rates"][2:]) == (after["losses"], after["rates"])
        for name, tensor in before["weights"].items():
            assert torch.equal(tensor, after["weights"][name]), name
    saved = torch.cat(logprobs_of(reference(checkpoint / "model" / "huggingface")))
    assert correlation(torch.cat(measured_logprobs(whole, step=2)), saved) > 0.99


def test_export_without_updates_is_the_model_bit_for_bit(environ: dict[str, str], moe: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = run(environ, tmp_path, moe / "model", updates=0, **LAYOUTS["ep2"])[0]["weights"]
    original = load_file(moe / "model" / "model.safetensors")
    assert set(weights) == set(original)
    for name, tensor in weights.items():
        assert torch.equal(tensor, original[name].to(torch.bfloat16)), name


def test_an_auxiliary_loss_evens_the_experts_loads(
    environ: dict[str, str], runs: dict[str, list[dict[str, Any]]], moe: Path, tmp_path: Path
) -> None:
    """Set as users do it, since mbridge turns it off. Without it the loads spread by half of their mean."""
    wanted = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    evened = run(environ, tmp_path, moe / "model", updates=4, dtype="float32", transformer=wanted)
    spreads = []
    for name, results in (("with", evened), ("without", runs["one"])):
        model = reference(moe / "model", torch.float32)
        _, routes = routed(trained(model, made(tmp_path / name), results))
        for layer in range(2):
            loads = torch.cat([chosen[layer].flatten() for chosen in routes]).bincount(minlength=8).float()
            spreads.append(float(loads.std() / loads.mean()))
    assert max(spreads[:2]) < 0.7 * min(spreads[2:]), spreads


def test_a_bias_of_the_router_moves_by_its_rate_and_is_exported(
    environ: dict[str, str], moe: Path, tmp_path: Path
) -> None:
    """In a GLM, with an expert that all tokens pass. It grows for an expert with few tokens, and else shrinks."""
    rate, updates = 0.01, 2
    glm = make_glm(moe / "model", made(tmp_path / "glm"))
    case = {**LAYOUTS["ep2"], "dtype": "float32", "transformer": {"moe_router_bias_update_rate": rate}}
    results = run(environ, made(tmp_path / "run"), glm, updates=updates, **case)
    model = reference(glm, torch.float32)
    before, after = (torch.cat(measured_logprobs(results, step)) for step in (0, -1))
    assert (before - torch.cat(logprobs_of(model))).abs().max() < 1e-5
    assert (after - torch.cat(logprobs_of(trained(model, made(tmp_path / "trained"), results)))).abs().max() < 1e-5
    biases = [weight for name, weight in results[0]["weights"].items() if "e_score_correction_bias" in name]
    steps = torch.stack(biases) / rate
    assert len(biases) == 2 and torch.allclose(steps, steps.round(), atol=1e-3)
    assert steps.max() == updates and steps.min() == -updates


@pytest.fixture(scope="module")
def mixtral(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixtral(moe / "model", tmp_path_factory.mktemp("mixtral"))


@pytest.mark.parametrize("kind", ["moe", "mixtral"])
def test_what_bf16_changes_is_the_choice_of_experts(
    environ: dict[str, str], moe: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """In fp32 no token has another expert than in transformers. In bf16 about one in a hundred has, since its second
    and third best expert are nearly equal; with transformers' experts, probabilities agree as a dense model's do."""
    model = moe / "model" if kind == "moe" else request.getfixturevalue("mixtral")
    rows, routes = routed(reference(model))
    torch.save(routes, tmp_path / "routes.pt")
    more: dict[str, Any] = {"routes": str(tmp_path / "routes.pt"), "module": "support.routes_process"}
    more["transformer"] = {"moe_router_pre_softmax": False}  # mbridge's Mixtral would not let the weights sum to one
    (found,) = run(environ, tmp_path, model, **more)
    exact_rows, exact_routes = routed(reference(model, torch.float32))
    assert (torch.cat(found["float32"][0]) - torch.cat(exact_rows)).abs().max() < 1e-5
    assert flipped(found["float32"][1], exact_routes) == 0
    half_rows, half_routes = found["bfloat16"]
    expected = torch.cat(rows)
    alone, replayed = (correlation(torch.cat(given), expected) for given in (half_rows, found["replayed"]))
    share = flipped(half_routes, routes)
    print(f"\n{kind}: bf16 flips {share:.2%}; correlation {alone:.5f}, with the routes {replayed:.5f}")  # noqa: T201
    assert 0 < share < 0.03
    assert replayed > 0.9999 > alone
    assert (torch.cat(found["replayed"]) - expected).abs().max() < 2e-2


def routed(model: Any) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Logprobs by transformers, and the experts that it chose in each sequence and layer."""
    chosen = list[torch.Tensor]()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: chosen.append(out[2]))
    rows = logprobs_of(model)
    depth = len(model.model.layers)
    return rows, [chosen[i * depth : (i + 1) * depth] for i in range(len(sequences()))]


def flipped(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> float:
    """The share of tokens, of each layer, that have another set of experts."""
    pairs = zip([r for layers in one for r in layers], [r for layers in other for r in layers], strict=True)
    changed = torch.cat([(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in pairs])
    return float(changed.float().mean())
