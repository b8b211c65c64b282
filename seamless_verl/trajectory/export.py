"""Training sequences as rows of plain values, for JSONL files and for `Dataset.from_list`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seamless_verl.trajectory.sequences import Assembly, TrainingSequence
from seamless_verl.trajectory.session import SessionRecord

ARRAYS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "weight_version", "grammar")


def rows(session: SessionRecord, assembly: Assembly) -> list[dict[str, Any]]:
    """One row per training sequence; all rows of all sessions have the same columns.

    Columns: uid, session_id, leaf_id, closed (str, empty while open), turn_ids (list of str), the six
    arrays of TrainingSequence as lists, span_turn_ids, span_starts and span_stops (one entry per
    generated run of the response), reward_names and reward_values (one entry per reward).
    """
    return [_row(session, sequence) for sequence in assembly.sequences]


def _row(session: SessionRecord, sequence: TrainingSequence) -> dict[str, Any]:
    return {
        "uid": session.uid,
        "session_id": session.session_id,
        "leaf_id": sequence.leaf_id,
        "closed": str(session.closed or ""),
        "turn_ids": list(sequence.turn_ids),
        **{name: getattr(sequence, name).tolist() for name in ARRAYS},
        "span_turn_ids": [span.turn_id for span in sequence.spans],
        "span_starts": [span.start for span in sequence.spans],
        "span_stops": [span.stop for span in sequence.spans],
        "reward_names": list(session.rewards),
        "reward_values": list(session.rewards.values()),
    }


def write_jsonl(path: Path, entries: Iterable[dict[str, Any]]) -> int:
    """Writes one JSON object per line and returns their number. The file appears only when it is complete.

    Raises:
        ValueError: a number is not finite, which JSON cannot express.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as out:
            for entry in entries:
                out.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count
