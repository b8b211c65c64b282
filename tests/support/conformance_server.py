"""One real engine behind two servers: the gateway over its fleet, and vLLM's own `vllm serve`, with equal options.

Both live on one event loop in a thread, so that tests can use blocking clients as well as asynchronous ones. The
gateway's way to the engine is the product's: calls, fleet, TCP, replica server, engine; its record is a journal.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import uvicorn

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.request_rules import RequestRules
from seamless_verl.gateway.server import Gateway, GatewaySettings, serve_arguments
from seamless_verl.journal import SqliteJournal
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.transport import RemoteEngine, serve_engine
from support.vllm_engine import started

UID = "conformance"
MODEL, ADMIN_KEY, VLLM_KEY, TOKEN = "nano", "the admin's", "one key for all", "between gateway and replica"
LONGEST = 1024
MAX_BODY = 24 << 10  # bytes
MAX_RUNNING = 16
OPTIONS = (
    *("--served-model-name", MODEL, "--max-model-len", str(LONGEST), "--dtype", "float32"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    # Reasoning is asked for by the request: an untrained model would never come to its end.
    *("--reasoning-parser", "qwen3", "--default-chat-template-kwargs", '{"enable_thinking": false}'),
)
RULES = RequestRules(strict_model=True)  # as vLLM's own server
GATEWAY, VLLM = "gateway", "vllm"


@dataclass
class Server:
    """One of the two as its clients see it: an address (without /v1), a key, and how many calls it runs."""

    name: str
    url: str
    key: str
    http: httpx.Client
    anthropic_http: anthropic.DefaultHttpxClient
    running: Callable[[], dict[str, float]]
    admin: Callable[..., Any] | None = None
    session: dict[str, str] = field(default_factory=dict)

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, http_client=self.http)

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        """The key is a bearer token: vLLM's server reads no other."""
        given = {"base_url": self.url, "max_retries": 0, "http_client": self.anthropic_http}
        return anthropic.Anthropic(auth_token=self.key, **given)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """A raw request with the key; what an SDK would not send."""
        headers = {"authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        return self.http.post(f"{self.url}{path}", headers=headers, **options)

    def settled(self, seconds: float = 10.0) -> dict[str, float]:
        """What still runs when nothing runs any more, or the time is over."""
        limit = time.monotonic() + seconds
        while any((running := self.running()).values()) and time.monotonic() < limit:
            time.sleep(0.01)
        return running


@dataclass
class Servers:
    """Both servers over one engine: the gateway with its calls and fleet, and the address of vLLM's own."""

    loop: asyncio.AbstractEventLoop
    llm: Any
    gateway: Gateway
    calls: Calls
    fleet: Fleet
    vllm_url: str
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))
    anthropic_http: anthropic.DefaultHttpxClient = field(default_factory=anthropic.DefaultHttpxClient)

    @property
    def clients(self) -> tuple[httpx.Client, anthropic.DefaultHttpxClient]:
        return self.http, self.anthropic_http

    def server(self, name: str, **opening: Any) -> Server:
        """A server of that name; the gateway with a session of its own, in which a seed gives what it always gives."""
        if name == VLLM:
            return Server(VLLM, self.vllm_url, VLLM_KEY, *self.clients, self.engine_runs)
        session = self.admin("POST", "sessions", {"uid": UID, "metadata": {"session": "0"}, **opening}).json()
        opened = session["session_id"]

        def running() -> dict[str, float]:
            calls = self.calls.metrics()["calls/running"]
            session_calls = self.admin("GET", f"sessions/{opened}").json()["running"]
            health = self.http.get(f"{self.gateway.url}/health").json()["running"]
            return {"calls": calls, "session": session_calls, "health": health, **self.engine_runs()}

        return Server(GATEWAY, self.gateway.url, session["key"], *self.clients, running, self.admin, session)

    def admin(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return self.http.request(method, f"{self.gateway.url}/admin/{path}", json=body, headers=headers)

    def engine_runs(self) -> dict[str, float]:
        return {"engine": self.llm.output_processor.get_num_unfinished_requests()}

    def check_integrity(self) -> None:
        self.fleet.check_integrity()
        self.calls.check_integrity()
        self.gateway.table.check_integrity()


@asynccontextmanager
async def gateway_over(
    source: AsyncLLMSource, model: Path, journal: Path, *, grammars_resume: bool = False
) -> AsyncIterator[tuple[Gateway, Calls, Fleet]]:
    fleet = Fleet()
    fleet.commit(0)
    engine_server = await serve_engine(source, "127.0.0.1", 0, token=TOKEN, replica_id="replica-0")
    engine = await RemoteEngine.connect("127.0.0.1", engine_server.port, token=TOKEN, replica_id="replica-0")
    fleet.add("replica-0", engine=engine, control=source, capacity=MAX_RUNNING, version=0)
    settings = GatewaySettings(str(model), ADMIN_KEY, OPTIONS, max_body=MAX_BODY, max_running=MAX_RUNNING, rules=RULES)
    calls = Calls(fleet, grammars_resume=grammars_resume)
    with SqliteJournal(journal) as kept:
        async with Gateway(settings, source=calls, recorder=JournalRecorder(kept)) as gateway:
            yield gateway, calls, fleet
        await fleet.remove("replica-0")
        await engine_server.close()


@asynccontextmanager
async def vllm_over(llm: Any, model: Path) -> AsyncIterator[str]:
    """vLLM's server as its own launcher assembles it, but for the process and its signals; yields its address."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import NoSignalServer

    args = serve_arguments(str(model), (*OPTIONS, "--api-key", VLLM_KEY))
    args.structured_outputs_config.reasoning_parser = args.reasoning_parser  # as the launcher, making an engine, does
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = NoSignalServer(uvicorn.Config(app, log_config=None, access_log=False))
        app.state.server = server
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


async def run(
    llm: Any, folder: Path, journal: Path, up: concurrent.futures.Future[Servers], down: asyncio.Event
) -> None:
    async with AsyncExitStack() as stack:
        gateway, calls, fleet = await stack.enter_async_context(
            gateway_over(AsyncLLMSource(llm, version=0), folder, journal)
        )
        url = await stack.enter_async_context(vllm_over(llm, folder))
        up.set_result(Servers(asyncio.get_running_loop(), llm, gateway, calls, fleet, url))
        await down.wait()


@contextmanager
def running_servers(model: Path, journal: Path) -> Iterator[Servers]:
    """Both servers over one engine, in a thread of their own."""
    cores = sorted(os.sched_getaffinity(0))
    up: concurrent.futures.Future[Servers] = concurrent.futures.Future()
    down = asyncio.Event()
    options = {"skip_tokenizer_init": False, "reasoning_parser": "qwen3", "max_model_len": LONGEST}

    def work() -> None:
        try:
            with started(model, cores=cores, devices=[len(cores) - 1], **options) as engine:
                engine.run(run(engine.llm, model, journal, up, down))
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)

    thread = threading.Thread(target=work, name="servers")
    thread.start()
    servers = up.result(timeout=300)
    try:
        yield servers
        servers.check_integrity()
    finally:
        for client in servers.clients:
            client.close()
        servers.loop.call_soon_threadsafe(down.set)
        thread.join()
