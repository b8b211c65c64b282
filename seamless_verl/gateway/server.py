"""The gateway as a server: vLLM's serving classes around our engine client and renderer, behind our middleware.

uvicorn runs it in the event loop of whoever owns it, who also starts and stops it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, Self

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from vllm import envs
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.api_router import router as anthropic_router
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.generate.api_router import init_generate_state
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from seamless_verl.errors import ConfigError
from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.calls import CallSource
from seamless_verl.gateway.engine_client import FleetEngineClient
from seamless_verl.gateway.fast_path import ServingApp
from seamless_verl.gateway.http import open_listeners
from seamless_verl.gateway.http_responses import ModelList
from seamless_verl.gateway.images import IMAGE
from seamless_verl.gateway.middleware import GatewaySettings, OnOutsideRefusal, ServeRunner, SessionMiddleware
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.recovery import restore_sessions
from seamless_verl.gateway.rendering import SessionRenderer
from seamless_verl.gateway.reply_parser import consistent_parser
from seamless_verl.gateway.request_rules import RequestRules
from seamless_verl.gateway.serving import (
    accept_any_model,
    conform_chat,
    conform_messages,
    conform_responses,
    place_system_messages,
)
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.journal import SqliteJournal
from seamless_verl.platform.vllm_versions import (
    TAKES_NAMESPACES,
    convert_messages_errors,
    handle_exceptions,
    install_renderer,
    renderer_of,
    serve_parser,
    serve_tokens,
    take_host_for_device,
    tokens_router,
    validate_serve_arguments,
)
from seamless_verl.runtime.pictures import COLLAPSED, takes_recorded_prompts

logger = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections: they close first, no request is lost in between
EXPIRY_SECONDS = 1.0  # how late an expiry may be recorded; calls of an expired session are refused at once
NO_IMAGES = (
    "images that agents send become placeholders, or are refused, as for a model of text: with the model's %s engines"
    " would read other tokens than are recorded. To train with images take a model whose image processor is a %s, such"
    " as Qwen2.5-VL or Qwen3-VL"
)
ROUTERS = (chat_router, completion_router, responses_router, anthropic_router, tokens_router())


class Gateway:
    """The server with its sessions; it is started once and stopped once, also as an async context manager.

    With a `journal` it continues the sessions that were open when that one's last gateway died, at the address of
    `listeners` if those were kept. `on_failure` gets the error that ends the server or the expiry before `stop` does.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        source: CallSource,
        recorder: JournalRecorder,
        table: SessionTable | None = None,
        journal: SqliteJournal | None = None,
        listeners: Sequence[socket.socket] = (),
        on_failure: Callable[[BaseException], None] = lambda error: None,
        serve_runner: ServeRunner | None = None,
        on_outside_refusal: OnOutsideRefusal | None = None,
    ) -> None:
        args = serve_arguments(settings.model, settings.options)
        self._settings, self._args, self._journal = settings, args, journal
        self.client = FleetEngineClient(rendering_config(args), source=source, recorder=recorder)
        self.table = table or SessionTable(max_running=settings.max_running)
        self.admin = Admin(self.table, recorder, cancel=self.client.cancel)
        self._listeners, self._on_failure, self._recorder = list(listeners), on_failure, recorder
        self._middleware: SessionMiddleware | None = None
        self._url = ""
        self._serve_runner, self._on_outside_refusal = serve_runner, on_outside_refusal
        self._server: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """The address on this machine, without a slash at its end; agents are given `admin.url`."""
        return self._url

    def metrics(self) -> dict[str, float]:
        """Counts of refused requests, of hosted tools that were left out, and of tool calls that could not be read."""
        counts = {} if self._middleware is None else dict(self._middleware.counts)
        return {**counts, "gateway/malformed_calls": self.client.malformed_calls}

    async def start(self) -> None:
        """Returns when it listens; JournalError if sessions cannot be restored, OSError if the port is taken."""
        settings = self._settings
        if self._journal is not None:
            await restore_sessions(self._journal, self._recorder, self.table)
        app = await serving_app(self.client, self._args, settings.rules)
        models = ModelList(
            served_names(self._args), self.client.model_config.max_model_len, time.time(), settings.rules.strict_model
        )
        envs.enable_envs_cache()  # vLLM reads the environment several times a call
        gc.collect()
        gc.freeze()  # no later collection visits the million objects of imported modules
        self._middleware = SessionMiddleware(
            app,
            settings,
            table=self.table,
            admin=self.admin,
            models=models,
            on_refusal=self._recorder.note_refusal,
            takes_namespaces=TAKES_NAMESPACES,
            takes_images=takes_images(self.client),
            serve_runner=self._serve_runner,
            on_outside_refusal=self._on_outside_refusal,
        )
        listeners = self._listeners or open_listeners(settings.host, settings.port)
        for listener in listeners:
            # Accepted sockets inherit it; asyncio sets it only on sockets made with the protocol's number.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listeners[0].getsockname()[1]
        self._url, self.admin.url = f"http://{settings.host}:{port}", settings.url(port)
        config = uvicorn.Config(
            self._middleware,
            http=_TimedConnection,
            access_log=False,
            log_config=None,
            lifespan="off",
            proxy_headers=False,  # the gateway does not use the address of a client
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=round(settings.grace),
        )
        self._server = _EmbeddedServer(config)
        serving = asyncio.create_task(self._server.serve(sockets=listeners), name="gateway")
        self._tasks = [serving, asyncio.create_task(self._expire(), name="gateway expiry")]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Accepts nothing new, lets running calls end within the grace, cancels the rest; all ends are on record."""
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

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the task %r of the gateway has failed", task.get_name(), exc_info=error)
            self._on_failure(error)

    async def _expire(self) -> None:
        """Ends sessions whose lifetime is over, also those that no request touches."""
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)  # an expiry is a time, not an event
            await self.admin.expire()


class _TimedConnection(HttpToolsProtocol):
    """A connection that is closed when no request begins in time; uvicorn times only those that had a reply already."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_in_time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # which takes back the closing
        if self in self.connections and (self.cycle is None or self.cycle.response_complete):
            self._close_in_time()

    def _close_in_time(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone, and sets `listening` when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def serve_arguments(model: str, options: Sequence[str] = ()) -> Namespace:
    """The arguments of `vllm serve MODEL OPTIONS`, checked: `--tool-call-parser hermes` and the like."""
    take_host_for_device()
    parser = serve_parser()

    def refuse(message: str) -> NoReturn:
        named = [option for option in options if option.partition("=")[0] in message]  # the run gives some, too
        key, way_out = "seamless.gateway.options", "`vllm serve --help=all` lists them"
        raise ConfigError(key, named or list(options), message, way_out)

    parser.error = refuse  # argparse would end the actor without a word
    args: Namespace = parser.parse_args(["--model", model, *options])
    args.model_tag = None
    validate_serve_arguments(args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    return args


def rendering_config(args: Namespace) -> VllmConfig:
    """The model's configuration for rendering and checking; loads no weights, and uses no device."""
    model_config = AsyncEngineArgs.from_cli_args(args).create_model_config()
    model_config.quantization = None  # only replicas load weights: their formats are not checked here
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    outputs = args.structured_outputs_config or StructuredOutputsConfig()
    if args.reasoning_parser:  # in a copy: what the parser of arguments has as its default is one object for all
        args.structured_outputs_config = outputs = replace(outputs, reasoning_parser=args.reasoning_parser)
    return VllmConfig(model_config=model_config, structured_outputs_config=outputs)


def takes_images(client: FleetEngineClient) -> bool:
    """Whether the model has images among its inputs, and engines read its recorded prompts as they are."""
    if not client.model_config.is_multimodal_model:
        return False
    model = client.renderer.get_mm_processor().info
    if IMAGE not in model.supported_mm_limits:
        return False
    processor = model.get_hf_processor()
    if not (taken := takes_recorded_prompts(processor)):
        logger.warning(NO_IMAGES, type(processor).__name__, COLLAPSED)
    return taken


def served_names(args: Namespace) -> list[str]:
    return list(args.served_model_name or [args.model])


async def serving_app(client: FleetEngineClient, args: Namespace, rules: RequestRules) -> FastAPI:
    """The APIs without keys and sessions, which the session middleware before it adds."""
    app = ServingApp(openapi_url=None, docs_url=None, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router)
    handle_exceptions(app)
    await _init_state(app.state, client, args, rules)
    return app


async def _init_state(state: Any, client: FleetEngineClient, args: Namespace, rules: RequestRules) -> None:
    names = served_names(args)
    state.args, state.engine_client, state.vllm_config = args, client, client.vllm_config
    state.server = SimpleNamespace(should_exit=False)  # vLLM's handlers stop it when its engine has died
    state.enable_server_load_tracking = False
    state.openai_serving_models = OpenAIServingModels(
        engine_client=client, base_model_paths=[BaseModelPath(name=name, model_path=args.model) for name in names]
    )
    if not rules.strict_model:
        accept_any_model(state.openai_serving_models)
    install_renderer(
        state,
        SessionRenderer,
        model_config=client.model_config,
        renderer=client.renderer,
        request_logger=None,
        chat_template=load_chat_template(args.chat_template),
        chat_template_content_format=args.chat_template_content_format,
        trust_request_chat_template=args.trust_request_chat_template,
        enable_auto_tools=args.enable_auto_tool_choice,
        exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
        tool_parser=args.tool_call_parser,
        reasoning_parser=client.vllm_config.structured_outputs_config.reasoning_parser,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        log_error_stack=args.log_error_stack,
    )
    await init_generate_state(client, state, args, None, ("generate",))
    serve_tokens(state, client)
    convert_messages_errors(state.anthropic_serving_messages)
    template = load_chat_template(args.chat_template)
    place_system_messages(state.anthropic_serving_messages, client.renderer.get_tokenizer(), template)
    _conform(state, rules)


def _conform(state: Any, rules: RequestRules) -> None:
    """Makes vLLM's replies those that clients of the real services expect."""
    chat, messages = state.openai_serving_chat, state.anthropic_serving_messages
    responses = state.openai_serving_responses
    named = ((chat, "parser_cls"), (messages, "parser_cls"), (responses, "parser"), (renderer_of(state), "parser"))
    for owner, name in named:
        if (parser := getattr(owner, name)) is not None:
            setattr(owner, name, consistent_parser(parser))
    conform_chat(chat)
    conform_chat(messages)
    conform_messages(messages)
    conform_responses(responses, rules.max_stored)
