"""Our gateway as it runs in training, in a process of its own: connected to its replicas, with its journal on disk.

Run as `python -m seamless_verl.tools.bench.gateway.gateway_process MODEL JOURNAL ENGINE_PORT ...`. It prints its port,
and serves until its standard input closes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.server import Gateway, GatewaySettings
from seamless_verl.journal import SqliteJournal
from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.tools.bench.gateway.arms import ADMIN_KEY, announce_ports, wait_for_parent
from seamless_verl.tools.bench.gateway.load import MODEL
from seamless_verl.tools.bench.gateway.stub_process import TOKEN, replica_name
from seamless_verl.transport import RemoteEngine


class _NoControl:
    """A replica that is never paused."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def update_weights(self, version: int, weights: Any) -> None: ...


async def serve(model: str, journal_path: str, engine_ports: Sequence[int]) -> None:
    fleet = Fleet()
    fleet.commit(0)
    for name, port in zip(map(replica_name, count()), engine_ports, strict=False):
        engine = await RemoteEngine.connect("127.0.0.1", port, token=TOKEN, replica_id=name)
        fleet.add(name, engine=engine, control=_NoControl(), capacity=256, version=0)
    with SqliteJournal(Path(journal_path)) as journal:

        def take(session_id: str) -> None:  # as soon as it has ended, as a trainer does
            recorder.take(session_id)

        recorder = JournalRecorder(journal, on_closed=take)
        settings = GatewaySettings(model, ADMIN_KEY, ("--served-model-name", MODEL))
        async with Gateway(settings, source=Calls(fleet), recorder=recorder) as gateway:
            announce_ports(int(gateway.url.rpartition(":")[2]))
            await wait_for_parent()
        for name in list(fleet):
            await fleet.remove(name)


if __name__ == "__main__":
    logging.disable(logging.INFO)
    uvloop.run(serve(sys.argv[1], sys.argv[2], [int(port) for port in sys.argv[3:]]))
