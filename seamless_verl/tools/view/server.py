"""Serves the page and what it asks for: HTTP, read only, all of it below a secret path.

The token is the first part of every path, so that the page needs neither cookies nor a login, and whoever has the
address has the page. Anything else is refused with a 403 that does not say whether a path exists.
"""

from __future__ import annotations

import hmac
import importlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.tools.view.run import RunView
from seamless_verl.tools.view.sessions import GROUP_SORTS, SORTS, Query, number
from seamless_verl.tools.view.trajectory import MAX_TOKENS

ASSETS = Path(__file__).with_name("assets")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
REFUSED = b"403: this address has no token, or another run's. The run printed the whole address.\n"
LAST_PORT = 65535
COLUMNS, MAX_COLUMNS = 600, 4000
NEEDED = ("starlette", "uvicorn")
Answer = Callable[[Any], object]
Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]


class OnlyWithToken:
    """An ASGI application in front of another: it answers what does not begin with the token with a 403.

    Each answer of the other gets `HEADERS`.
    """

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token.encode()
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = "".join(str(scope.get("path", "")).split("/")[1:2])  # OPTIONS has a path without a slash
        given = first.encode("utf-8", "surrogatepass")
        if scope["type"] != "http":
            return
        if not hmac.compare_digest(given, self._token):
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSED})
            return

        async def send_all(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, send_all)


def make_app(run: RunView, token: str) -> OnlyWithToken:
    """The ASGI application, for which `require` has been called."""
    from starlette.applications import Starlette
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    routes = [Route(f"/{token}/api{path}", endpoint(answer)) for path, answer in questions(run).items()]
    routes.append(Mount(f"/{token}", StaticFiles(directory=ASSETS, html=True)))
    return OnlyWithToken(Starlette(routes=routes), token)


def questions(run: RunView) -> Mapping[str, Answer]:
    """By path below api/: what is answered, as a value of plain fields."""
    return {
        "/run": lambda request: run.summary(),
        "/metrics": lambda request: run.series(request.query_params.getlist("name")),
        "/devices": partial(answer_devices, run),
        "/sessions": lambda request: run.sessions(Query.of(request.query_params, SORTS)),
        "/groups": lambda request: run.groups(Query.of(request.query_params, GROUP_SORTS)),
        "/sessions/{session}": lambda request: run.session(request.path_params["session"]),
        "/sessions/{session}/nodes/{node:int}": partial(answer_tokens, run),
        "/sessions/{session}/turns/{turn}": lambda request: run.turn_texts(
            request.path_params["session"], request.path_params["turn"]
        ),
    }


def answer_devices(run: RunView, request: Any) -> object:
    given = request.query_params
    columns = number("columns", given.get("columns"), COLUMNS)
    if not 1 <= columns <= MAX_COLUMNS:
        raise ConfigError("columns", columns, f"is not between 1 and {MAX_COLUMNS}", f"Leave it out for {COLUMNS}")
    return run.lanes(columns, float(number("last", given.get("last"), 0)) or None)


def answer_tokens(run: RunView, request: Any) -> object:
    given, path = request.query_params, request.path_params
    start, count = number("start", given.get("start"), 0), number("count", given.get("count"), MAX_TOKENS)
    return run.tokens(path["session"], path["node"], start, count, given.get("revision", ""))


def endpoint(answer: Answer) -> Callable[[Any], Any]:
    """A handler that runs in a thread; what cannot be answered becomes a status and a reason."""
    from starlette.responses import Response

    def handle(request: Any) -> Response:
        try:
            status, content = 200, answer(request)
        except LookupError as error:
            status, content = 404, {"error": str(error.args[0])}
        except ConfigError as error:
            status, content = 400, {"error": str(error)}
        except (SeamlessError, OSError) as error:  # the journal is another program's, damaged or gone
            status, content = 503, {"error": str(error)}
        return Response(encode(content), status, media_type="application/json")

    return handle


def encode(content: object) -> bytes:
    """JSON, without NaN and infinities; halves of characters, which agents can send, are escaped."""
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(content)).encode()


def require() -> None:
    """Raises ConfigError if a package that serves pages is missing; vLLM's environment has them."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError("view", name, "the package is not installed", f"pip install {name}") from error


def listen(host: str, port: int, *, key: str = "") -> socket.socket:
    """A socket that listens there; `key` begins the names of the options in messages.

    Raises:
        ConfigError: the port is taken, or there is no such port or address.
    """
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"{key}port", port, f"is not between 0 and {LAST_PORT}", "Give 0 for any that is free")
    try:
        return socket.create_server((host, port), backlog=64)
    except OSError as error:
        reason = f"cannot be listened to at {host}: {error.strerror or error}"
        way_out = f"Give another one, or 0 for any that is free, or another {key}host"
        raise ConfigError(f"{key}port", port, reason, way_out) from error


def address_of(listening: socket.socket, token: str) -> str:
    """The whole address of the page."""
    host, port = listening.getsockname()[:2]
    return f"http://{socket.gethostname() if host in ('0.0.0.0', '') else host}:{port}/{token}/"


def serve(run: RunView, listening: socket.socket, token: str) -> None:
    """Serves until SIGINT or SIGTERM."""
    import uvicorn

    app = make_app(run, token)
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
    config = uvicorn.Config(app, timeout_graceful_shutdown=1, **options)
    uvicorn.Server(config).run(sockets=[listening])
