"""A group's sessions reach TransferQueue as one batch, whose rows are those that verl's own worker would put."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue
from support.scripted_loops import KEPT, Put, Scripted, output, put, run_prompt, scripted, worker
from verl.experimental.agent_loop import agent_loop as verls
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from seamless_verl.agent_loops.group import GROUP
from seamless_verl.agent_loops.loops import dropped_as
from seamless_verl.agent_loops.queue_writer import QueueWriter
from seamless_verl.agent_loops.rows import FIRST, PROMPT, SAMPLES, Row, SessionOutputs
from seamless_verl.agent_loops.scoring import with_arrays
from seamless_verl.agent_loops.worker import SeamlessAgentLoopWorker, loop_factory
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.config.verl_keys import RESERVED_COLUMNS
from seamless_verl.data_plane.group_notifier import GroupNotifier
from seamless_verl.errors import GroupsFailedError
from seamless_verl.platform.adaptation import plain_class
from seamless_verl.runtime.waits import QUEUE, WaitKind
from seamless_verl.trajectory.account import DropReason

pytestmark = pytest.mark.integration
__all__ = ["put", "scripted"]


@pytest.mark.parametrize(
    "sessions",
    [
        pytest.param([[output([7, 8])], [output([9], 0.0)]], id="a sequence each"),
        pytest.param([[output([7, 8], None), output([9, 9, 9])], [output([1])]], id="several sequences share a reward"),
    ],
)
def test_the_rows_are_those_of_verl(put: Put, scripted: dict[int, Any], sessions: list[list[AgentLoopOutput]]) -> None:
    host_put = Put()
    host = worker(plain_class(AgentLoopWorkerTQ), put)
    for i, outputs in enumerate(sessions):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer_queue, "async_kv_batch_put", host_put.batch)
            copies = [output.model_copy(deep=True) for output in outputs]
            asyncio.run(host._agent_loop_postprocess(copies, False, uid="u", session_id=i, **KEPT))
        scripted[i] = outputs
    run_prompt(worker(SeamlessAgentLoopWorker, put, len(sessions)))
    assert len(put.batches) == 1 and put.batches[0]["partition_id"] == host_put.batches[0]["partition_id"] == "train"
    found, expected = put.rows(), host_put.rows()
    assert list(found) == list(expected)
    for key, (tag, columns) in expected.items():
        assert found[key][0] == tag
        assert found[key][1].keys() - columns.keys() == {"weight_version", "grammar"}
        for name, value in columns.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(found[key][1][name], value), (key, name)


def test_rows_with_other_columns_are_put_by_themselves(put: Put, scripted: dict[int, Any]) -> None:
    scripted |= {0: output([7]), 1: output([8], None), 2: output([9])}  # the second is scored by the trainer
    run_prompt(worker(SeamlessAgentLoopWorker, put, 3))
    assert [batch["keys"] for batch in put.batches] == [["u_0_0", "u_2_0"], ["u_1_0"]]


def test_sessions_are_acknowledged_when_all_are_put_and_then_the_group_ends(put: Put, scripted: dict[int, Any]) -> None:
    made = worker(SeamlessAgentLoopWorker, put, 3)
    scripted |= {i: SessionOutputs([output([i])], made.plane, f"s{i}") for i in range(3)}
    run_prompt(made)
    assert made.plane.events == [("s0", 1), ("s1", 1), ("s2", 1), ("group ended", None)]
    assert put.tags == [("u", "running"), ("u", "finished")]


def test_sessions_that_await_nothing_are_put_and_acknowledged_once(put: Put, scripted: dict[int, Any]) -> None:
    verls._agent_loop_registry["scripted"]["tag"] = "awaits nothing"
    made = worker(SeamlessAgentLoopWorker, put, 3)
    scripted |= {i: SessionOutputs([output([i])], made.plane, f"s{i}") for i in range(3)}
    run_prompt(made)
    assert sorted(key for batch in put.batches for key in batch["keys"]) == ["u_0_0", "u_1_0", "u_2_0"]
    assert sorted(name for name, _ in made.plane.events) == ["group ended", "s0", "s1", "s2"]


@pytest.mark.parametrize("failing", [(), (4,), (4, 5)])
def test_a_reopened_group_gets_the_sessions_after_its_first(
    put: Put, scripted: dict[int, Any], failing: tuple[int, ...]
) -> None:
    """Its rows have what the sampler reads; extra sessions that all fail leave the first ones to be trained."""
    made = worker(SeamlessAgentLoopWorker, put, 4)
    scripted |= {i: SessionOutputs([output([i], i / 8)], made.plane, f"s{i}") for i in (4, 5)}
    scripted |= {i: TimeoutError("connect") for i in failing}
    run_prompt(made, **{SAMPLES: 2, FIRST: 4, PROMPT: "p"})
    rows = put.rows()
    assert list(rows) == [f"u_{i}_0" for i in (4, 5) if i not in failing]
    assert [(tag["prompt"], tag["reward"]) for tag, _ in rows.values()] == [
        ("p", i / 8) for i in (4, 5) if i not in failing
    ]
    assert not any({SAMPLES, FIRST, PROMPT} & columns.keys() for _, columns in rows.values())
    assert put.tags[-1] == ("u", "finished") and made.plane.ends[0].error is None


@pytest.mark.parametrize("again", [False, True])
async def test_a_group_that_is_reopened_before_its_first_task_has_ended_still_ends(
    put: Put, scripted: dict[int, Any], monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The trainer may reopen it as soon as its prompt is marked as finished. Its extra sessions can be deferred."""
    made, release, later = worker(SeamlessAgentLoopWorker, put, 1), asyncio.Event(), list[asyncio.Task[None]]()
    trajectory = {"step": 7, "sample_index": 0, "rollout_n": 0, "validate": False}
    prompt = {"uid": "u", "agent_name": "scripted", **KEPT}

    async def mark(**kwargs: Any) -> None:
        await put.single(**kwargs)
        if kwargs["tag"]["status"] == "finished" and not later:
            columns = {**prompt, SAMPLES: 1, FIRST: 1}
            later.append(asyncio.create_task(made._run_prompt(columns, {}, trajectory=trajectory)))
            await asyncio.sleep(0)
            if again:  # and it has ended already
                release.set()
                await later[0]

    async def extra() -> AgentLoopOutput:
        await release.wait()
        return output([8])

    monkeypatch.setattr(transfer_queue, "async_kv_put", mark)
    scripted |= {0: output([7]), 1: extra}
    await made._run_prompt(dict(prompt), {}, trajectory=trajectory)
    assert made.plane.ends[-1].error is None and len(made.plane.ends) == 1 + again
    assert ("u" in made.running) is not again
    await made.defer(["u"])
    assert len(made.plane.ends) == 2 and made.plane.ends[-1].deferred is not again and made.running == {}
    assert list(put.rows()) == ["u_0_0", "u_1_0"][: 1 + again]


@pytest.mark.parametrize("failing", range(3))
def test_a_group_is_trained_without_its_failed_session(
    put: Put, scripted: dict[int, Any], caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    made = worker(SeamlessAgentLoopWorker, put, 3)
    scripted |= {i: SessionOutputs([output([i])], made.plane, f"s{i}") for i in range(3)}
    scripted[failing] = ValueError("no\n" * 1000)
    run_prompt(made)
    kept = [i for i in range(3) if i != failing]
    assert [batch["keys"] for batch in put.batches] == [[f"u_{i}_0" for i in kept]]
    assert made.plane.events == [*((f"s{i}", 1) for i in kept), ("group ended", None)]
    assert put.tags[-1] == ("u", "finished")
    assert (made.plane.ends[0].failed, made.plane.ends[0].kinds) == (1, {"error": 1})
    (line,) = caplog.messages
    assert line.startswith(f"session {failing} of prompt u failed and is left out: ValueError: no no")
    assert len(line) < 600 and "\n" not in line and caplog.records[0].exc_info is None


@pytest.mark.parametrize(("needed", "kept"), [(None, False), (1, True), (2, False)])
def test_a_group_of_too_few_sessions_is_dropped_and_says_so(
    put: Put, scripted: dict[int, Any], caplog: pytest.LogCaptureFixture, needed: int | None, kept: bool
) -> None:
    made = worker(SeamlessAgentLoopWorker, put, 3)
    made.seamless = SeamlessConfig(min_sessions=needed)
    scripted |= {0: SessionOutputs([output([0])], made.plane, "s0"), 1: TimeoutError("connect"), 2: []}
    run_prompt(made)
    assert put.tags[-1] == ("u", "finished" if kept else "failure") and len(put.batches) == kept
    assert made.plane.events[0] == ("s0", 1 if kept else "dropped")
    assert made.plane.notes["s0"].rewards == {"reward": 1.0, "acc": 1.0}
    assert made.plane.notes["s0"].reason.startswith("" if kept else "prompt u is dropped: 1 of its 3 sessions")
    counts = GroupNotifier(8)
    counts.notify(made.plane.ends[0])
    metrics = counts.metrics()
    assert (metrics["groups/ended"], metrics["groups/dropped"]) == (1, not kept)
    assert (metrics["sessions/ended"], metrics["sessions/failed"]) == (3, 2)
    assert metrics["sessions/failed/error"] == metrics["sessions/failed/untrainable"] == 1
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in caplog.records)
    if not kept:
        expected = "prompt u is dropped: 1 of its 3 sessions can be trained, and seamless.min_sessions needs 2. The "
        assert caplog.messages[-1].startswith(expected) and made.plane.ends[0].error == caplog.messages[-1]


def test_validation_keeps_the_one_session_that_did_not_fail(put: Put, scripted: dict[int, Any]) -> None:
    made = worker(SeamlessAgentLoopWorker, put, 3)
    scripted |= {0: ValueError("a"), 1: [output([1])], 2: ValueError("b")}
    run_prompt(made, validate=True)
    assert [(batch["partition_id"], batch["keys"]) for batch in put.batches] == [("val", ["u_1_0"])]
    assert made.plane.ends[0].validation and made.plane.ends[0].error is None


def test_a_put_that_fails_fails_the_group(put: Put, scripted: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(**kwargs: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", refused)
    made = worker(SeamlessAgentLoopWorker, put, 2)
    scripted |= {i: SessionOutputs([output([i])], made.plane, f"s{i}") for i in range(2)}
    run_prompt(made)
    dropped = [("s0", "dropped"), ("s1", "dropped")]
    assert made.plane.events == [*dropped, ("group ended", "ConnectionError: gone")] and put.tags[-1] == (
        "u",
        "failure",
    )


async def test_groups_that_end_during_a_put_are_put_together_without_cancelled_ones(put: Put) -> None:
    async def scenario() -> None:
        writer, row = QueueWriter(), lambda name: [Row(name, {"prompts": torch.ones(1)}, {})]
        tasks = [asyncio.create_task(writer.put(row("first"), "train"))]
        await asyncio.sleep(0)
        partitions = {"a": "train", "b": "val", "cancelled": "train", "c": "train"}
        tasks += [asyncio.create_task(writer.put(row(name), partition)) for name, partition in partitions.items()]
        await asyncio.sleep(0)
        tasks[3].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in ended] == [type(None)] * 3 + [asyncio.CancelledError, type(None)]
        await writer.put(row("later"), "val")
        assert writer.writing is None or writer.writing.done()

    await scenario()
    assert [(batch["partition_id"], batch["keys"]) for batch in put.batches] == [
        ("train", ["first"]),
        ("train", ["a", "c"]),
        ("val", ["b"]),
        ("val", ["later"]),
    ]


async def test_a_group_whose_rows_cannot_be_put_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[list[str]] = []

    async def refuse_bad(*, keys: list[str], **kwargs: Any) -> None:
        await asyncio.sleep(0)
        if "bad" in keys:
            raise ValueError("no")
        put.append(keys)

    async def scenario() -> list[Any]:
        writer = QueueWriter()
        rows = ([Row(name, {"prompts": torch.ones(1)}, {})] for name in ("first", "a", "bad", "b"))
        tasks = [asyncio.create_task(writer.put(group, "train")) for group in rows]
        await asyncio.sleep(0)
        return await asyncio.gather(*tasks, return_exceptions=True)

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", refuse_bad)
    ended = await scenario()
    assert put == [["first"], ["a"], ["b"]]
    assert [type(result) for result in ended] == [type(None), type(None), ValueError, type(None)]


def test_of_a_group_that_is_stopped_nothing_is_trained(put: Put, scripted: dict[int, Any]) -> None:
    made = worker(SeamlessAgentLoopWorker, put, 2)
    scripted |= {0: SessionOutputs([output([0])], made.plane, "s0"), 1: asyncio.CancelledError()}
    run_prompt(made)
    assert put.batches == [] and made.plane.events[0] == ("s0", "dropped")


async def forever() -> None:
    await asyncio.Event().wait()


async def deferred_while_it_runs(made: Any, looks: int) -> None:
    """Defers the group after so many turns of the event loop, as the trainer does, with another one that has ended."""
    trajectory = {"step": 7, "sample_index": 0, "rollout_n": 0, "validate": False}
    prompt = {"uid": "u", "agent_name": "scripted", **KEPT}
    group = asyncio.create_task(made._run_prompt(prompt, {}, trajectory=trajectory))
    for _ in range(looks):
        await asyncio.sleep(0)
    await made.defer(["ended before", "u"])
    assert group.done() and not group.cancelled() and group.exception() is None and made.running == {}


@pytest.mark.parametrize("looks", [1, 2, 4, 20])
async def test_a_deferred_group_puts_nothing_and_is_no_failure(
    put: Put, scripted: dict[int, Any], looks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However far its sessions are: not begun, begun, or one of two ended."""
    made = worker(SeamlessAgentLoopWorker, put, 2)
    scripted |= {0: SessionOutputs([output([0])], made.plane, "s0"), 1: forever}
    await deferred_while_it_runs(made, looks)
    assert put.batches == [] and "finished" not in dict(put.tags).values() and "failure" not in dict(put.tags).values()
    (end,) = made.plane.ends
    assert end.deferred and caplog.messages == []
    counts = GroupNotifier(8)
    counts.notify(end)
    metrics = counts.metrics()
    assert (metrics["groups/ended"], metrics["groups/dropped"], metrics["groups/deferred"]) == (1, 0, 1)
    if looks == 20:
        note = made.plane.notes["s0"]
        assert made.plane.events[0] == ("s0", "dropped") and note.reason == "its step had enough groups"
        assert note.as_dict(kept=False)["dropped"] == "deferred"


async def test_a_group_that_is_handed_over_is_not_deferred(
    put: Put, scripted: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are being put: they are all put, and the trainer counts them as dropped."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(**kwargs: Any) -> None:
        begun.set()
        await release.wait()
        await put.batch(**kwargs)

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", slow)
    made = worker(SeamlessAgentLoopWorker, put)
    scripted |= {0: SessionOutputs([output([0])], made.plane, "s0")}
    deferring = asyncio.create_task(deferred_while_it_runs(made, 20))
    await begun.wait()
    for _ in range(30):
        await asyncio.sleep(0)
    assert not deferring.done()
    release.set()
    await deferring
    assert [batch["keys"] for batch in put.batches] == [["u_0_0"]] and put.tags[-1] == ("u", "finished")
    assert made.plane.events == [("s0", 1), ("group ended", None)] and not made.plane.ends[0].deferred


async def run_until_stuck(made: Any) -> asyncio.Task[None]:
    """Runs the group until only sessions are left that do not end."""
    trajectory = {"step": 7, "sample_index": 0, "rollout_n": 0, "validate": False}
    running = asyncio.create_task(made._run_prompt({"uid": "u", "agent_name": "scripted", **KEPT}, {}, trajectory))
    for _ in range(30):
        await asyncio.sleep(0)
    assert not running.done()
    return running


@pytest.mark.parametrize(("needed", "kept"), [(1, True), (2, False)])
async def test_a_group_that_is_stuck_is_trained_without_the_sessions_that_do_not_end(
    put: Put, scripted: dict[int, Any], caplog: pytest.LogCaptureFixture, needed: int, kept: bool
) -> None:
    made, stopped_as = worker(SeamlessAgentLoopWorker, put, 3), list[DropReason]()

    async def counted(name: str) -> None:
        GROUP.get().opened(name)
        try:
            await forever()
        finally:
            stopped_as.append(dropped_as())

    made.seamless = SeamlessConfig(min_sessions=needed)
    scripted |= {
        0: SessionOutputs([output([0])], made.plane, "s0"),
        1: partial(counted, "s1"),
        2: partial(counted, "s2"),
    }
    running = await run_until_stuck(made)
    (wait,) = await made.waits()
    assert (wait.kind, wait.name, wait.on) == (WaitKind.GROUP, "group u", ()) and "2 sessions" in wait.what
    assert await made.end_stuck("another", "s1", "it is late") == 0 and not running.done()
    assert await made.end_stuck("u", "one that has ended", "it is late") == 0 and not running.done()
    assert [await made.end_stuck("u", name, "it is late") for name in ("s1", "s2")] == [1, 1]
    await running
    assert put.tags[-1] == ("u", "finished" if kept else "failure") and len(put.batches) == kept
    assert made.plane.events[0] == ("s0", 1 if kept else "dropped") and made.running == {}
    assert made.plane.ends[0].kinds == {"stuck": 2} and not made.plane.ends[0].deferred
    assert stopped_as == [DropReason.TIMED_OUT] * 2
    (line,) = (line for line in caplog.messages if "of prompt u failed and is left out: " in line)
    assert line.endswith("out: it is late"), "one line for both"


async def test_only_the_session_that_is_stuck_is_ended(put: Put, scripted: dict[int, Any]) -> None:
    made, release = worker(SeamlessAgentLoopWorker, put, 3), asyncio.Event()

    async def opened(name: str, until: asyncio.Event) -> list[AgentLoopOutput]:
        GROUP.get().opened(name)
        await until.wait()
        return [output([7])]

    scripted |= {i: partial(opened, f"s{i}", asyncio.Event() if i == 1 else release) for i in range(3)}
    running = await run_until_stuck(made)
    assert await made.end_stuck("u", "s1", "it is late") == 1
    release.set()
    await running
    assert made.plane.ends[0].kinds == {"stuck": 1} and list(put.rows()) == ["u_0_0", "u_2_0"]


async def test_a_hand_over_is_not_interrupted_by_the_end_of_a_stuck_group(
    put: Put, scripted: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, release = worker(SeamlessAgentLoopWorker, put, 1), asyncio.Event()

    async def late(**kwargs: Any) -> None:
        await release.wait()
        await put.batch(**kwargs)

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", late)
    scripted |= {0: SessionOutputs([output([0])], made.plane, "s0")}
    running = await run_until_stuck(made)
    waits = {wait.name: wait for wait in await made.waits()}
    assert waits["group u"].on == (QUEUE,) and waits[QUEUE].kind is WaitKind.QUEUE
    assert await made.end_stuck("u", "s0", "it is late") == 0
    release.set()
    await running
    assert put.tags[-1] == ("u", "finished") and made.plane.events == [("s0", 1), ("group ended", None)]
    assert await made.waits() == []


def test_a_session_without_rows_is_logged(put: Put, scripted: dict[int, Any], caplog: pytest.LogCaptureFixture) -> None:
    scripted |= {0: []}
    run_prompt(worker(SeamlessAgentLoopWorker, put))
    assert put.batches == [] and "session 0 of prompt u failed and is left out: it left" in caplog.text


def test_an_unknown_agent_loop_is_named(put: Put) -> None:
    made = worker(SeamlessAgentLoopWorker, put)
    run_prompt(made)
    ((_, error),) = made.plane.events
    assert "The last failure: ConfigError: agent_name='scripted': no agent loop has that name, only [" in error


def test_parts_of_a_loop_are_made_anew_for_each(scripted: dict[int, Any]) -> None:
    target = f"{Scripted.__module__}.{Scripted.__name__}"
    plain = loop_factory({"_target_": target, "tag": "a"})
    with_part = loop_factory({"_target_": target, "part": {"_target_": target}})
    assert plain(tools=[]).tag == "a" and plain() is not plain()
    assert with_part().kwargs["part"] is not with_part().kwargs["part"]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({SAMPLES: "many"}, "ValueError: invalid literal for int"),
        ({SAMPLES: 0}, f"its column {SAMPLES} is 0"),
    ],
)
def test_an_error_of_a_whole_prompt_is_why_its_group_is_dropped(
    put: Put, scripted: dict[int, Any], columns: dict[str, Any], why: str
) -> None:
    made = worker(SeamlessAgentLoopWorker, put)
    run_prompt(made, **columns)
    (end,) = made.plane.ends
    assert end.error is not None and end.error.startswith("the group of prompt u failed: ") and why in end.error
    assert put.tags == [("u", "running"), ("u", "failure")] and put.batches == []


@pytest.mark.parametrize("name", sorted(RESERVED_COLUMNS))
def test_what_the_run_computes_wins_over_a_column_of_its_name(put: Put, scripted: dict[int, Any], name: str) -> None:
    scripted |= {0: output([7, 8])}
    run_prompt(worker(SeamlessAgentLoopWorker, put), **{name: "mine"})
    (_, columns) = put.rows()["u_0_0"]
    assert columns.get(name) != "mine" and columns["rm_scores"].tolist() == [0.0, 1.0]
    assert columns["data_source"] == "a" and put.tags[-1] == ("u", "finished")


async def cancels_itself() -> None:
    raise asyncio.CancelledError


def test_a_session_that_nobody_cancelled_fails_by_itself(put: Put, scripted: dict[int, Any]) -> None:
    made = worker(SeamlessAgentLoopWorker, put, 3)
    scripted |= {0: output([7]), 1: output([8]), 2: cancels_itself}
    run_prompt(made)
    assert [batch["keys"] for batch in put.batches] == [["u_0_0", "u_1_0"]] and made.plane.ends[0].kinds == {"error": 1}
    scripted |= dict.fromkeys(range(3), cancels_itself)
    run_prompt(made)
    assert "raised CancelledError, and nobody had cancelled it" in str(made.plane.ends[1].error)


@pytest.mark.parametrize(
    ("failures", "validate", "counts"),
    [
        (["failed", "failed"], False, True),
        (["failed", "output_limit"], False, True),
        (["failed", "timed_out"], False, False),
        (["failed", None], False, False),
        (["failed", "failed"], True, False),
    ],
)
def test_a_group_whose_agents_all_failed_is_no_success_though_it_is_rewarded(
    put: Put, scripted: dict[int, Any], failures: list[str | None], validate: bool, counts: bool
) -> None:
    made, failing = worker(SeamlessAgentLoopWorker, put, 2), GroupNotifier(2)
    for i, failure in enumerate(failures):
        scripted[i] = SessionOutputs([output([i], 0.0)], made.plane, f"s{i}", failure, f"session {i}: no docker")
    for _ in range(2):
        run_prompt(made, validate)
        failing.notify(made.plane.ends[-1])
    assert len(put.batches) == 2 and all(end.error is None for end in made.plane.ends)
    if counts:
        with pytest.raises(GroupsFailedError, match="The last: session 1: no docker"):
            failing.check()
    else:
        failing.check()


def test_ragged_lists_of_a_prompt_are_arrays_of_objects() -> None:
    """verl repeats each column in an array, which numpy refuses of lists of several lengths."""
    columns = with_arrays({"ragged": [[1], [2, 3]], "deeper": [[1, [2]], [3, 4]], "even": [[1], [2]], "text": "a"})
    arrays = {name: np.array([value] * 2) for name, value in columns.items()}
    assert arrays["ragged"].dtype == arrays["deeper"].dtype == object
    assert arrays["ragged"].tolist() == [[[1], [2, 3]]] * 2 and arrays["deeper"][1].tolist() == [[1, [2]], [3, 4]]
    assert arrays["even"].shape == (2, 2, 1) and columns["even"] == [[1], [2]] and columns["text"] == "a"
