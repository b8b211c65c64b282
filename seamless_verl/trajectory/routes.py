"""Routes: which experts of a mixture an engine chose, kept with the tokens that these choices made.

The row of a token is the choice at the position before it, in the forward pass that gave the token its logprob: for
each layer the ids of the chosen experts, in no order. So each token but the first of a sequence has one row, tokens
that are cut off take theirs along, and a continuation begins with a row of its own. A layer without experts has zeros.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

RouteArray: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]
HEADER = struct.Struct("<HBB")  # of packed routes: layers, experts of a token in a layer, bytes of an id
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
"""By the bytes of an id: one where the model has at most ONE_BYTE experts."""
ONE_BYTE = 256


@dataclass(frozen=True, slots=True)
class Routes:
    """The rows of consecutive tokens; `data` grows by `extend`.

    Raises:
        ValueError: the data are no whole rows, or an id would have another size than 1 or 2 bytes.
    """

    layers: int
    chosen: int  # experts of a token in a layer
    id_bytes: int
    data: bytearray

    def __post_init__(self) -> None:
        if self.id_bytes not in DTYPES or not self.width or len(self.data) % self.width:
            raise ValueError(f"routes: {len(self.data)} bytes are no rows of {self.form} (layers, experts, bytes)")

    @classmethod
    def of(cls, rows: RouteArray) -> Routes:
        """A copy of rows [N, layers, experts], uint8 or uint16."""
        _, layers, chosen = rows.shape
        dtype = DTYPES[rows.dtype.itemsize]
        return cls(layers, chosen, rows.dtype.itemsize, bytearray(rows.astype(dtype, copy=False).tobytes()))

    @property
    def form(self) -> tuple[int, int, int]:
        return self.layers, self.chosen, self.id_bytes

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.layers * self.chosen * self.id_bytes

    def __len__(self) -> int:
        return len(self.data) // self.width

    def part(self, start: int, stop: int | None = None) -> Routes:
        """A copy of the rows from `start` to before `stop`, counted as in a slice."""
        begin, end, _ = slice(start, stop).indices(len(self))
        return Routes(*self.form, self.data[begin * self.width : end * self.width])

    def extend(self, more: Routes) -> None:
        """Appends rows; raises ValueError if they are of another model."""
        if more.form != self.form:
            raise ValueError(f"routes of {self.form} (layers, experts, bytes) cannot be continued by {more.form}")
        self.data.extend(more.data)

    def after_zeros(self, number: int) -> Routes:
        """A copy behind so many rows of zeros."""
        return Routes(*self.form, bytearray(number * self.width) + self.data)

    def array(self) -> RouteArray:
        """The rows [N, layers, experts], uint8 or uint16; read-only, over a copy of the data."""
        flat = np.frombuffer(bytes(self.data), DTYPES[self.id_bytes])
        return flat.reshape(-1, self.layers, self.chosen)

    def pack(self) -> bytes:
        """As bytes, for a message or the journal: a header of 4 bytes, then a byte or two for each expert."""
        return HEADER.pack(*self.form) + self.data

    @classmethod
    def unpack(cls, packed: bytes) -> Routes:
        """Raises ValueError for what `pack` did not make."""
        if len(packed) < HEADER.size:
            raise ValueError(f"routes: {len(packed)} bytes are too few for a header")
        layers, chosen, id_bytes = HEADER.unpack_from(packed)
        return cls(layers, chosen, id_bytes, bytearray(packed[HEADER.size :]))


def packed(routes: Routes | None) -> bytes:
    """Empty for none."""
    return b"" if routes is None else routes.pack()


def unpacked(data: bytes | None) -> Routes | None:
    """None for empty; raises ValueError for what is not packed routes."""
    return Routes.unpack(data) if data else None


def joined(parts: list[Routes | None]) -> Routes | None:
    """All rows in order; None without parts, or if one of them is missing or of another model."""
    first, *others = parts or [None]
    if first is None or any(part is None or part.form != first.form for part in others):
        return None
    whole = first.part(0)
    for part in others:
        assert part is not None
        whole.extend(part)
    return whole
