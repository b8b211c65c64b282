"""Forkserver: a process that imports the stack, and forks a worker for each launcher that asks.

Run as `python server.py <descriptor of a listening socket> <process id of its owner> [module ...]`.

Invariants: it has one thread of its own, since a fork copies only the thread that forks. It ends with its owner, and
not before. A launcher gets the exit code of its worker once. No worker outlives its launcher.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

from launcher import INTEGER, check_peer  # beside this file, and run as a script like it
from worker import ForkRequest, run_request

PRELOADED = (  # in the order in which a start-up needs them
    "ray._private.workers",
    "torch",
    "tensordict",
    "transfer_queue",
    "verl",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.experimental.separation.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
    "verl.experimental.reward_loop",
    "mbridge",
)


def spare_generator() -> None:
    """Has Ray draw the ids of actor classes, which modules make as they are imported, from the system's generator.

    Ray seeds its own in each process once, and in each thread from that. Once it is seeded here, a thread of a fork
    draws the same as that of another fork: two agent loop workers then give their calls to one data plane the same
    ids, at which Ray ends the data plane (a failed check of `erased == 1` in its core_worker.cc).
    """
    if (actor := sys.modules.get("ray.actor")) is None or isinstance(actor.ActorClassID, SystemDrawn):  # type: ignore[attr-defined]
        return
    actor.ActorClassID = SystemDrawn(actor.ActorClassID)  # type: ignore[attr-defined]


class SystemDrawn:
    """Stands in for a class of ids where only `from_random` is used."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def from_random(self) -> Any:
        return self.ids(os.urandom(self.ids.size()))


class ForkServer:
    """Owned state: the workers it forked, each with the connection of its launcher."""

    def __init__(self, server: socket.socket, owner: int) -> None:
        self.server, self.owner = server, os.pidfd_open(owner)
        self.workers: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process id and connection
        self.launchers: dict[socket.socket, int] = {}  # by connection, while it is open: process id of the worker
        self.forks = 0

    def run(self, modules: tuple[str, ...]) -> None:
        for module in modules:
            if select.select([self.owner], [], [], 0)[0]:
                return
            with suppress(Exception):  # the worker that needs the module fails with the error, where it is reported
                importlib.import_module(module)
            spare_generator()
        gc.freeze()  # a million objects, which no fork's collections visit: each would take seconds, and copy them all
        while self.serve(None):
            pass

    def serve(self, timeout: float | None) -> bool:
        """Handle what is ready; False when the owner has gone."""
        ready, _, _ = select.select([self.server, self.owner, *self.workers, *self.launchers], [], [], timeout)
        for source in ready:
            if source is self.server:
                self.fork()
            elif source in self.launchers:  # a launcher sends nothing more: it was killed
                os.kill(self.launchers.pop(source), signal.SIGKILL)
            elif source in self.workers:
                self.reap(source)
        return self.owner not in ready

    def fork(self) -> None:
        connection, _ = self.server.accept()
        try:
            check_peer(connection)
            request = ForkRequest.receive(connection)
        except (OSError, ValueError, struct.error):  # another user, or a launcher that was killed while it asked
            connection.close()
            return
        if select.select([connection], [], [], 0)[0]:  # a launcher sends nothing more: it was killed while it waited
            request.close()
            connection.close()
            return
        self.forks += 1
        worker = os.fork()
        if worker == 0:
            sockets = [self.server, connection, *(launcher for _, launcher in self.workers.values())]
            run_request(request, self.forks, [*(each.detach() for each in sockets), self.owner, *self.workers])
        request.close()
        self.workers[os.pidfd_open(worker)] = (worker, connection)
        self.launchers[connection] = worker
        send_integer(connection, worker)

    def reap(self, pidfd: int) -> None:
        worker, connection = self.workers.pop(pidfd)
        self.launchers.pop(connection, None)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        send_integer(connection, code if code >= 0 else 128 - code)
        connection.close()


def send_integer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the launcher was killed, and its worker is next
        connection.sendall(INTEGER.pack(number))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its owner decides when it ends
    gc.disable()  # until a fork enables it: what is imported stays
    ForkServer(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run(tuple(sys.argv[3:]) or PRELOADED)
