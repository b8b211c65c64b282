"""vLLM's OpenAI and Anthropic serving classes, assembled around our engine client and renderer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from vllm import envs
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.api_router import router as anthropic_router
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.generate.api_router import init_generate_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMNotFoundError
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from seamless_verl.gateway.engine_client import FleetEngineClient
from seamless_verl.gateway.rendering import SessionRenderer
from seamless_verl.gateway.straight import ServingApp

ROUTERS = (chat_router, completion_router, responses_router, anthropic_router, models_router)


def serve_arguments(model: str, options: Sequence[str] = ()) -> Namespace:
    """The arguments of `vllm serve MODEL OPTIONS`, checked: `--tool-call-parser hermes` and the like."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args: Namespace = parser.parse_args(["--model", model, *options])
    args.model_tag = None
    validate_parsed_serve_args(args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    return args


def rendering_config(args: Namespace) -> VllmConfig:
    """What rendering and checking need of the model; nothing is loaded, no device is touched."""
    model_config = AsyncEngineArgs.from_cli_args(args).create_model_config()
    model_config.quantization = None  # weights are the replicas'; their formats are not checked here
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    outputs = args.structured_outputs_config or StructuredOutputsConfig()
    if args.reasoning_parser:
        outputs.reasoning_parser = args.reasoning_parser
    return VllmConfig(model_config=model_config, structured_outputs_config=outputs)


async def serving_app(client: FleetEngineClient, args: Namespace) -> FastAPI:
    """The APIs, without keys and sessions: those are the door's, which stands before it."""
    app = ServingApp(openapi_url=None, docs_url=None, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router)
    app.get("/v1/models/{name:path}")(describe_model)
    init_exception_handler(app)
    await _init_state(app.state, client, args)
    return app


async def describe_model(name: str, request: Request) -> dict[str, Any]:
    """One entry of the list of models, which is all that vLLM's router has."""
    listed = await request.app.state.openai_serving_models.show_available_models()
    for model in listed.data:
        if model.id == name:
            return dict(model.model_dump())
    raise VLLMNotFoundError(f"The model `{name}` does not exist.")


async def _init_state(state: Any, client: FleetEngineClient, args: Namespace) -> None:
    names = args.served_model_name or [args.model]
    state.args, state.engine_client, state.vllm_config = args, client, client.vllm_config
    state.server = SimpleNamespace(should_exit=False)  # where vLLM's handlers look before ending a dead server
    state.enable_server_load_tracking = False
    state.openai_serving_models = OpenAIServingModels(
        engine_client=client, base_model_paths=[BaseModelPath(name=name, model_path=args.model) for name in names]
    )
    state.online_renderer = SessionRenderer(
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
    state.online_renderer.warmup()
    await init_generate_state(client, state, args, None, ("generate",))
