"""The gateway as a server: uvicorn in the running event loop, started and stopped by whoever owns it."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import uvicorn
from vllm import envs

from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.door import MAX_BODY, Door
from seamless_verl.gateway.engine_client import FleetEngineClient
from seamless_verl.gateway.restoring import Restoring
from seamless_verl.gateway.seam import CallSource, Recorder
from seamless_verl.gateway.serving import rendering_config, serve_arguments, serving_app
from seamless_verl.gateway.sessions import SessionTable

logger = logging.getLogger(__name__)
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections: they close first, no request is lost in between
EXPIRY_SECONDS = 1.0  # how late an expired session may reach the record; its calls are refused at once


@dataclass(frozen=True)
class GatewaySettings:
    """`options` are those of `vllm serve`; `port` 0 takes any that is free; `grace` in seconds, for calls at the end.

    `host` is what agents reach, and listen to as well.
    """

    model: str
    admin_key: str
    options: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 0
    max_running: int | None = None
    max_body: int = MAX_BODY
    grace: float = 5.0


class Gateway:
    """Started once, stopped once; an async context manager does both.

    With `restoring` it goes on with the sessions that were open when the journal's last gateway died, at the address
    of `listener` if that was kept. `on_failure` hears what ends the server or the expiry before `stop` does.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        source: CallSource,
        recorder: Recorder,
        table: SessionTable | None = None,
        restoring: Restoring | None = None,
        listener: socket.socket | None = None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        args = serve_arguments(settings.model, settings.options)
        self._settings, self._args, self._restoring = settings, args, restoring
        self.client = FleetEngineClient(rendering_config(args), source=source, recorder=recorder)
        self.table = table or SessionTable(max_running=settings.max_running)
        self.admin = Admin(self.table, recorder, cancel=self.client.cancel)
        self._listener, self._on_failure = listener, on_failure
        self._server: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return self.admin.url

    async def start(self) -> None:
        """Returns when it listens; `url` is known from then on.

        Raises:
            JournalError: what was to be restored cannot be read.
            OSError: the port is taken.
        """
        settings = self._settings
        if self._restoring is not None:
            await self._restoring.into(self.table)
        app = await serving_app(self.client, self._args)
        envs.enable_envs_cache()  # vLLM asks the environment several times a call
        gc.collect()
        gc.freeze()  # a million objects of imported modules, which no later collection need visit
        door = Door(
            app,
            table=self.table,
            admin=self.admin,
            admin_key=settings.admin_key,
            max_body=settings.max_body,
        )
        listener = self._listener or socket.create_server((settings.host, settings.port), backlog=BACKLOG)
        # Accepted sockets inherit it; asyncio sets it only on sockets made with the protocol's number.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.admin.url = f"http://{settings.host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            door,
            access_log=False,
            log_config=None,
            lifespan="off",
            proxy_headers=False,  # nobody here asks where a client is
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=round(settings.grace),
        )
        self._server = _Embedded(config)
        serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway")
        self._tasks = [serving, asyncio.create_task(self._expire(), name="gateway expiry")]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Takes nothing new, lets what runs end within the grace, cancels the rest; all of it is on record."""
        assert self._server is not None, "start() comes first"
        serving, expiry = self._tasks
        expiry.cancel()
        self._server.should_exit = True
        await serving
        await self.client.drain()
        self.client.renderer.shutdown()
        gc.unfreeze()
        envs.disable_envs_cache()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the task %r of the gateway has failed", task.get_name(), exc_info=error)
            self._on_failure(error)

    async def _expire(self) -> None:
        """Sessions expire by the clock, which tells nobody."""
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            await self.admin.expire()


class _Embedded(uvicorn.Server):
    """A server that leaves the process's signals alone, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()
