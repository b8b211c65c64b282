"""A beginner: a tiny model after a warm start, made once for the same settings and the same code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from seamless_verl.runtime.files import write_atomically
from seamless_verl.tiny.models import code_digest, make_model

RECORD = "warm_start.json"  # in the model's folder: what it was made from


def make_beginner(
    folder: Path, seed: int, steps: int, *, code: Sequence[Path], warm_start: Callable[[Path, int, int], None]
) -> None:
    """Makes a model in `folder` and trains it there by `warm_start(folder, seed, steps)`, unless it exists.

    Args:
        folder: of the model; it is replaced.
        seed: of its weights, and of what it is trained on.
        steps: updates of the warm start.
        code: files that decide what the warm start does; the model is made again when one of them has changed.
        warm_start: trains the model in a folder.
    """
    digest = sha256(b"".join(file.read_bytes() for file in code)).hexdigest()
    record, made_from = folder / RECORD, {"seed": seed, "steps": steps, "code": [code_digest(), digest]}
    if record.is_file() and json.loads(record.read_text(encoding="utf-8")) == made_from:
        return
    began = time.monotonic()
    make_model("nano", seed, folder)
    warm_start(folder, seed, steps)
    write_atomically(record, json.dumps(made_from))  # last: without it, all of it is made again
    sys.stdout.write(f"warm start: {steps} steps in {time.monotonic() - began:.0f} s\n")
