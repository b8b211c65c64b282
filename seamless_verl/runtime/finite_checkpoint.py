"""Whether the weights of a checkpoint are finite numbers: what its run recorded, else what its files hold.

Our trainer looks at the weights before it saves them, in its workers, and records that. A checkpoint of verl's own
trainers has no record: its safetensors files are read then, as fast as the disk reads.
Weights in another format, or in a damaged file, are known when they are loaded, where the workers look at them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from seamless_verl.runtime.files import write_atomically

RECORD = "finite.json"  # in a checkpoint's folder
EXPONENTS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Of safetensors' types: as whole numbers, and the bits of the exponent, all 1 in what is not finite."""
PIECE = 1 << 24  # numbers, looked at together


def record_finite(checkpoint: Path) -> None:
    write_atomically(checkpoint / RECORD, json.dumps({"finite": True}))


def weights_not_finite(checkpoint: Path) -> str | None:
    """A tensor of actor or critic that has numbers which are not finite, as `<file>: <name>`; None if none is known."""
    if (checkpoint / RECORD).is_file():
        return None
    files = sorted(checkpoint.glob("*/**/*.safetensors"))
    return next((f"{file}: {name}" for file in files for name in _tensors_not_finite(file)), None)


def _tensors_not_finite(file: Path) -> Iterator[str]:
    import numpy as np

    whole = file.stat().st_size
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(size, whole)))
        except ValueError:  # it is damaged
            return
    for name, tensor in header.items():
        if tensor.get("dtype") not in EXPONENTS:  # also the entry of the file itself, __metadata__
            continue
        dtype, exponent = EXPONENTS[tensor["dtype"]]
        begin, end = (8 + size + offset for offset in tensor["data_offsets"])
        if end > whole:
            return
        bits = np.memmap(file, np.uint8, "r")[begin:end].view(dtype)
        if any(((bits[i : i + PIECE] & exponent) == exponent).any() for i in range(0, len(bits), PIECE)):
            yield name
