"""A runner's connection to a run: it asks for tasks, gives signs of life, and reports how agents ended.

A run may be started again, or be unreachable for a while. So a request that got no reply, or that the run was too busy
for, is repeated. What the run refuses for good is raised.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from seamless_verl.client.http import bearer, checked_url, read_reply, tls
from seamless_verl.client.messages import (
    PROTOCOL,
    WAIT_S,
    Heartbeat,
    LeaseReply,
    LeaseRequest,
    TaskCompletion,
    TaskLease,
    TaskReturn,
)
from seamless_verl.errors import OutsideApiError

logger = logging.getLogger(__name__)
T = TypeVar("T")
TIMEOUT_S = 30.0  # of a reply, besides the wait for a task
TRIES = 3  # of a request, until a warning says that the run cannot be reached
LONGEST_PAUSE_S = 10.0  # between two tries
GIVE_BACK_S = 10.0  # for the run to take a task back from a runner that stops; later the lease expires
TEMPORARY = {408, 425, 429, 500, 502, 503, 504}  # of the run, or of a proxy before it


class RunConnection:
    """The connection of one runner to the run at `url`; an async context manager."""

    def __init__(self, url: str, key: str, *, runner: str, ca_file: str | None = None) -> None:
        self.url, self.runner = checked_url(url), runner
        self._lost = False  # whether the last request that ended got no reply
        self._known = False  # whether the run has replied: what else replies at its address from then on is a proxy
        self._warned = False  # that the run cannot be reached: once for all slots, until it can
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(TIMEOUT_S, read=WAIT_S + TIMEOUT_S)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=bearer(key), timeout=timeout, limits=limits, verify=tls(url, ca_file)
        )

    async def lease(self, agents: list[str]) -> TaskLease | None:
        """A task of one of these agents; None if there is none for a while.

        Cancelled, it returns the lease that the run may have given meanwhile: no reply would tell of it.
        """
        lease_id = secrets.token_hex(16)
        request = LeaseRequest(PROTOCOL, self.runner, agents, lease_id=lease_id)
        try:
            return (await self._post("/runner/lease", request, LeaseReply)).lease
        except asyncio.CancelledError:
            if not self._lost:  # where no request arrives there is no lease either, or it has waited too long for this
                await self._return_unseen(lease_id)
            raise
        except OutsideApiError as error:
            if error.code != "lease_ended":
                raise
            return None  # a reply was lost, the request was repeated, and the run has taken its lease back

    async def _return_unseen(self, lease_id: str) -> None:
        # As it should be, there is no such lease; one that is not returned in time expires by itself.
        with suppress(OutsideApiError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                await self._post(f"/runner/leases/{lease_id}/return", TaskReturn("the runner was stopped"), dict)

    async def heartbeat(self, lease: TaskLease) -> Heartbeat:
        """Extends the lease; raises OutsideApiError when it has ended."""
        return await self._post(f"/runner/leases/{lease.lease_id}/heartbeat", None, Heartbeat)

    async def complete(self, lease: TaskLease, completion: TaskCompletion) -> None:
        """Reports how the agent ended; raises OutsideApiError when the lease has ended."""
        await self._post(f"/runner/leases/{lease.lease_id}/complete", completion, dict[str, Any])

    async def give_back(self, lease: TaskLease, body: TaskReturn) -> None:
        """Returns the task; raises OutsideApiError when the lease has ended."""
        await self._post(f"/runner/leases/{lease.lease_id}/return", body, dict[str, Any])

    async def _post(self, path: str, body: msgspec.Struct | None, kind: type[T]) -> T:
        content, tries = b"{}" if body is None else msgspec.json.encode(body), 0
        while True:
            try:
                reply = read_reply(await self._http.post(path, content=content), kind)
                self._warned, self._lost, self._known = False, False, True
                return reply
            except OutsideApiError as error:
                if error.status not in TEMPORARY and not self._is_of_a_proxy(error):
                    raise
                reason, wait = str(error), error.retry_after
            except httpx.TransportError as error:
                reason, wait, self._lost = f"{type(error).__name__}: {error}", None, True
            tries += 1
            if tries >= TRIES and not self._warned:
                self._warned = True
                logger.warning("%s cannot be reached, tried %s times: %s", self.url, tries, reason)
            # Runners that lost the run together do not come back together.
            await asyncio.sleep(wait or random.uniform(0.1, min(LONGEST_PAUSE_S, 0.2 * 2**tries)))

    def _is_of_a_proxy(self, error: OutsideApiError) -> bool:
        """While a run is started again its proxy may say 404 or 530, in words of its own; a 401 is one of a key."""
        return self._known and error.code == "no_json" and error.status != 401

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
