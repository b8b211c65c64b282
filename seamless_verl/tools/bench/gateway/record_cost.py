"""Measures what a long session costs to hold and to assemble: a hundred turns that replay their conversation."""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import SessionRecord

TURNS, CONTEXT, GENERATED, VOCABULARY = 100, 320, 960, 150_000
REPEATS = 7


@dataclass(frozen=True)
class RecordCost:
    """CPU seconds to build the tree from its turns and assemble the training sequences, and bytes held per token."""

    tokens: int
    turns: int
    assemble_s: float
    bytes_per_token: float


def record_cost() -> RecordCost:
    """The cost of one session, with the median of its seconds."""
    long = _session(TURNS)
    spent = median(_cpu_s(long) for _ in range(REPEATS))
    size = TURNS * (CONTEXT + GENERATED)
    return RecordCost(size, TURNS, spent, _bytes_held(TURNS) / size)


def _session(turns: int) -> list[Turn]:
    random, made, path = Random(0), [], tokens(())
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        path = path + tokens(random.randrange(VOCABULARY) for _ in range(CONTEXT))
        messages = [*messages, {"role": "user", "content": str(number)}]
        ids = tokens(random.randrange(VOCABULARY) for _ in range(GENERATED))
        segment = Segment(ids, logprobs([-1.0] * GENERATED), number, "replica")
        reply = {"role": "assistant", "content": str(number)}
        made.append(Turn(f"t{number}", path, [segment], Finish.STOP, {"messages": messages}, reply))
        path, messages = path + ids, [*messages, reply]
    return made


def _build_record(turns: list[Turn]) -> SessionRecord:
    record = SessionRecord("bench", "0")
    for turn in turns:
        record.add_turn(turn)
    return record


def _cpu_s(turns: list[Turn]) -> float:
    began = time.process_time()
    assemble(_build_record(turns), TrainAll(), len(turns))
    return time.process_time() - began


def _bytes_held(turns: int) -> float:
    """Bytes, with the segments, which live on in the tree; the turns themselves are gone."""
    gc.collect()
    tracemalloc.start()
    record = _build_record(_session(turns))
    gc.collect()
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.tree.generated == turns * GENERATED
    return size_bytes
