"""Rows of sessions with images: the model reads in them what it read when it generated, and is trained on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.paths import ROOT
from support.qwen_vision import make_qwen_vision
from support.vision_rows import BLUE, RED, vision_rows
from verl.utils.model import extract_multi_modal_inputs

pytestmark = pytest.mark.integration
PATCHES = {RED: 8, BLUE: 16}


def test_a_row_has_the_images_of_its_sequence_in_their_order(tmp_path: Path) -> None:
    model = make_qwen_vision(tmp_path)
    (row,) = vision_rows(tmp_path, [(RED, BLUE)])
    columns, inputs = row.columns, row.columns["multi_modal_inputs"]
    size = len(columns["input_ids"])
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 4], [1, 4, 4]]
    assert inputs["pixel_values"].shape == (PATCHES[RED] + PATCHES[BLUE], 3 * 2 * 14 * 14)
    assert columns["position_ids"].shape == (4, size) and "multi_modal_data" not in columns
    assert columns["position_ids"][0].tolist() == list(range(size))
    given = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    kept = extract_multi_modal_inputs([inputs])
    assert all(torch.equal(kept[name], value) for name, value in given.items())
    black = given | {"pixel_values": torch.zeros_like(given["pixel_values"])}
    assert not np.allclose(logits(model, columns, given), logits(model, columns, black)), "no image makes a difference"


def logits(model: Any, columns: dict[str, Any], inputs: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        found = model(input_ids=columns["input_ids"][None], position_ids=columns["position_ids"][:, None], **inputs)
    return np.asarray(found.logits[0, -1])


def test_verls_fsdp_trains_a_vision_model_on_them_for_two_updates(tmp_path: Path) -> None:
    make_qwen_vision(tmp_path / "model")
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"model": str(tmp_path / "model"), "out": str(tmp_path), "world": 2}))
    code = "from support.vision_process import main; main()"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(case)]
    ranks = [subprocess.Popen([*command, str(rank)], env=env, cwd=tmp_path) for rank in range(2)]
    assert [rank.wait(240) for rank in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    losses = [step["loss"] for step in found[0]["steps"]]
    assert all(step["grad_norm"] > 0 for one in found for step in one["steps"] if step) and losses[1] < losses[0]
    for tower in ("visual.", "language_model."):
        assert any(tower in name for one in found for name in one["moved"]), f"no weight of {tower} moved"
