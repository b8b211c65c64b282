"""Whose failure an agent's exception is, by its class, its cause, and the request that it is about."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.agents import ENDPOINT

from seamless_verl.agents.callable import call_agent
from seamless_verl.agents.failures import LimitReachedError, ToolFailedError, status_of
from seamless_verl.agents.outcome import AgentStatus

S = AgentStatus
OURS, ANOTHER = f"{ENDPOINT.base_url}/v1/chat/completions", "http://judge.example/v1/chat/completions"


def class_of(package: str, *names: str) -> type[Exception]:
    """The last of these classes, each of which is a subclass of the one before, of a package that is not installed."""
    kind: type[Exception] = Exception
    for name in names:
        kind = type(name, (kind,), {"__module__": f"{package}.errors"})
    return kind


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def handling(error: Exception, context: BaseException) -> Exception:
    error.__context__ = context
    return error


def status_error(module: Any, name: str, status: int, url: str = OURS) -> Exception:
    response = httpx.Response(status, request=httpx.Request("POST", url))
    error: Exception = getattr(module, name)("no", response=response, body=None)
    return error


def connection_error(module: Any, url: str = OURS) -> Exception:
    error: Exception = module.APIConnectionError(request=httpx.Request("POST", url))
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("of the agent's own"), S.FAILED),
        (ConnectionError("of who knows what"), S.FAILED),
        (ToolFailedError("no docker"), S.TOOL_FAILED),
        (LimitReachedError("30 turns"), S.LIMIT),
        (type("Mine", (ToolFailedError,), {})(), S.TOOL_FAILED),
        (caused(ValueError(), ToolFailedError()), S.TOOL_FAILED),
        (handling(ValueError(), ToolFailedError()), S.TOOL_FAILED),
        (caused(ToolFailedError(), LimitReachedError()), S.TOOL_FAILED),
        (ExceptionGroup("of tasks", [ExceptionGroup("inner", [ToolFailedError()])]), S.TOOL_FAILED),
        (class_of("verifiers", "RolloutError", "SandboxError")(), S.TOOL_FAILED),
        (class_of("verifiers", "InfraError", "SandboxError", "SandboxCreationError")(), S.TOOL_FAILED),
        (class_of("verifiers", "InfraError", "AgentError")(), S.FAILED),
        (class_of("verifiers", "RolloutError", "HarnessError")(), S.FAILED),
        (class_of("verifiers", "ToolError", "ToolParseError")(), S.FAILED),
        (class_of("verifiers", "ModelError", "EmptyModelResponseError")(), S.ENGINE_FAILED),
        (class_of("verifiers", "ModelError", "InvalidModelResponseError", "EmptyModelResponseError")(), S.FAILED),
        (class_of("verifiers", "RolloutError", "ProviderError", "OverlongPromptError")(), S.LIMIT),
        (class_of("harbor", "EnvironmentStartTimeoutError")(), S.TOOL_FAILED),
        (class_of("harbor", "AgentTimeoutError")(), S.TIMED_OUT),
        (class_of("harbor", "NonZeroAgentExitCodeError")(), S.FAILED),
        (class_of("harbor", "NonZeroAgentExitCodeError", "ApiError", "ContextWindowExceededError")(), S.LIMIT),
        (class_of("another", "SandboxError")(), S.FAILED),
        (status_error(openai, "InternalServerError", 500), S.ENGINE_FAILED),
        (status_error(openai, "InternalServerError", 500, ANOTHER), S.FAILED),
        (status_error(openai, "BadRequestError", 400), S.FAILED),
        (status_error(anthropic, "InternalServerError", 503), S.ENGINE_FAILED),
        (connection_error(openai), S.ENGINE_FAILED),
        (connection_error(anthropic, ANOTHER), S.FAILED),
        (caused(RuntimeError("gave up"), connection_error(openai)), S.ENGINE_FAILED),
        (httpx.ReadError("", request=httpx.Request("POST", OURS)), S.ENGINE_FAILED),
        (httpx.ReadError("without its request"), S.FAILED),
    ],
)
def test_what_an_agent_raises_says_how_it_ended(error: Exception, status: AgentStatus) -> None:
    assert status_of(error, ENDPOINT) is status

    async def agent(task: Any, endpoint: Any) -> None:
        raise error

    outcome = asyncio.run(call_agent(agent, {}, ENDPOINT))
    assert outcome.status is status and type(error).__name__ in outcome.error


@pytest.mark.parametrize(("status_code", "status"), [(502, S.ENGINE_FAILED), (400, S.FAILED)])
def test_a_provider_that_refuses_a_request_has_not_failed(status_code: int, status: AgentStatus) -> None:
    error = class_of("verifiers", "RolloutError", "ProviderError")()
    error.status_code = status_code  # type: ignore[attr-defined]
    assert status_of(error, ENDPOINT) is status


def test_a_circle_of_causes_ends() -> None:
    error, cause = ValueError(), ValueError()
    error.__cause__, cause.__cause__ = cause, error
    assert status_of(error, ENDPOINT) is S.FAILED
