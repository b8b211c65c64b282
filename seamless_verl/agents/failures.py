"""Whose failure an agent's exception or exit code is; one that is not known here is the agent's own.

Classes of other packages are known by their names, and not imported: those of verifiers and harbor, and errors of the
openai and anthropic SDKs and of httpx by the request that they are about.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentStatus


class ToolFailedError(Exception):
    """Raised by an agent whose tool or sandbox failed: its session is dropped, and never has a reward."""


class LimitReachedError(Exception):
    """Raised by an agent that ended at a limit of its own, as of its turns: its session is scored."""


CONTAINER_FAILED = 125  # of `docker run` and `podman run`, when the container itself could not be run
EXIT_CODES = dict.fromkeys((os.EX_TEMPFAIL, CONTAINER_FAILED), AgentStatus.TOOL_FAILED)
KNOWN: dict[str, dict[AgentStatus, tuple[str, ...]]] = {
    "seamless_verl": {
        AgentStatus.TOOL_FAILED: ("ToolFailedError",),
        AgentStatus.LIMIT: ("LimitReachedError",),
    },
    "verifiers": {
        AgentStatus.TOOL_FAILED: (
            *("SandboxError", "ToolsetError", "TaskError", "EnvError", "InterceptionError"),
            *("InfraError", "ToolCallError"),
        ),
        AgentStatus.ENGINE_FAILED: ("ProviderError", "ModelError"),
        AgentStatus.LIMIT: ("OverlongPromptError",),
        AgentStatus.FAILED: ("AgentError", "InvalidModelResponseError"),
    },
    "harbor": {
        AgentStatus.TOOL_FAILED: (
            *("AgentSetupTimeoutError", "EnvironmentStartTimeoutError", "VerifierTimeoutError", "AddTestsDirError"),
            *("DownloadVerifierDirError", "RewardFileNotFoundError", "RewardFileEmptyError"),
            *("VerifierOutputParseError", "NetworkConnectionError"),
        ),
        AgentStatus.ENGINE_FAILED: (
            *("ApiInternalServerError", "ApiOverloadedError", "ApiConnectionClosedError", "ApiResponseStalledError"),
        ),
        AgentStatus.LIMIT: (
            *("ContextLengthExceededError", "OutputLengthExceededError"),
            *("ContextWindowExceededError", "OutputTokenExceededError"),
        ),
        AgentStatus.TIMED_OUT: ("AgentTimeoutError",),
    },
}
"""By package: classes, whose subclasses are the same kind unless they stand here themselves."""
BY_CLASS = {
    (package, name): status for package, kinds in KNOWN.items() for status, names in kinds.items() for name in names
}


def status_of(error: BaseException, endpoint: Endpoint) -> AgentStatus:
    """How an agent ended that raised this. The outermost exception that is known decides, of the error, what it was
    raised from or while handling, and the members of groups."""
    found = (known_class(one) or failed_request(one, endpoint) for one in chain(error))
    return next(filter(None, found), AgentStatus.FAILED)


def chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            context = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            waiting += () if context is None else (context,)


def known_class(error: BaseException) -> AgentStatus | None:
    names = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__)
    status = next((BY_CLASS[name] for name in names if name in BY_CLASS), None)
    refused = status is AgentStatus.ENGINE_FAILED and getattr(error, "status_code", 500) < 500
    return None if refused else status


def failed_request(error: BaseException, endpoint: Endpoint) -> AgentStatus | None:
    """ENGINE_FAILED if an SDK's error says that a request to the gateway got no reply, or a status from 500 on."""
    request, response = None, getattr(error, "response", None)
    with suppress(RuntimeError):  # httpx's, of an error without a request
        request = getattr(error, "request", None)
    if urlsplit(str(getattr(request, "url", ""))).netloc != urlsplit(endpoint.base_url).netloc:
        return None
    return AgentStatus.ENGINE_FAILED if getattr(response, "status_code", 500) >= 500 else None
