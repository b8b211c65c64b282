"""Positions of sequences with images stay those of their tokens, whatever the lengths of a batch's rows."""

from __future__ import annotations

import importlib
import pickle

import pytest
import torch
from tensordict import TensorDict
from verl.utils.tensordict_utils import index_select_tensor_dict
from verl.workers import engine_workers
from verl.workers.engine import base

from seamless_verl.trainer.positions import nest_along_tokens

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("lengths", [[5, 5, 5], [40] * 10, [7], [4], [4, 4], [3, 6, 5]], ids=str)
@pytest.mark.parametrize("pickled", [False, True])
def test_each_row_has_the_positions_of_its_tokens(lengths: list[int], pickled: bool) -> None:
    rows = [100 * number + torch.arange(4 * length).reshape(4, length) for number, length in enumerate(lengths)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # as TransferQueue does
    data = TensorDict({"position_ids": nested}, batch_size=[len(rows)])
    if pickled:
        data = pickle.loads(pickle.dumps(data.consolidate()))
    for _ in range(2):  # verl's workers call it at each of their stages
        nest_along_tokens(data)
        found = data["position_ids"]
        assert found.values().shape == (4, sum(lengths))
        assert all(torch.equal(one, row) for one, row in zip(found.unbind(), rows, strict=True))
    chosen = index_select_tensor_dict(data, [len(rows) - 1])["position_ids"]
    assert torch.equal(chosen.values(), rows[-1])


def test_positions_of_text_stay_as_they_are() -> None:
    text = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(3)], layout=torch.jagged)
    data = TensorDict({"position_ids": text}, batch_size=[2])
    nest_along_tokens(data)
    assert data["position_ids"] is text
    nest_along_tokens(TensorDict({}, batch_size=[2]))


def test_verls_workers_call_it() -> None:
    importlib.import_module("seamless_verl.trainer.workers")
    assert engine_workers.maybe_fix_3d_position_ids is base.maybe_fix_3d_position_ids is nest_along_tokens
