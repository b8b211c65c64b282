"""Advantages in brief, for the journal."""

from __future__ import annotations

import pytest
import torch

from seamless_verl.trainer.advantages import in_brief

pytestmark = pytest.mark.integration


def test_a_session_has_the_mean_and_the_ends_of_its_trained_tokens() -> None:
    rows = [
        ("a_b_0_0", torch.tensor([1.0, 1.0, 9.0]), torch.tensor([1, 1, 0])),
        ("a_b_1_0", torch.tensor([-1.0]), torch.tensor([1])),
        ("a_b_1_1", torch.tensor([0.5, 7.0, 0.5]), torch.tensor([1, 0, 1])),
        ("a_b_2_0", torch.tensor([3.0]), torch.tensor([0])),
        ("c_0_0", torch.tensor([0.25]), torch.tensor([True])),
    ]
    assert in_brief(rows) == {
        "a_b": {"0": [1.0, 1.0, 1.0], "1": [0.0, -1.0, 0.5]},
        "c": {"0": [0.25, 0.25, 0.25]},
    }
