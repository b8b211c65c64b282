"""What verl does to a folder of checkpoints; processes that are to be killed import it, and so it imports little."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from seamless_verl.runtime.checkpoint_marker import TRACKER, tracker_state


def save(folder: Path, step: int, *, finish: bool = True) -> None:
    """As verl does, as far as it goes; at the end the tracker is emptied, then written."""
    (folder / f"global_step_{step}" / "actor").mkdir(parents=True, exist_ok=True)
    if finish:
        (folder / f"global_step_{step}" / "actor" / "weights").touch()
        (folder / f"global_step_{step}" / "data.pt").touch()
        write_tracker(folder, str(step))


def write_tracker(folder: Path, text: str) -> None:
    """With a time of its own, as in a real run: tests write twice within one tick of the clock."""
    state = tracker_state(folder)
    (folder / TRACKER).write_text(text)
    if state is not None:
        os.utime(folder / TRACKER, ns=(int(state[1]) + 10**9,) * 2)


def with_weights(checkpoint: Path, dtype: str, numbers: list[int], role: str = "actor") -> Path:
    """A checkpoint with a file as safetensors writes it: two tensors that are fine, and one of these bits."""
    width = {"BF16": "H", "F16": "H", "F32": "I", "F64": "Q"}[dtype]
    first, second = (struct.pack(f"<{len(bits)}{width}", *bits) for bits in ([0, 1], numbers))
    header, begin = dict[str, object]({"__metadata__": {"format": "pt"}}), 0
    for name, kind, data in (("ids", "I64", b"\xff" * 16), ("first", dtype, first), ("second", dtype, second)):
        header[name] = {"dtype": kind, "shape": [], "data_offsets": [begin, begin := begin + len(data)]}
    text = json.dumps(header).encode()
    file = checkpoint / role / "model" / "huggingface" / "model.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\xff" * 16 + first + second)
    return checkpoint
