"""A runner that is stopped while it asks for a task: it returns what it may have been given."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from seamless_verl.client.connection import RunConnection


async def test_a_lease_whose_reply_was_not_awaited_is_returned_by_its_id() -> None:
    asked, returned = asyncio.Event(), list[str]()
    lease_ids = list[str]()

    async def run(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/runner/lease":
            lease_ids.append(json.loads(request.content)["lease_id"])
            asked.set()
            await asyncio.Future()  # the reply is on its way for ever
        returned.append(request.url.path)
        return httpx.Response(200, json={})

    async with RunConnection("http://run", "key", runner="r") as connection:
        connection._http = httpx.AsyncClient(base_url="http://run", transport=httpx.MockTransport(run))
        asking = asyncio.create_task(connection.lease(["a"]))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert returned == [f"/runner/leases/{lease_ids[0]}/return"]


async def test_a_lease_that_the_run_took_back_is_no_task() -> None:
    async def run(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409, json={"error": {"code": "lease_ended", "message": "Ask with a new id"}})

    async with RunConnection("http://run", "key", runner="r") as connection:
        connection._http = httpx.AsyncClient(base_url="http://run", transport=httpx.MockTransport(run))
        assert await connection.lease(["a"]) is None
