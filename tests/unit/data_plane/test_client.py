"""What an agent loop that is cancelled asks of its data plane: all of it, also if it is cancelled twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.data_plane import client
from seamless_verl.data_plane.lease_book import DONE
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.session import Closed


class Call:
    """A reference to a call's reply, of which each future is one of its own."""

    def __init__(self) -> None:
        self.futures, self.reply = list[Future[Any]](), list[Any]()

    def future(self) -> Future[Any]:
        self.futures.append(future := Future[Any]())
        if self.reply:
            future.set_result(self.reply[0])
        return future

    def end(self, reply: Any) -> None:
        self.reply.append(reply)
        for future in self.futures:
            if future.set_running_or_notify_cancel():
                future.set_result(reply)


class Plane:
    """A data plane whose calls end when a test says so."""

    def __init__(self, **replies: Any) -> None:
        self.replies, self.asked, self.calls = replies, list[str](), list[Call]()

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*_: Any) -> Call:
            self.asked.append(method)
            self.calls.append(Call())
            return self.calls[-1]

        return SimpleNamespace(remote=remote)

    async def end_calls(self) -> None:
        """Ends those that were begun."""
        for method, call in zip(self.asked, self.calls, strict=True):
            if not call.reply:
                call.end(self.replies.get(method))
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def dropped() -> DropReason:
    return DropReason.SESSION


CASES: dict[str, tuple[Callable[[Plane], Coroutine[Any, Any, Any]], list[str]]] = {
    "discard": (lambda plane: client.discard_session(plane, "s", Closed.ABANDONED), ["close_session", "acknowledge"]),
    "open": (
        lambda plane: client.open_session(plane, {}),
        ["open_session", "close_session", "acknowledge"],
    ),
    "run": (
        lambda plane: client.run_task(plane, None, dropped),  # type: ignore[arg-type]
        ["run_task", "close_session", "acknowledge"],
    ),
    "take up": (
        lambda plane: client.take_up_session(plane, "u", "0", 1, dropped),
        ["take_up_session", "acknowledge"],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_second_cancellation_skips_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, expected = CASES[case]
    plane = Plane(
        open_session={"session_id": "s"},
        run_task=SimpleNamespace(state=DONE, session_id="s"),
        take_up_session=SimpleNamespace(session_id="s"),
    )
    monkeypatch.setitem(client._prompts_to_take_up, plane, {"u"})
    monkeypatch.setattr(client.ray, "cancel", lambda *_, **__: None)
    asking = asyncio.ensure_future(ask(plane))
    await settle()
    for _ in expected:
        for _ in range(2):
            asking.cancel()
            await settle()
        await plane.end_calls()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert plane.asked == expected and not client._clean_ups._working
