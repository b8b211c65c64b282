"""Calls over replicas that pause, change weights, release their memory and die: an agent notices nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from support.rollout import World, call, check_prefix, check_whole, ids_of, run, settle, world

from seamless_verl.errors import CallGrammarError, CallLossesError, CallRefusedError
from seamless_verl.rollout.call import Calls, derived_seed
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.rollout.observation import ReplicaLoad, RolloutObservation
from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.tools.bench.stub_engine import StubEngine, stub_tokens
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens

WIRES = pytest.mark.parametrize("over_wire", [False, True], ids=["direct", "wire"])


async def take(chunks: AsyncGenerator[TokenChunk, None], number: int) -> list[TokenChunk]:
    return [await anext(chunks) for _ in range(number)]


async def rest(chunks: AsyncGenerator[TokenChunk, None]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


@WIRES
async def test_a_call_runs_to_its_budget(over_wire: bool) -> None:
    async with world(over_wire=over_wire) as w:
        await w.start("a", version=0)
        wanted = call(max_tokens=9)
        check_whole(wanted, await run(w.calls, wanted))
        place = Precedence(version=0, begins=True, shortness=0, ticket=0)
        assert w.stubs["a"].seen == [EngineRequest("c#0", wanted.prompt_ids, wanted.sampling, priority=place.priority)]
        assert w.calls.metrics()["calls/length"] == 1


@WIRES
async def test_a_death_loses_no_token_that_was_streamed(over_wire: bool) -> None:
    async with world(over_wire=over_wire) as w:
        await w.start("a", tokens_per_chunk=3)
        chunks = w.calls.stream(wanted := replace(call(max_tokens=900, seed=5, min_tokens=20), routes_from=2))
        begun = await take(chunks, 3)
        await w.start("b", tokens_per_chunk=2)
        await w.kill("a")
        begun += await rest(chunks)
        check_whole(wanted, begun)
        assert {chunk.replica for chunk in begun} == {"a", "b"}
        (request,) = w.stubs["b"].seen
        produced = request.resumed_tokens
        assert request.request_id == "c#1" and 9 <= produced < 900
        assert request.prompt_ids == wanted.prompt_ids + tokens(stub_tokens([1, 2, 3], produced))
        assert request.routes_from == len(request.prompt_ids), "what is produced keeps its routes"
        assert request.sampling["max_tokens"] == 900 - produced
        assert request.sampling["min_tokens"] == max(0, 20 - produced)
        assert request.sampling["seed"] == derived_seed(5, produced) != 5


@WIRES
async def test_a_call_stays_on_a_replica_that_is_paused_with_keep(over_wire: bool) -> None:
    async with world(over_wire=over_wire) as w:
        await w.start("a")
        await w.start("b", capacity=1)
        w.stubs["b"].version = 99  # no call may be routed to it
        await w.fleet.pause(["b"], PauseMode.KEEP)
        chunks = w.calls.stream(wanted := call(max_tokens=300))
        begun = await take(chunks, 2)
        remaining = asyncio.create_task(rest(chunks))
        await w.fleet.pause(["a"], PauseMode.KEEP)
        produced = len(w.stubs["a"].seen), w.stubs["a"].running
        await settle()
        assert not remaining.done() and produced == (1, 1)
        w.fleet.commit(1)
        await w.sync(["a"], 1)
        begun += await remaining
        check_whole(wanted, begun)
        assert len(w.stubs["a"].seen) == 1 and {chunk.version for chunk in begun} == {0, 1}


async def test_a_cut_at_the_last_token_is_an_end() -> None:
    async with world() as w:
        await w.start("a", tail=5)
        chunks = w.calls.stream(wanted := call(max_tokens=7))
        begun = await take(chunks, 2)
        await w.fleet.pause(["a"], PauseMode.ABORT)
        check_whole(wanted, begun + await rest(chunks))


class Scripted(StubEngine):
    """Gives these chunks to every request, then dies or ends the stream."""

    script: tuple[TokenChunk, ...] = ()
    dies = True

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        self.seen.append(request)
        for chunk in self.script:
            yield chunk
        if self.dies:
            self.kill()
            self._check_alive()


def add(w: World, name: str, engine: Scripted) -> None:
    w.fleet.add(name, engine=engine, control=engine, capacity=4, version=0)


async def test_a_death_between_the_last_token_and_its_finish_reason() -> None:
    async with world() as w:
        engine = Scripted("a")
        engine.script = (TokenChunk(tokens([8, 9]), logprobs([0, 0]), 0),)
        add(w, "a", engine)
        chunks = await run(w.calls, call(max_tokens=2))
        assert (ids_of(chunks), chunks[-1].finish_reason) == ([8, 9], Finish.LENGTH)


async def test_losses_without_a_token_are_bounded() -> None:
    async with world(max_losses=2) as w:
        for name in "abcd":
            add(w, name, Scripted(name))
        (last,) = await run(w.calls, call())
        assert last.finish_reason is Finish.FAILED and isinstance(last.error, CallLossesError)
        assert sorted(replica.state for replica in w.fleet.view) == ["dead", "dead", "dead", "serving"]


async def test_cuts_by_an_engine_that_was_not_paused_are_bounded() -> None:
    async with world(max_losses=2) as w:
        engine = Scripted("a")
        engine.dies = False
        add(w, "a", engine)
        (last,) = await run(w.calls, call())
        assert isinstance(last.error, CallLossesError) and "not paused" in str(last.error)
        assert len(engine.seen) == 3


async def test_a_request_that_an_engine_refuses_fails_with_its_reason() -> None:
    async with world() as w:
        engine = Scripted("a")
        engine.script = (TokenChunk(tokens([]), logprobs([]), 0, "", Finish.FAILED, "prompt too long"),)
        engine.dies = False
        add(w, "a", engine)
        (last,) = await run(w.calls, call())
        assert isinstance(last.error, CallRefusedError) and "prompt too long" in str(last.error)
        assert (last.finish_reason, last.stop_reason) == (Finish.FAILED, None)


async def test_stop_tokens_and_top_logprobs_pass_through() -> None:
    async with world() as w:
        await w.start("a")
        stop = stub_tokens([1, 2, 3], 6)[-1]
        chunks = await run(w.calls, call(stop_token_ids=[stop]))
        assert (len(chunks), chunks[-1].finish_reason, chunks[-1].stop_reason) == (6, Finish.STOP, stop)


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_call_that_was_cut_within_a_grammar(resumes: bool) -> None:
    async with world(grammars_resume=resumes) as w:
        await w.start("a")
        wanted = call(structured_outputs={"json": {}})
        chunks = w.calls.stream(wanted)
        begun = await take(chunks, 3)
        await w.fleet.pause(["a"], PauseMode.ABORT)
        await w.start("b")
        begun += await rest(chunks)
        if resumes:
            check_whole(wanted, begun)
        else:
            check_prefix(wanted, begun)
            assert begun[-1].finish_reason is Finish.FAILED and isinstance(begun[-1].error, CallGrammarError)


async def test_a_grammar_cut_before_its_first_token_continues() -> None:
    async with world() as w:
        await w.start("a")
        await w.stubs["a"].pause(PauseMode.KEEP)
        wanted = call(structured_outputs={"json": {}})
        running = asyncio.create_task(run(w.calls, wanted))
        await settle()
        await w.fleet.pause(["a"], PauseMode.ABORT)
        await w.fleet.resume(["a"])
        check_whole(wanted, await running)


@WIRES
async def test_closing_the_stream_between_chunks_aborts_the_request(over_wire: bool) -> None:
    async with world(over_wire=over_wire) as w:
        await w.start("a")
        chunks = w.calls.stream(call(max_tokens=10**9))
        await take(chunks, 1)
        assert w.stubs["a"].running == 1
        await chunks.aclose()
        await run(w.calls, call("next", max_tokens=2))  # it is sent after the abort
        assert w.stubs["a"].running == w.fleet.view[0].load == 0
        assert w.calls.metrics()["calls/cancelled"] == 1


async def test_a_call_whose_reader_found_its_end_is_known_as_one_that_ended() -> None:
    """As at a stop string: its length is known from then on, and its tokens are given to other engines."""
    async with world() as w:
        await w.start("a", capacity=2)
        calls = Calls(w.fleet, shares=True)
        chunks = calls.stream(wanted := call(max_tokens=10**9))
        ids = [token for chunk in await take(chunks, 30) for token in chunk.ids]
        wanted.reading.ended = True
        await chunks.aclose()
        assert (calls.metrics()["calls/stop"], calls.metrics()["calls/cancelled"]) == (1, 0)
        assert w.fleet.view[0].load == 0
        await w.start("b", capacity=2)
        await w.kill("a")
        other = calls.stream(call("other", max_tokens=10**9))
        await take(other, 1)
        assert [list(sample.ids) for sample in calls.take_samples("b")] == [ids]
        assert calls.observe((), 0).of("b").longest == len(ids) - 1, "as long as the one that ended"
        await other.aclose()
        calls.check_integrity()


async def test_an_error_that_is_a_defect_is_raised_and_counted() -> None:
    class Defective(StubEngine):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
            raise ZeroDivisionError
            yield

    async with world() as w:
        engine = Defective("a")
        w.fleet.add("a", engine=engine, control=engine, capacity=1, version=0)
        calls: Calls = w.calls
        with pytest.raises(ZeroDivisionError):
            await run(calls, call())
        assert calls.metrics()["calls/failed"] == 1


async def test_a_client_that_reads_the_end_slowly_holds_no_slot() -> None:
    async with world() as w:
        await w.start("a", capacity=1, tokens_per_chunk=4)
        slow = w.calls.stream(call("slow", max_tokens=4))
        assert (await anext(slow)).finish_reason is Finish.LENGTH
        check_whole(call("next"), await run(w.calls, call("next")))
        await slow.aclose()
        assert w.calls.metrics()["calls/length"] == 2


async def test_older_conversations_end_before_newer_ones_begin() -> None:
    async with world() as w:
        await w.start("a", capacity=1)
        await run(w.calls, call("first turn", key="old", max_tokens=2))
        holding = w.calls.stream(call("holding", max_tokens=900))
        await anext(holding)
        names, ended = {"new one": "new", "no conversation": "", "second turn": "old"}, list[str]()

        async def client(name: str, key: str) -> None:
            await run(w.calls, call(name, key=key, max_tokens=2))
            ended.append(name)

        running = [asyncio.create_task(client(*item)) for item in names.items()]
        await settle()
        assert w.fleet.metrics()["fleet/waiting"] == 3
        await holding.aclose()
        await asyncio.gather(*running)
        assert ended == ["second turn", "new one", "no conversation"]


async def test_a_slot_that_was_dropped_before_it_was_used_is_no_loss() -> None:
    async with world(max_losses=0) as w:
        await w.start("a", capacity=1)
        first = w.calls.stream(call("first"))
        await anext(first)
        waiting = asyncio.create_task(run(w.calls, call("waiting")))
        await settle()
        await first.aclose()  # the slot is granted to the waiting call, whose task has not run yet
        assert w.fleet.view[0].load == 1
        w.fleet.lost("a", "died")
        await w.start("b")
        check_whole(call("waiting"), await waiting)


async def test_losses_without_a_token_are_counted_in_a_row() -> None:
    async with world(max_losses=1) as w:
        wanted, engines = call(max_tokens=3), {name: Scripted(name) for name in "abcdef"}
        for name, engine in engines.items():
            add(w, name, engine)
        remaining = list(w.fleet.view)
        for number in range(6):  # in the order in which the call is routed to them
            preferred = PrefixAffinity().preferred(remaining)(wanted.affinity)
            engines[preferred or ""].script = (TokenChunk(tokens([number]), logprobs([0]), 0),) if number % 2 else ()
            remaining = [replica for replica in remaining if replica.replica_id != preferred]
        assert ids_of(await run(w.calls, wanted)) == [1, 3, 5]


@WIRES
@pytest.mark.parametrize("how", ["release", "fail_sync"])
async def test_calls_frozen_on_a_replica_that_leaves_continue_elsewhere(how: str, over_wire: bool) -> None:
    async with world(over_wire=over_wire) as w:
        await w.start("a")
        chunks = w.calls.stream(wanted := call(max_tokens=300))
        begun = await take(chunks, 3)
        await w.fleet.pause(["a"], PauseMode.KEEP)
        if how == "release":
            await w.fleet.release(["a"])
        else:
            await w.fleet.begin_sync(["a"])
            await w.fleet.fail_sync(["a"])
        assert w.fleet.view[0].load == 0
        await w.start("b")
        begun += await rest(chunks)
        check_whole(wanted, begun)
        assert {chunk.replica for chunk in begun} == {"a", "b"}


async def test_what_runs_where_is_observed() -> None:
    async with world() as w:
        await w.start("a", capacity=2, version=0)
        first = w.calls.stream(call("one", max_tokens=40, group="u"))
        second = w.calls.stream(call("two", max_tokens=30, group="v"))
        await take(first, 3)
        await take(second, 1)
        third = asyncio.create_task(rest(w.calls.stream(call("three", max_tokens=5, group="u"))))
        await settle()
        seen = w.calls.observe({"u"}, 7)
        assert seen == RolloutObservation((ReplicaLoad("a", 2, 1, 2, 4, 3.0),), waiting=1, finished=7)
        await w.fleet.pause(["a"], PauseMode.KEEP)
        assert w.calls.observe({"u"}, 7).replicas[0].running == 2, "frozen calls are on it"
        ends = asyncio.gather(rest(first), rest(second))
        await w.fleet.release(["a"])
        await settle()
        [released] = w.calls.observe({"u"}, 7).replicas
        assert (released.running, released.urgent, released.longest) == (0, 0, 0.0)
        assert w.calls.observe({"u"}, 7).waiting == 3
        assert released.slots == 2
        w.fleet.lost("a", "its process died")
        assert w.calls.observe({"u"}, 7).replicas[0].slots == 0
        ends.cancel()
        third.cancel()


async def test_calls_of_older_prompts_and_longer_ones_get_the_next_seat() -> None:
    async with world() as w:
        stub = await w.start("a", capacity=1)
        for prompt, tokens_of in (([7], 30), ([8], 5)):  # what is known of both prompts
            await run(w.calls, call("earlier", prompt, tokens_of))
        w.calls.group_began("late")  # its agent makes its first call after the commit
        w.fleet.commit(1)
        await w.fleet.pause(["a"], PauseMode.KEEP)
        await w.sync(["a"], 1)
        running = w.calls.stream(call("first", max_tokens=500))
        await take(running, 1)
        waiting = []
        for name, prompt, group in (("short", [8], "new"), ("long", [7], "new"), ("old", [8], "late")):
            waiting.append(asyncio.create_task(run(w.calls, call(name, prompt, 3, group=group))))
            await settle()
        await running.aclose()
        await asyncio.gather(*waiting)
        assert [request.request_id for request in stub.seen[3:]] == ["old#0", "long#0", "short#0"]
        priorities = [request.priority for request in stub.seen[3:]]
        assert priorities == sorted(set(priorities)), "and in this order in an engine"


async def test_a_group_s_finished_sample_says_that_its_others_are_long() -> None:
    async with world() as w:
        stub = await w.start("a", capacity=2)
        await run(w.calls, call("known", [8], 20))
        blocking = w.calls.stream(call("blocks", max_tokens=9_000))
        sibling = w.calls.stream(call("sibling", [7], 400))
        for running in (blocking, sibling):
            await take(running, 1)
        waiting = []
        for name, prompt in (("shorter", [8]), ("sibling's", [7])):
            waiting.append(asyncio.create_task(run(w.calls, call(name, prompt, 3))))
            await settle()
        ended = len(await rest(sibling))  # it had 400 tokens, which nobody knew when the others came
        await asyncio.gather(*waiting)
        await blocking.aclose()
        assert ended and [request.request_id for request in stub.seen[3:]] == ["sibling's#0", "shorter#0"]


async def test_a_call_that_was_cut_precedes_those_of_its_age_that_begin() -> None:
    async with world() as w:
        stub = await w.start("a", capacity=1)
        chunks = w.calls.stream(call("cut", [5], 40))
        await take(chunks, 2)
        remaining = asyncio.create_task(rest(chunks))
        waiting = asyncio.create_task(run(w.calls, call("begins", [6], 2)))
        await w.fleet.pause(["a"], PauseMode.ABORT)
        await settle()
        await w.fleet.resume(["a"])
        await asyncio.gather(remaining, waiting)
        assert [request.request_id for request in stub.seen] == ["cut#0", "cut#1", "begins#0"]
        assert stub.seen[1].priority < stub.seen[0].priority, "nothing of what it produced is at stake"
