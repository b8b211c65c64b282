"""The context of one agent request, from its arrival to its reply.

It travels in a context variable through vLLM's serving classes, which run between our layers and know no sessions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from seamless_verl.gateway.api_errors import Overflow
from seamless_verl.gateway.prefix_index import PrefixMatch
from seamless_verl.gateway.retries import Attempt, CallOutput
from seamless_verl.gateway.session import Session
from seamless_verl.gateway.stored_responses import StoredResponse
from seamless_verl.gateway.token_requests import TOKEN_IDS, TOKENS_PATH, parameters_of
from seamless_verl.journal import StoredCall
from seamless_verl.trajectory.images import PromptImage


@dataclass(frozen=True)
class Rendered:
    """What a prompt was rendered from: the request in vLLM's chat form, and the parser of its reply."""

    request: Any
    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None
    parser: Any
    settings: Mapping[str, Any]  # of the chat template
    seed: bytes  # identifies tools and settings in the prefix index
    match: PrefixMatch | None = None  # the recorded prefix that the prompt begins with
    images: tuple[PromptImage, ...] = ()  # in the prompt


@dataclass(eq=False)
class RequestContext:
    """A running request."""

    session: Session
    number: int  # of the session's requests
    path: str
    body: Mapping[str, Any]
    digest: str
    attempt: Attempt  # has the outputs of its calls
    is_retry: bool = False  # an earlier request began the attempt
    rendered: Rendered | None = None
    calls_begun: int = 0
    dropped_tools: tuple[str, ...] = ()  # types of hosted tools that were left out
    replaced_media: tuple[str, ...] = ()  # kinds of images and the like that became placeholders
    images: Mapping[str, bytes] = field(default_factory=dict)  # files of the session's images, and its own, by sha256
    previous: StoredResponse | None = None  # that this one continues
    referenced: Mapping[str, Any] = field(default_factory=dict)  # stored items that its input names, by id
    response_id: str | None = None  # under which its response will be stored
    overflow: Overflow | None = None  # set when the prompt was refused for its length
    traceparent: str = ""  # the header: the agent's span
    dropped_schema: bool = False  # the JSON schema of its reply was left out

    @property
    def parameters(self) -> Mapping[str, Any]:
        """How it is sampled, as the agent asks for it."""
        return parameters_of(self.path, self.body)

    def next_call(self) -> tuple[int, str]:
        """The next call's index in the request, and its id, unique in its session."""
        index = self.calls_begun
        self.calls_begun += 1
        name = f"{self.session.session_id}.{self.number}"
        return index, f"{name}-{index}" if index else name

    def earlier_output(self, index: int) -> CallOutput | None:
        """The output that a retry's call reads; None when the call has to run."""
        output = self.attempt.outputs.get(index) if self.is_retry else None
        return None if output is None or output.failed else output

    def take_interrupted_call(self, index: int) -> StoredCall | None:
        """The call of this index that a restart interrupted, for a retry to continue; each is given once."""
        return self.attempt.interrupted_calls.pop(index, None) if self.is_retry else None

    def stored_request(self) -> dict[str, Any]:
        """The request as it is recorded: what a conversation was rendered from, or a plain completion's body."""
        if self.rendered is None:
            plain = {"path": self.path, **self.body}
            if self.path == TOKENS_PATH:  # the ids themselves are the call's prompt
                plain[TOKEN_IDS] = digest_of(TOKEN_IDS, {TOKEN_IDS: self.body[TOKEN_IDS]})
            return plain
        stored: dict[str, Any] = {"path": self.path, "messages": list(self.rendered.messages)}
        if self.rendered.tools:
            stored["tools"] = self.rendered.tools
        if self.rendered.settings:
            stored["template"] = dict(self.rendered.settings)
        return stored

    def stored_response(self) -> dict[str, Any] | None:
        """What the record keeps of the response that will be stored, if any."""
        if self.response_id is None:
            return None
        body = self.body
        return {"id": self.response_id, "model": body.get("model"), "instructions": bool(body.get("instructions"))}


CURRENT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current_request() -> RequestContext:
    """The context of the request that this task works for; raises LookupError without one."""
    context = CURRENT.get()
    if context is None:
        raise LookupError("this task works for no session's request: its tokens would not be recorded")
    return context


def digest_of(path: str, body: Mapping[str, Any]) -> str:
    """Equal for requests of equal content, however their JSON is written; UnicodeEncodeError for no Unicode."""
    canonical = json.dumps([path, body], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return blake2b(canonical.encode(), digest_size=16).hexdigest()
