"""A long session is cheap to hold and to assemble."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

import numpy as np

from seamless_verl.tools.trajectories.drift import find_drifts
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import SessionRecord

TURNS, CONTEXT, GENERATED = 100, 320, 960
TOKENS = TURNS * (CONTEXT + GENERATED)


def long_session() -> list[Turn]:
    """Each prompt repeats the last turn whole, messages included, and adds some."""
    random = np.random.default_rng(0)
    made, path, messages = [], tokens([]), []
    for number in range(TURNS):
        path = path + tokens(random.integers(0, 150_000, CONTEXT).tolist())
        messages = [*messages, {"role": "user", "content": "x" * CONTEXT}]
        ids = tokens(random.integers(0, 150_000, GENERATED).tolist())
        halves = [Segment(part, logprobs([-1.0] * len(part)), number, "r0") for part in (ids[:500], ids[500:])]
        reply = {"role": "assistant", "content": "y" * GENERATED}
        made.append(Turn(f"t{number}", path, halves, request={"messages": messages}, reply=reply, finish=Finish.STOP))
        path, messages = path + ids, [*messages, reply]
    return made


def recorded(turns: list[Turn]) -> SessionRecord:
    record = SessionRecord("u", "0")
    for turn in turns:
        record.add_turn(turn)
    return record


def seconds(turns: list[Turn]) -> float:
    start = time.process_time()
    made = assemble(recorded(turns), TrainAll(), TURNS)
    spent = time.process_time() - start
    assert made.account.trained == TURNS * GENERATED and len(made.sequences) == 1
    return spent


def test_a_hundred_turns_of_128k_tokens_take_under_50_ms() -> None:
    turns = long_session()
    assert TOKENS == 128_000
    assert statistics.median(seconds(turns) for _ in range(7)) < 0.050


def test_a_session_holds_under_12_bytes_a_token() -> None:
    """Measured with the segments, as they live on in the tree: 7 bytes of tokens at this mix, and the nodes."""
    long_session()  # what is imported on first use is not the session's
    gc.collect()
    tracemalloc.start()
    record = recorded(long_session())
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    text = sum(len(m["content"]) for m in record.turns[-1].request["messages"])
    assert record.tree.generated == TURNS * GENERATED
    assert (held - text) / TOKENS < 12


def test_cost_per_turn_does_not_grow_with_rewriting() -> None:
    """A clock in the system prompt parts every turn from all before: the worst case for the tree."""
    turns = long_session()
    for number, turn in enumerate(turns):
        turn.prompt_ids[0] = number
        turn.request["messages"] = [{"role": "user", "content": str(number)}, *turn.request["messages"][1:]]
    start = time.process_time()
    drifts = find_drifts(recorded(turns).tree)
    assert time.process_time() - start < 2.0
    assert len(drifts) == TURNS - 1
