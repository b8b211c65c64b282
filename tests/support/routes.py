"""Routes that tell tokens apart: the row of a token has the token's own id."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.tools.bench.stub_engine import StubEngine, fold
from seamless_verl.trajectory.records import TokenChunk
from seamless_verl.trajectory.routes import Routes

LAYERS, CHOSEN = 3, 2


def rows_of(*values: int, dtype: Any = np.uint8) -> Routes:
    """One row for each value, which is in all of its ids."""
    rows = np.array(values, dtype)[:, None, None] + np.arange(LAYERS * CHOSEN, dtype=dtype).reshape(LAYERS, CHOSEN)
    return Routes.of(rows.astype(dtype))


def marks(rows: Any) -> list[int]:
    """The values that `rows_of` was given, of Routes or of an array."""
    return [int(row[0, 0]) for row in (rows.array() if isinstance(rows, Routes) else rows)]


def row_behind(ids: Sequence[int]) -> int:
    """What an engine chooses behind these tokens."""
    return fold(ids) % 200


class RoutedEngine(StubEngine):
    """Also its routes are a function of all tokens before them; it gives those that it is asked for."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        ids, first = list(request.prompt_ids), request.routes_from
        async for chunk in super().generate(request):
            if request.routes_from is None or not chunk.ids:
                yield chunk
                continue
            begin = len(ids)
            ids.extend(chunk.ids)
            rows = [row_behind(ids[:number]) for number in range(len(ids))]
            of_prompt, first = None if first is None else rows_of(*rows[first:begin]), None
            yield replace(chunk, routes=rows_of(*rows[begin:]), prompt_routes=of_prompt)
