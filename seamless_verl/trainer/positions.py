"""Positions of sequences with images, [rows, 4, tokens], nested along their tokens.

TransferQueue nests rows of several lengths along the dimension that varies; where all have one length, along the first,
as if the four rows of positions were tokens. verl then only says that the dimension is the last
(`maybe_fix_3d_position_ids`): each sequence would get four tokens' positions, or the batch cannot be divided.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.tensordict_utils import nested_tensor_from_tensor_list
from verl.workers import engine_workers
from verl.workers.engine import base

POSITIONS = "position_ids"
TOKENS = 2  # the dimension


def nest_along_tokens(data: Any) -> None:
    """In place of verl's function, which its workers call before they divide a batch."""
    positions = data.get(POSITIONS)
    if not isinstance(positions, torch.Tensor) or not positions.is_nested or positions.dim() != TOKENS + 1:
        return
    values, offsets = positions.values(), positions.offsets()
    if int(offsets[-1]) == len(values):  # along the first
        rows = values.unflatten(0, (len(offsets) - 1, -1)).unbind()
        data[POSITIONS] = nested_tensor_from_tensor_list(list(rows), ragged_idx=TOKENS)
    else:  # which is lost where such a batch was pickled
        positions._ragged_idx = TOKENS


def nest_positions_along_tokens() -> None:
    """verl's workers of this process do so from now on."""
    for module in (engine_workers, base):
        module.maybe_fix_3d_position_ids = nest_along_tokens
