"""Where a server does not do what is documented, and why that is so; everywhere else both must.

A point is `module::function[parameters]`, with `*` for any. An unlisted failure fails the suite, and so does a listed
one that does not come about any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import openai
import pytest

from support.conformance_server import GATEWAY, VLLM

UNMET: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)


@dataclass(frozen=True)
class Listed:
    """Servers on which a point fails with one of `raises`."""

    point: str
    servers: tuple[str, ...]
    reason: str
    raises: tuple[type[BaseException], ...] = UNMET

    def covers(self, point: str) -> bool:
        return fnmatchcase(point, self.point.replace("[", "[[]"))


UNSHAPED = "vLLM's own errors of this kind do not have the API's shape; the gateway gives them one"
STORED = "vLLM's server stores no response unless told to"
CLAMPED = "agents ask for more than is left of the context; the gateway gives what is left"
UNBOUNDED = "vLLM's server takes as many calls at once as come"
PLACEHOLDER = "a 400 ends the agents that look at a picture; the gateway gives the model a placeholder"
EMPTY = "clients without tools send an empty list; the gateway takes an empty field for one that is left out"
LISTED: tuple[Listed, ...] = (
    Listed("chat::test_a_bad_request_is_refused[an image for a model without eyes]", (GATEWAY,), PLACEHOLDER),
    Listed(
        "chat::test_a_conversation_goes_on_with_the_tokens_that_were_generated",
        (VLLM,),
        "vLLM tokenizes the text of earlier replies anew; the gateway goes on with the ids on record",
    ),
    Listed("errors::test_a_bad_tool_is_a_bad_request[an empty list]", (GATEWAY,), EMPTY),
    Listed("errors::test_a_wrong_key_is_told_in_the_apis_shape[*]", (VLLM,), UNSHAPED),
    Listed("errors::test_what_cannot_be_read_is_a_bad_request[no utf-8-*]", (VLLM,), UNSHAPED),
    Listed("errors::test_what_cannot_be_read_is_a_bad_request[too deep-*]", (VLLM,), UNSHAPED),
    *(
        Listed(f"errors::test_what_cannot_be_read_is_a_bad_request[{what}-/v1/messages]", (VLLM,), UNSHAPED)
        for what in ("no json", "nothing", "a list", "a number")
    ),
    Listed("errors::test_a_value_of_the_wrong_type_is_a_bad_request[*-/v1/messages]", (VLLM,), UNSHAPED),
    *(
        Listed(f"messages::test_a_bad_request_is_refused[{what}]", (VLLM,), UNSHAPED)
        for what in ("no budget", "a strange role", "a strange block", "a tool without a schema")
    ),
    Listed("messages::test_an_error_has_a_documented_type", (VLLM,), UNSHAPED),
    Listed("messages::test_a_model_that_is_not_there_has_a_documented_type", (VLLM,), UNSHAPED),
    Listed("errors::test_a_body_past_the_limit_is_too_large[*]", (VLLM,), "vLLM's server takes a body of any size"),
    Listed(
        "errors::test_too_much_at_once_is_a_rate_limit_that_says_when_to_come_again",
        (VLLM,),
        UNBOUNDED,
    ),
    Listed(
        "errors::test_the_path_carries_the_key",
        (VLLM,),
        "an agent that can be given nothing but an address needs its key there; vLLM's server has one key for all",
        (openai.NotFoundError,),
    ),
    Listed(
        "errors::test_anthropics_own_header_carries_the_key",
        (VLLM,),
        "vLLM's server reads its key from `authorization` alone",
    ),
    Listed(
        "responses::test_a_completion_echoes_with_logprobs",
        (GATEWAY,),
        "it asks for logprobs of the prompt, and replicas do not score prompts",
        (openai.BadRequestError,),
    ),
    *(
        Listed(f"{api}::test_a_bad_request_is_refused[a budget past the model's length]", (GATEWAY,), CLAMPED)
        for api in ("chat", "messages")
    ),
    Listed(
        "responses::test_a_response_after_one_that_is_not_known_is_not_found",
        (GATEWAY,),
        "the real service answers with a 400",
        (openai.BadRequestError,),
    ),
    Listed("responses::test_a_response_can_be_asked_for_again", (VLLM,), STORED, (openai.NotFoundError,)),
    Listed("responses::test_a_response_follows_another", (VLLM,), STORED, (openai.NotFoundError,)),
    Listed(
        "responses::test_one_model_is_described",
        (VLLM,),
        "vLLM's server has a list of models only",
        (openai.NotFoundError,),
    ),
    Listed(
        "responses::test_an_incomplete_stream_ends_with_its_own_event",
        (VLLM,),
        "vLLM's serving class ends every stream with response.completed; the response in it says `incomplete`",
    ),
    Listed("messages::test_the_id_of_a_message_is_a_messages", (VLLM,), "vLLM's serving class names it as a chat's"),
    Listed(
        "tools::test_a_message_that_calls_ends_with_tool_use[tool]",
        (VLLM,),
        "vLLM's serving class ends a call that was asked for by name as it does in chat completions",
    ),
)


def listed(point: str, server: str) -> Listed | None:
    """The entry of a point that fails on a server."""
    found = [one for one in LISTED if server in one.servers and one.covers(point)]
    assert len(found) < 2, f"{point} is listed twice for {server}"
    return found[0] if found else None
