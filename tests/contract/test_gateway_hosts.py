"""What the gateway relies on in vLLM and verl, pinned: an upgrade fails here, by the name of what moved."""

from __future__ import annotations

import inspect

import pytest
from support.hosts import VLLM, attributes, found, listed, parameters

CLIENT = "vllm.engine.protocol:EngineClient."
STATE = "vllm.v1.engine.output_processor:RequestState."
TEXT = "vllm.v1.engine.detokenizer:IncrementalDetokenizer."
QUEUE = "vllm.v1.engine.output_processor:RequestOutputCollector."
PARENT = "vllm.v1.engine.parallel_sampling:ParentRequest."
INPUT = "vllm.v1.engine.input_processor:InputProcessor."
ONLINE = {
    "0.24": "vllm.entrypoints.serve.render.serving:OpenAIServingRender.",
    "0.29": "vllm.renderers.online_renderer:OnlineRenderer.",
}[VLLM]
TOKENS = {"0.24": "vllm.entrypoints.serve.disagg.", "0.29": "vllm.entrypoints.scale_out.token_in_token_out."}[VLLM]
HTTP = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol."
CLI = {"0.24": "vllm.entrypoints.openai.cli_args:", "0.29": "vllm.entrypoints.launchers.cli_args:"}[VLLM]
HANDLERS = "vllm.entrypoints.serve.utils.server_utils:"
RENDERER = "vllm.renderers.base:BaseRenderer."
BUILDER = "verl.utils.tokenizer.continuous_token:ContinuousTokenBuilder."
# The parameters of what we override or call, by name and in order; `*` stands before keyword-only ones.
PARAMETERS = {
    CLIENT + "abort": "self request_id",
    INPUT + "__init__": "self vllm_config renderer * mm_registry",
    STATE + "from_new_request": "tokenizer request prompt parent_req request_index queue log_stats stream_interval",
    TEXT + "update": "self new_token_ids stop_terminated",
    TEXT + "get_next_output_text": "self finished delta",
    "vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output": "self output",
    QUEUE + "__init__": "self output_kind request_id",
    QUEUE + "put": "self output",
    QUEUE + "get": "self",
    QUEUE + "get_nowait": "self",
    PARENT + "__init__": "self request",
    PARENT + "get_child_info": "self index",
    "vllm.renderers:renderer_from_config": "config **kwargs",
    ONLINE + "preprocess_chat": "self request messages default_template default_template_content_format"
    " default_template_kwargs tool_dicts parser * skip_mm_cache",
    RENDERER + "_tokenize_prompt": "self prompt params",
    RENDERER + "_tokenize_singleton_prompt_async": "self prompt params",
    "vllm.entrypoints.serve.utils.api_utils:listen_for_disconnect": "request",
    RENDERER + "get_tokenizer": "self",
    RENDERER + "render_chat_async": "self conversations chat_params tok_params * prompt_extras skip_mm_cache",
    "vllm.inputs:tokens_input": "prompt_token_ids * prompt cache_salt",
    CLI + "make_arg_parser": "parser",
    CLI + "validate_parsed_serve_args": "args",
    "vllm.renderers.params:ChatParams.with_defaults": "self default_chat_template_kwargs default_media_io_kwargs"
    " default_mm_processor_kwargs",
    "vllm.entrypoints.chat_utils:parse_chat_messages": "messages model_config content_format media_io_kwargs"
    " mm_processor_kwargs",
    "vllm.envs:enable_envs_cache": "",
    "vllm.envs:disable_envs_cache": "",
    "vllm.renderers.hf:resolve_chat_template_content_format": "chat_template tools given_format tokenizer *"
    " model_config",
    "vllm.entrypoints.chat_utils:load_chat_template": "chat_template * is_literal",
    "vllm.entrypoints.generate.api_router:init_generate_state": "engine_client state args request_logger"
    " supported_tasks",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__": "self engine_client base_model_paths *"
    " lora_modules",
    "vllm.parser.abstract_parser:DelegatingParser.parse": "self model_output request enable_auto_tools"
    " model_output_token_ids",
    "verl.utils.tokenizer.continuous_token_wiring:create_continuous_token_builder": "tokenizer * model_family"
    " hf_model_type chat_template_kwargs mm_processor_kwargs processor **builder_kwargs",
    BUILDER + "merge_context_tokens": "self previous_messages updated_messages runtime_token_ids * tools",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.is_base_model": "self model_name",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.model_name": "self lora_request",
    "vllm.parser.abstract_parser:DelegatingParser.parse_delta": "self delta_text delta_token_ids request"
    " prompt_token_ids * finished",
    "vllm.parser.abstract_parser:DelegatingParser.extract_reasoning": "self model_output request",
    "vllm.parser.abstract_parser:DelegatingParser.adjust_request": "self request",
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.get_structural_tag": "self request * reasoning",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.messages_full_converter": "self generator",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter": "self generator",
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses": "self request raw_request",
    RENDERER + "tokenize_prompts_async": "self prompts params",
    RENDERER + "render_cmpl_async": "self prompts tok_params * prompt_extras skip_mm_cache",
    "vllm.entrypoints.openai.models.protocol:BaseModelPath": "name model_path",
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": "args",
    "vllm.exceptions:VLLMValidationError": "message * parameter value",
    "fastapi:FastAPI.build_middleware_stack": "self",
    "fastapi._compat:ModelField.validate": "self value values * loc",
    "uvicorn:Server.startup": "self sockets",
    HTTP + "connection_made": "self transport",  # replaced
    HTTP + "data_received": "self data",  # replaced
    HTTP + "timeout_keep_alive_handler": "self",
    "uvicorn:Server.capture_signals": "self",
}
HANDLER_NAMES = (
    *("http_exception_handler", "validation_exception_handler", "engine_error_handler", "generation_error_handler"),
    "exception_handler",
)
# What differs between the versions; platform/vllm_versions.py hides it.
OF_RENDERER = (
    "request_logger chat_template chat_template_content_format trust_request_chat_template enable_auto_tools"
    " exclude_tools_when_tool_choice_none tool_parser reasoning_parser default_chat_template_kwargs log_error_stack"
)
OF_TEMPLATE = "model_config tokenizer conversation * tools chat_template tokenize"
OF_INPUTS = (
    "self request_id prompt params supported_tasks arrival_time lora_request tokenization_kwargs trace_headers priority"
    " data_parallel_rank resumable"
)
OF_OUTPUT = "self new_token_ids pooling_output finish_reason stop_reason kv_transfer_params"
OF_GENERATE = (
    "self prompt sampling_params request_id * prompt_text lora_request tokenization_kwargs trace_headers priority"
    " data_parallel_rank"
)
OF_VERSION = {
    "0.24": {
        CLIENT + "generate": f"{OF_GENERATE} reasoning_ended reasoning_parser_kwargs",
        INPUT + "process_inputs": OF_INPUTS,
        STATE + "make_request_output": OF_OUTPUT,
        ONLINE + "__init__": f"self model_config renderer model_registry * {OF_RENDERER}",
        "vllm.renderers.hf:safe_apply_chat_template": f"{OF_TEMPLATE} **kwargs",
        **{HANDLERS + name: "req exc" for name in HANDLER_NAMES},
        "vllm.entrypoints.openai.engine.protocol:GenerationError": "message",
        TOKENS + "serving:ServingTokens.serve_tokens_full_generator": "self request result_generator request_id"
        " model_name request_metadata",
    },
    "0.29": {
        CLIENT + "generate": f"{OF_GENERATE} session_id reasoning_ended reasoning_parser_kwargs",
        CLIENT + "check_admission": "self n request_id",
        INPUT + "process_inputs": f"{OF_INPUTS} session_id",
        STATE + "make_request_output": f"{OF_OUTPUT} ec_transfer_params",
        ONLINE + "__init__": f"self model_config renderer * {OF_RENDERER}",
        "vllm.renderers.hf:safe_apply_chat_template": f"{OF_TEMPLATE} return_assistant_tokens_mask **kwargs",
        ONLINE + "warmup": "self",
        TOKENS + "serving:ServingTokens.__init__": "self engine_client models online_renderer * request_logger"
        " force_no_detokenize return_tokens_as_token_ids enable_prompt_tokens_details enable_log_outputs",
        "vllm.entrypoints.serve.exception_handling.register:init_exception_handler": "app",
        "vllm.exceptions:GenerationError": "message",
        "vllm.exceptions:GracefulHTTPError": "message http_status",
    },
}
PARAMETERS |= OF_VERSION[VLLM]
# Objects whose being there is all that is needed.
NAMES = (
    "vllm.entrypoints.openai.chat_completion.api_router:router",
    "vllm.entrypoints.openai.completion.api_router:router",
    "vllm.entrypoints.openai.responses.api_router:router",
    "vllm.entrypoints.openai.models.api_router:router",
    TOKENS + "api_router:router",
    "vllm.entrypoints.anthropic.api_router:router",
    "vllm.engine.arg_utils:AsyncEngineArgs.create_model_config",
    "vllm.exceptions:VLLMNotFoundError",
    "vllm.v1.engine.exceptions:EngineGenerateError",
    "vllm.envs:VLLM_CPU_KVCACHE_SPACE",
    "xgrammar:Grammar.from_structural_tag",
    "xgrammar:StructuralTag",
    "xgrammar.structural_tag:JSONSchemaFormat",
    "xgrammar.structural_tag:OrFormat",
    "vllm.parser.harmony:HarmonyParser",
    "vllm.parser.mistral:MistralParser",
)
# What we read of its objects, or set on them.
HELD = {
    "vllm.renderers.hf:HfRenderer": "tokenizer _tokenize_prompt_async _apply_chat_template_async",
    ONLINE[:-1]: "renderer model_config chat_template",
    "vllm.v1.engine:EngineCoreRequest": "request_id external_req_id prompt_token_ids sampling_params reasoning_ended"
    " reasoning_parser_kwargs",
    "vllm.v1.engine:EngineCoreOutput": "request_id new_token_ids new_logprobs",
    "vllm.v1.engine:FinishReason": "STOP LENGTH ABORT ERROR",
    "vllm.sampling_params:SamplingParams": "num_logprobs output_kind prompt_logprobs",
    STATE[:-1]: "detokenizer logprobs_processor",
    TEXT[:-1]: "output_token_ids",
    "vllm.config:StructuredOutputsConfig": "reasoning_parser",
    "vllm.tool_parsers.abstract_tool_parser:ToolParser": "structural_tag_model",
    "vllm.parser.abstract_parser:DelegatingParser": "tool_parser",
    "vllm.config:VllmConfig": "model_config structured_outputs_config",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages": "_merge_inline_system",
    "verl.utils.tokenizer.continuous_token:MergeResult": "token_ids",
}


@pytest.mark.parametrize("symbol", PARAMETERS)
def test_what_we_override_or_call_takes_what_it_took(symbol: str) -> None:
    assert parameters(found(symbol, "gateway")) == PARAMETERS[symbol]


@pytest.mark.parametrize("symbol", NAMES)
def test_what_we_import_is_there(symbol: str) -> None:
    found(symbol, "gateway")


@pytest.mark.parametrize(("owner", "name"), listed(HELD))
def test_its_objects_hold_what_we_read(owner: str, name: str) -> None:
    assert name in attributes(found(owner, "gateway"))


def test_our_client_answers_all_that_the_protocol_demands() -> None:
    from seamless_verl.gateway.engine_client import FleetEngineClient

    assert not getattr(FleetEngineClient, "__abstractmethods__", None)


def test_the_paths_served_are_those_of_the_routers() -> None:
    from seamless_verl.gateway.http import METHODS, MODELS_PATH, REWARD_PATH
    from seamless_verl.gateway.server import ROUTERS

    served = {(route.path, method) for router in ROUTERS for route in router.routes for method in route.methods}
    ours = {(path, method) for path, methods in METHODS.items() for method in methods}
    assert {pair for pair in ours if pair[0] not in (REWARD_PATH, MODELS_PATH)} <= served


def test_sampling_parameters_have_the_fields_we_send() -> None:
    from vllm.sampling_params import SamplingParams

    from seamless_verl.gateway.outputs import ALWAYS_SENT, SENT_WHEN_SET
    from seamless_verl.gateway.session import SamplingParameters

    ours = {*ALWAYS_SENT, *SENT_WHEN_SET, *SamplingParameters.__dataclass_fields__, "logprobs", "stop", "n"}
    assert ours <= set(SamplingParams.__struct_fields__)


def test_changed_parameters_are_checked_again() -> None:
    from msgspec import structs
    from vllm.sampling_params import SamplingParams

    assert structs.replace(SamplingParams(top_k=5), temperature=0.0).top_k == 0  # greedy: __post_init__ has run


def test_logprobs_come_in_the_order_we_build_them() -> None:
    from vllm.v1.outputs import LogprobsLists

    assert LogprobsLists._fields[:3] == ("logprob_token_ids", "logprobs", "sampled_token_ranks")


@pytest.mark.parametrize("module", ["chat_completion", "responses"])
def test_requests_say_how_they_are_rendered(module: str) -> None:
    import importlib

    name = {"chat_completion": "ChatCompletionRequest", "responses": "ResponsesRequest"}[module]
    request = getattr(importlib.import_module(f"vllm.entrypoints.openai.{module}.protocol"), name)
    assert hasattr(request, "build_chat_params") and hasattr(request, "build_tok_params")


def test_routes_have_one_cancelling_layer_around_their_function() -> None:
    """What the fast path takes off, and does itself."""
    from fastapi.routing import APIRoute

    from seamless_verl.gateway.fast_path import FAST_PATHS
    from seamless_verl.gateway.server import ROUTERS

    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    for route in (route for route in routes if route.path in FAST_PATHS):
        outer, inner = route.endpoint, route.endpoint.__wrapped__
        assert "listen_for_disconnect" in outer.__code__.co_names
        assert "listen_for_disconnect" not in inner.__code__.co_names
        assert list(inspect.signature(inner).parameters) == ["request", "raw_request"]
        assert route.body_field is not None and len(route.dependant.body_params) == 1
