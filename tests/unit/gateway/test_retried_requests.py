"""Marked retries through the middleware: each gets its own request's reply, or a new one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.asgi import ask, middleware_before

from seamless_verl.gateway.request_context import RequestContext, current_request
from seamless_verl.gateway.retries import CallOutput
from seamless_verl.gateway.session import SessionLimits
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.trajectory.records import Finish, empty_chunk

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


class Serving:
    """The middleware before an application whose calls end as the test says, with the status that it says."""

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.table, self.calls = SessionTable(), list[tuple[RequestContext, asyncio.Future[int]]]()
        self.session, self.key = self.table.open("u", limits=limits)
        self.middleware = middleware_before(self.serve, self.table, models=SimpleNamespace(context_length=100))

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        context, status = current_request(), asyncio.get_running_loop().create_future()
        output = context.attempt.outputs.setdefault(0, CallOutput())
        self.calls.append((context, status))
        try:
            code = await status
        except asyncio.CancelledError:  # as for a client that is gone
            output.fail()
            raise
        if code == 200:
            output.add(empty_chunk(Finish.STOP))
        else:
            output.fail()
        await send({"type": "http.response.start", "status": code})
        await send({"type": "http.response.body", "body": b"{}"})

    async def post(self, retry: int = 0) -> int:
        status, _ = await ask(self.middleware, "/v1/chat/completions", BODY, key=self.key, retry=retry)
        return int(status)

    async def begin(self, retry: int = 0) -> asyncio.Task[int]:
        """A request whose call runs, or that was refused."""
        task = asyncio.create_task(self.post(retry))
        for _ in range(20):
            await asyncio.sleep(0)
        return task

    def is_retry(self) -> bool:
        """Whether the latest call is that of a retry."""
        return self.calls[-1][0].is_retry


@asynccontextmanager
async def serving(**limits: int) -> AsyncGenerator[Serving]:
    served = Serving(SessionLimits(**limits))
    yield served
    for _, status in served.calls:
        if not status.done():
            status.set_result(200)
    await asyncio.sleep(0.01)
    served.table.check_integrity()


async def test_a_retry_after_a_429_is_a_new_request() -> None:
    async with serving(max_concurrent=2) as served:
        first, _ = await served.begin(), await served.begin()
        assert await (await served.begin()) == 429
        served.calls[0][1].set_result(200)
        assert await first == 200
        await served.begin(1)
        assert len(served.calls) == 3 and not served.is_retry(), "it would read another request's tokens"


@pytest.mark.parametrize("cancelled", [False, True], ids=["a 500", "a client that is gone"])
async def test_a_retry_after_a_failure_is_a_new_request(cancelled: bool) -> None:
    async with serving() as served:
        failing, _ = await served.begin(), await served.begin()
        if cancelled:
            failing.cancel()
            await asyncio.wait([failing])
        else:
            served.calls[0][1].set_result(500)
            assert await failing == 500
        await served.begin(1)
        assert not served.is_retry()
        await served.begin(1)
        assert served.is_retry(), "this one's request still runs"


async def test_a_retry_that_is_refused_is_still_that_of_its_request() -> None:
    async with serving(max_concurrent=1) as served:
        await served.begin()
        assert await (await served.begin(1)) == 429
        served.session.limits = SessionLimits()
        await served.begin(2)
        assert served.is_retry()


async def test_an_error_that_is_not_retried_leaves_nothing() -> None:
    async with serving() as served:
        failing, _ = await served.begin(), await served.begin()
        served.calls[0][1].set_result(400)
        assert await failing == 400
        await served.begin(1)
        assert served.is_retry()
