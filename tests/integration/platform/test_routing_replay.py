"""Megatron's routers choose the experts that they are given by R3, at every position and in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.data.routes_seen import seen
from support.megatron_runs import run, sequences

pytestmark = [pytest.mark.integration, pytest.mark.slowest(3)]
LAYOUTS: dict[str, dict[str, int]] = {
    "ep2": {"world": 2, "ep": 2},  # each rank has half of the experts, and its own sequences
    "tp2_ep2": {"world": 2, "tp": 2, "ep": 2, "etp": 1},  # and half of each sequence
    "pp2": {"world": 2, "pp": 2},  # and half of the layers
}
LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_position_has_the_experts_that_it_was_given(
    environ: dict[str, str], moe: Path, tmp_path: Path, layout: str
) -> None:
    """Experts at random, so that a native choice, or another position's, would be seen."""
    draw = torch.Generator().manual_seed(1)
    routes = [torch.rand(len(ids) - 1, LAYERS, EXPERTS, generator=draw).topk(CHOSEN).indices for ids in sequences()]
    given = {tuple(ids): rows for ids, rows in zip(sequences(), routes, strict=True)}
    torch.save(routes, file := tmp_path / "routes.pt")
    more = {"module": "support.replay_process", "routes": str(file)}
    results = run(environ, tmp_path, moe / "model", **LAYOUTS[layout], **more)
    checked: dict[tuple[int, ...], int] = dict.fromkeys(given, 0)
    for ids, layer, rows in seen(tmp_path):
        wanted = given[tuple(ids)]
        for position, experts in rows.items():
            if position < len(wanted):  # the last one's route matters to nothing, and is the router's own
                assert experts == set(wanted[position, layer].tolist()), (ids, layer, position)
                checked[tuple(ids)] += 1
    for ids, count in checked.items():  # once to infer, and once to train
        assert count == 2 * LAYERS * (len(ids) - 1), f"{count} choices were seen of {len(ids)} tokens"
    (flipped,) = {result["routes_flipped"] for result in results if "routes_flipped" in result}
    assert 0.6 < flipped < 0.9, "by chance a quarter of the experts is the router's own"
