"""What differs between the versions of vLLM that are tested here: 0.24.0, which verl 0.9.1 pins, and 0.29.0.

Everything else of vLLM that this package uses has one name and one meaning in both. `tests/contract` pins it, in the
environment of each version.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import utils as tool_parser_utils
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI, Request, Response
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.request import Request as EngineRequest

__all__ = [
    "TAKES_NAMESPACES",
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "GenerationError",
    "GracefulHTTPError",
    "VLLMClientError",
    "chat_renderer",
    "convert_messages_errors",
    "discard_memory",
    "ending_its_request",
    "handle_exceptions",
    "install_renderer",
    "map_adapters_names",
    "renderer_of",
    "serve_parser",
    "serve_tokens",
    "set_stream_interval",
    "take_host_for_device",
    "take_stream_interval",
    "tokens_router",
    "validate_serve_arguments",
]

try:  # 0.29
    from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
except ModuleNotFoundError:  # 0.24
    from vllm.entrypoints.openai.engine.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

try:  # 0.29
    from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
except ImportError:  # 0.24: its client's errors are ValueErrors, and this one
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    VLLMClientError = VLLMNotFoundError

    class GracefulHTTPError(GenerationError):  # type: ignore[no-redef,misc]
        """An error with a status of its own, which serving classes show in a stream, too."""

        def __init__(self, message: str, http_status: HTTPStatus) -> None:
            super().__init__(message)
            self.status_code = http_status


logger = init_logger("vllm.seamless_verl.versions")  # shown as vLLM's own in the engine's process
STREAM_INTERVAL = "stream_interval"
OWN_INTERVAL = STREAM_INTERVAL in SamplingParams.__struct_fields__  # 0.29; in 0.24 it is the engine's alone


TAKES_NAMESPACES = hasattr(tool_parser_utils, "flat_namespace_tool_name")  # 0.29: in the Responses API


def take_stream_interval(fields: dict[str, Any]) -> int:
    """Takes the interval out of a request's fields where SamplingParams has none; 1 means that it may stay."""
    return 1 if OWN_INTERVAL else int(fields.pop(STREAM_INTERVAL, 1))


def set_stream_interval(engine: AsyncLLM, request_id: str, interval: int) -> None:
    """Sets how many tokens an output of a running request has; `request_id` is the engine's own."""
    state = engine.output_processor.request_states.get(request_id)
    if interval > 1 and state is not None:  # it may have ended
        state.stream_interval = interval


class RejectingGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """Allows the one token that is sampled next, and rejects it: vLLM ends the request with an error."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return []

    def rollback(self, num_tokens: int) -> None: ...

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None: ...

    def is_terminated(self) -> bool:
        return True  # vLLM masks nothing then

    def reset(self) -> None: ...


def ending_its_request(
    create: Callable[[EngineRequest], StructuredOutputGrammar],
) -> Callable[[EngineRequest], StructuredOutputGrammar]:
    """`create`, so that an error of it ends its request alone, and not the engine."""
    if "Exception" in str(StructuredOutputRequest.__annotations__["_grammar"]):  # 0.29 keeps the error as the grammar
        return create

    @wraps(create)
    def create_or_reject(request: EngineRequest) -> StructuredOutputGrammar:
        try:
            return create(request)
        except Exception:  # whatever a backend says of a grammar: raised here, it would end the engine
            logger.exception("request %s: its grammar cannot be used", request.request_id)
            return RejectingGrammar()

    return create_or_reject


def discard_memory(tag: str) -> None:
    """Puts a worker's memory with this tag of vLLM's sleep mode away, without a copy; `wake_up([tag])` maps it again.

    vLLM's own `sleep` puts all tags away at once.
    """
    allocator = get_mem_allocator_instance()
    if hasattr(allocator, "discard"):  # 0.29
        allocator.discard(tag)
    else:  # 0.24: as its `sleep` does, for this tag alone
        torch.accelerator.synchronize()
        for data in allocator.pointer_to_data.values():
            if data.tag == tag:
                sys.modules[type(allocator).__module__].unmap_and_release(data.handle)
    gc.collect()
    torch.accelerator.empty_cache()


def chat_renderer() -> type[Any]:
    """The class that turns a request into a prompt, for all serving classes."""
    try:  # 0.29
        from vllm.renderers.online_renderer import OnlineRenderer

        return OnlineRenderer
    except ModuleNotFoundError:  # 0.24
        from vllm.entrypoints.serve.render.serving import OpenAIServingRender

        return OpenAIServingRender


def install_renderer(state: Any, renderer_class: type[Any], **options: Any) -> None:
    """Makes the renderer where serving classes look for it; `state` has the models already."""
    if hasattr(renderer_class, "warmup"):  # 0.29
        state.online_renderer = renderer_class(**options)
        state.online_renderer.warmup()
    else:  # 0.24, where the chat's serving class warms it up
        state.openai_serving_render = renderer_class(model_registry=state.openai_serving_models.registry, **options)


def renderer_of(state: Any) -> Any:
    """The renderer that `install_renderer` has put there."""
    return getattr(state, "online_renderer", None) or state.openai_serving_render


def tokens_router() -> Any:
    """The route of requests of token ids."""
    try:  # 0.29
        from vllm.entrypoints.scale_out.token_in_token_out.api_router import router
    except ModuleNotFoundError:  # 0.24
        from vllm.entrypoints.serve.disagg.api_router import router
    return router


def serve_tokens(state: Any, client: Any) -> None:
    """Makes what serves requests of token ids; after `install_renderer`."""
    if hasattr(state, "serving_tokens"):  # 0.24 has made it, and gives replies an id that no request had
        state.serving_tokens.serve_tokens_full_generator = _naming(state.serving_tokens.serve_tokens_full_generator)
        return
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    models, renderer = state.openai_serving_models, state.online_renderer
    state.serving_tokens = ServingTokens(client, models, renderer, request_logger=None)


def _naming(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(generate)
    async def run(request: Any, results: Any, request_id: str, *args: Any) -> Any:
        reply = await generate(request, results, request_id, *args)
        if hasattr(reply, "request_id"):  # an error has none
            reply.request_id = request_id
        return reply

    return run


def take_host_for_device() -> None:
    """Has vLLM take the host for its device where it found none, as on the head of a cluster; else changes nothing.

    vLLM makes no configuration without a device, also where none is used: not even the parser of its options.
    """
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        current_platform.device_type = "cpu"


def serve_parser() -> Any:
    """The parser of the options of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return _cli_args().make_arg_parser(FlexibleArgumentParser())


def validate_serve_arguments(args: Namespace) -> None:
    """Raises TypeError or ValueError for options that contradict each other."""
    _cli_args().validate_parsed_serve_args(args)


def _cli_args() -> Any:
    try:  # 0.29
        from vllm.entrypoints.launchers import cli_args
    except ModuleNotFoundError:  # 0.24
        from vllm.entrypoints.openai import cli_args
    return cli_args


def handle_exceptions(app: FastAPI) -> None:
    """Adds vLLM's handlers of exceptions, which make the API's error responses."""
    try:  # 0.29
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    except ModuleNotFoundError:  # 0.24: its server adds them itself
        _handle_exceptions_of_0_24(app)
    else:
        init_exception_handler(app)


def _handle_exceptions_of_0_24(app: FastAPI) -> None:
    from fastapi import HTTPException
    from fastapi.exceptions import RequestValidationError
    from vllm.entrypoints.serve.utils import server_utils
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    async def invalid(request: Request, error: RequestValidationError) -> Response:
        """Without the file and line of the route's function, which the text of FastAPI's error has."""
        return await server_utils.validation_exception_handler(request, RequestValidationError(error.errors()))

    handlers = {
        HTTPException: server_utils.http_exception_handler,
        RequestValidationError: invalid,
        EngineGenerateError: server_utils.engine_error_handler,
        EngineDeadError: server_utils.engine_error_handler,
        GenerationError: server_utils.generation_error_handler,
        VLLMValidationError: server_utils.exception_handler,
        VLLMNotFoundError: server_utils.exception_handler,
        ValueError: server_utils.exception_handler,
        TypeError: server_utils.exception_handler,
        OverflowError: server_utils.exception_handler,
        NotImplementedError: server_utils.exception_handler,
        Exception: server_utils.exception_handler,
    }
    for error, handler in handlers.items():
        app.exception_handler(error)(handler)


def convert_messages_errors(serving: Any) -> None:
    """Makes Anthropic's serving class return an error of the request as such, as those of the other APIs do."""
    if issubclass(VLLMValidationError, ValueError):  # 0.24, whose route says 500 for any of them
        serving.create_messages = _returning_errors(serving.create_messages)
        serving.count_tokens = _returning_errors(serving.count_tokens)


def _returning_errors(serve: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    from vllm.entrypoints.serve.utils.error_response import create_error_response

    @wraps(serve)
    async def run(*args: Any) -> Any:
        try:
            return await serve(*args)
        except Exception as error:  # as vLLM 0.29 does for every path: what is the server's own fault is raised again
            response = create_error_response(error)
            if response.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            return response

    return run


def map_adapters_names() -> None:
    """Gives vLLM's map of names the method by which verl 0.9.1 asks for those of an adapter; 0.29 has it renamed."""
    from vllm.model_executor.models.utils import WeightsMapper

    renamed = getattr(WeightsMapper, "get_rename_mapper", None)  # 0.29
    if renamed is not None and not hasattr(WeightsMapper, "get_unstacked_mapper"):
        WeightsMapper.get_unstacked_mapper = renamed
