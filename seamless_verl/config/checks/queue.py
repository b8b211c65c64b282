"""Check of TransferQueue's room: each prompt and each sample that is outstanding is a row of it.

A full storage unit refuses rows, which ends the run: TransferQueue's simple_storage.py `put_data`.
"""

from __future__ import annotations

from seamless_verl.config.checks.batches import SAMPLES, TRAIN
from seamless_verl.config.settings import Problem, Settings, check

BACKEND = "transfer_queue.backend"
SIZE = f"{BACKEND}.SimpleStorage.total_storage_size"


@check
def check_queue_room(settings: Settings) -> list[Problem]:
    """A warning where the rows that the staleness bound permits do not fit.

    They are those of the step that is trained, of `max_staleness` steps more, and of the step before until it is
    reported, when the next prompts may have been submitted. An agent whose conversation forks has several rows a
    sample, and a validation has its own.
    """
    size = settings.get(SIZE)
    if settings.mode != "seamless" or size is None or settings.text(f"{BACKEND}.storage_backend") != "SimpleStorage":
        return []
    steps = settings.seamless.staleness_bound + 2
    step_rows = settings.integer(TRAIN) * (1 + settings.integer(SAMPLES))
    if (rows := steps * step_rows + settings.integer(TRAIN)) <= settings.integer(SIZE):
        return []
    each = f"{TRAIN} x (1 + {SAMPLES}) each"
    reason = f"{steps} steps and the next prompts may have {rows} rows, {each}, and a full queue ends the run"
    return [Problem(SIZE, size, reason, f"Set {SIZE}=null, or {2 * rows}", warning=True)]
