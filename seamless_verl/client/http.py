"""Clients of the admin API, for programs with and without an event loop: open, look, reward and close sessions."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from seamless_verl.client.admin_file import AdminFile
from seamless_verl.client.messages import OpenedSession, SessionView
from seamless_verl.errors import ConfigError, OutsideApiError

TIMEOUT_S = 60.0
LAST_PORT = 65535
T = TypeVar("T")


def read_reply(reply: httpx.Response, kind: type[T]) -> T:
    """The body as a message; raises OutsideApiError for an error, with what the run says, and for what is none of its.

    The code is `no_json` for a page of a proxy, of whatever status.
    """
    try:
        if reply.is_success:
            return msgspec.json.decode(reply.content, type=kind)
        error = msgspec.json.decode(reply.content)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):  # a proxy's own page
        code, message = "no_json", reply.text[:500]
    wait = reply.headers.get("retry-after", "")
    raise OutsideApiError(reply.status_code, code, message, float(wait) if wait.isdecimal() else None)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {checked_key(key)}"}


def checked_key(key: str, *, name: str = "key") -> str:
    """The key; raises ConfigError, without the key, for one that no header can carry. `name`: what gave it."""
    for place, character in enumerate(key, 1):
        at_an_end = place in (1, len(key))
        if not " " <= character <= "~" or (character == " " and at_an_end):
            reason = f"its character {place} is {character!a}, and a key is printable ASCII without spaces around it"
            way_out = "Write it as the admin file has it, in a file without CRLF at its line ends"
            raise ConfigError(name, f"<{len(key)} characters>", reason, way_out)
    return key


def checked_url(url: str, *, name: str = "url") -> str:
    """The address without a slash at its end; raises ConfigError for what is no http address. `name`: what gave it."""
    if wrong := what_is_wrong(url):
        way_out = "Write it as http://host:port or https://host; the run's admin file has it as url"
        raise ConfigError(name, url, f"is no http address: {wrong}", way_out)
    return url.rstrip("/")


def what_is_wrong(url: str) -> str:
    """Why requests cannot be sent to paths below this address; empty if they can."""
    if not url.startswith(("http://", "https://")):
        return "it does not begin with http:// or https://"
    if any(character.isspace() for character in url):
        return "there is a space in it"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return str(error)
    if not parsed.host:
        return "it names no host"
    if parsed.port is not None and not 0 < parsed.port <= LAST_PORT:
        return f"there is no port {parsed.port}"
    return "a path cannot follow it" if parsed.query or parsed.fragment else ""


def tls(url: str, ca_file: str | None) -> ssl.SSLContext | bool:
    """Which certificates are trusted: the system's, or those of a file; raises ConfigError if it cannot be read."""
    if url.startswith("http://"):
        return False  # spares reading all certificates of the system
    try:
        return True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError("ca_file", ca_file, f"cannot be read: {error}", "Name a file of PEM certificates") from error


class Client:
    """A client without an event loop; also a context manager.

    Every method raises OutsideApiError for what the run refuses, and httpx.TransportError if it cannot be reached.
    """

    def __init__(self, url: str, key: str, *, ca_file: str | None = None) -> None:
        self._http = httpx.Client(
            base_url=checked_url(url), headers=bearer(key), timeout=TIMEOUT_S, verify=tls(url, ca_file)
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Of the run whose admin file this is; raises ConfigError if there is none, or the run has ended."""
        found = AdminFile.read(path)
        return cls(found.url, found.key)

    def open(
        self,
        uid: str,
        *,
        limits: Mapping[str, Any] = {},
        sampling: Mapping[str, Any] = {},
        metadata: Mapping[str, Any] = {},
    ) -> OpenedSession:
        """Opens a session on the prompt `uid`; docs/gateway.md has what `limits` and `sampling` take."""
        body = {"uid": uid, "limits": dict(limits), "sampling": dict(sampling), "metadata": dict(metadata)}
        return read_reply(self._http.post("/admin/sessions", json=body), OpenedSession)

    def look(self, session_id: str) -> SessionView:
        return read_reply(self._http.get(f"/admin/sessions/{session_id}"), SessionView)

    def reward(self, session_id: str, reward: float, name: str = "reward") -> None:
        """Gives an open session a reward; each name takes one."""
        body = {"reward": reward, "name": name}
        read_reply(self._http.post(f"/admin/sessions/{session_id}/reward", json=body), dict[str, Any])

    def close_session(self, session_id: str, reason: str = "finished") -> SessionView:
        """Ends a session; its running calls are cancelled."""
        return read_reply(self._http.post(f"/admin/sessions/{session_id}/close", json={"reason": reason}), SessionView)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The methods of Client for an event loop, which raise the same."""

    def __init__(self, url: str, key: str, *, ca_file: str | None = None) -> None:
        self._http = httpx.AsyncClient(
            base_url=checked_url(url), headers=bearer(key), timeout=TIMEOUT_S, verify=tls(url, ca_file)
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        found = AdminFile.read(path)
        return cls(found.url, found.key)

    async def open(
        self,
        uid: str,
        *,
        limits: Mapping[str, Any] = {},
        sampling: Mapping[str, Any] = {},
        metadata: Mapping[str, Any] = {},
    ) -> OpenedSession:
        body = {"uid": uid, "limits": dict(limits), "sampling": dict(sampling), "metadata": dict(metadata)}
        return read_reply(await self._http.post("/admin/sessions", json=body), OpenedSession)

    async def look(self, session_id: str) -> SessionView:
        return read_reply(await self._http.get(f"/admin/sessions/{session_id}"), SessionView)

    async def reward(self, session_id: str, reward: float, name: str = "reward") -> None:
        body = {"reward": reward, "name": name}
        read_reply(await self._http.post(f"/admin/sessions/{session_id}/reward", json=body), dict[str, Any])

    async def close_session(self, session_id: str, reason: str = "finished") -> SessionView:
        reply = await self._http.post(f"/admin/sessions/{session_id}/close", json={"reason": reason})
        return read_reply(reply, SessionView)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
