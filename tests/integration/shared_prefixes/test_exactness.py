"""Loss and gradients of Megatron's GPT over a forest are those of each sequence by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.paths import child_environment

from seamless_verl.shared_prefixes.forward import unpack_edges
from seamless_verl.shared_prefixes.layout import build_forest

pytestmark = pytest.mark.integration
COMMAND = ("-W", "ignore", "-c", "from support.exactness_process import main; main()")


@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-6), ("float32", 1e-5)])
@pytest.mark.parametrize("activations", ["kept", "recomputed"])
def test_loss_and_every_gradient_are_those_of_each_sequence_alone(
    tmp_path: Path, dtype: str, most: float, activations: str
) -> None:
    command = [sys.executable, *COMMAND, dtype, activations, str(tmp_path)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    batches = json.loads(done.stdout.splitlines()[-1])
    assert len(batches) == 8 and all(len(apart) > 10 for apart in batches)
    for seed, apart in enumerate(batches):
        assert max(apart.values()) < most, (seed, apart)


def test_the_last_token_of_a_sequence_has_no_edge_and_no_value() -> None:
    forest = build_forest([[5, 6, 7], [5], [], [5, 6]])
    values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    unpacked = unpack_edges(values, forest, np.array([0, 1]))
    assert [row.tolist() for row in unpacked.unbind()] == [[1, 2, 0], [0], [], [1, 0]]
    unpacked.values().sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[2, 1]]
    assert [row.tolist() for row in unpack_edges(values[:, :1], forest, np.array([1])).unbind()] == [
        [0, 1, 0], [0], [], [0, 0],
    ]  # fmt: skip
