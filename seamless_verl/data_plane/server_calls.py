"""Calls of the replicas' servers by the trainer, each with a limit: a process that hangs gives no reply and no error.

A server that does not reply costs each question the limit once: it is called again only after it has replied, however
late. That reply is returned then if it answers a question. If it answers a command it is dropped, and the command is
given again: it says nothing of what the server has done since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

logger = logging.getLogger(__name__)
REPLY_S = 10.0  # for a reply that takes no time: it is known to the server already


@dataclass(frozen=True)
class ServerCall:
    """A call of a server, made at `sent`, a monotonic time; `late` if its reply was waited for in vain."""

    server: Any
    reply: Any
    sent: float
    late: bool = False


class ServerCalls:
    """Calls of one `method`, which replies within `limit_s` seconds; `commands` if it is a command, and no question.

    Owned state: the calls without a reply, one for each server at most, by the name of its replica. For one thread.
    """

    def __init__(self, method: str, limit_s: float = REPLY_S, *, commands: bool = False) -> None:
        self.method, self.limit_s, self.commands = method, limit_s, commands
        self.open: dict[str, ServerCall] = {}

    def begin(self, servers: Mapping[str, Any]) -> None:
        """Calls these servers, but for those that did not reply yet; one that was started again is another server."""
        if self.commands:
            for name in self._replied(name for name, call in self.open.items() if call.late):
                del self.open[name]
        for name, server in servers.items():
            if name not in self.open or self.open[name].server is not server:
                self.open[name] = ServerCall(server, getattr(server, self.method).remote(), time.monotonic())

    def end(self) -> dict[str, ServerCall]:
        """The calls that have a reply, or whose server is dead, by the name of the replica."""
        awaited = [call.reply for call in self.open.values() if not call.late]
        if awaited:
            ray.wait(awaited, num_returns=len(awaited), timeout=self.limit_s)
        expected = [name for name, call in self.open.items() if not (self.commands and call.late)]
        ended = {name: self.open[name] for name in self._replied(expected)}
        silent = {name: call for name, call in self.open.items() if name not in ended}
        if fresh := [name for name, call in silent.items() if not call.late]:
            logger.warning(
                "the server of %s has not replied to %s for %g s, and is absent until it does",
                ", ".join(fresh),
                self.method,
                self.limit_s,
            )
        self.open = {name: replace(call, late=True) for name, call in silent.items()}
        return ended

    def _replied(self, names: Iterable[str]) -> list[str]:
        """Those of these replicas whose calls have ended by now."""
        calls = {self.open[name].reply: name for name in names}
        replied = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else []
        return [calls[reply] for reply in replied]

    def call(self, servers: Mapping[str, Any]) -> dict[str, ServerCall]:
        """Calls these servers; returns as `end`."""
        self.begin(servers)
        return self.end()
