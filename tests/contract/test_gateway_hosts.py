"""What the gateway relies on in vLLM and verl, pinned: an upgrade fails here, by the name of what moved."""

from __future__ import annotations

import inspect

import pytest
from support.hosts import attributes, found, listed, parameters

CLIENT = "vllm.engine.protocol:EngineClient."
STATE = "vllm.v1.engine.output_processor:RequestState."
TEXT = "vllm.v1.engine.detokenizer:IncrementalDetokenizer."
QUEUE = "vllm.v1.engine.output_processor:RequestOutputCollector."
PARENT = "vllm.v1.engine.parallel_sampling:ParentRequest."
INPUT = "vllm.v1.engine.input_processor:InputProcessor."
ONLINE = "vllm.renderers.online_renderer:OnlineRenderer."
RENDERER = "vllm.renderers.base:BaseRenderer."
BUILDER = "verl.utils.tokenizer.continuous_token:ContinuousTokenBuilder."
# The parameters of what we override or call, by name and in order; `*` stands before keyword-only ones.
PARAMETERS = {
    CLIENT + "generate": "self prompt sampling_params request_id * prompt_text lora_request tokenization_kwargs"
    " trace_headers priority data_parallel_rank session_id reasoning_ended reasoning_parser_kwargs",
    CLIENT + "abort": "self request_id",
    CLIENT + "check_admission": "self n request_id",
    INPUT + "__init__": "self vllm_config renderer * mm_registry",
    INPUT + "process_inputs": "self request_id prompt params supported_tasks arrival_time lora_request"
    " tokenization_kwargs trace_headers priority data_parallel_rank resumable session_id",
    STATE + "from_new_request": "tokenizer request prompt parent_req request_index queue log_stats stream_interval",
    STATE + "make_request_output": "self new_token_ids pooling_output finish_reason stop_reason kv_transfer_params"
    " ec_transfer_params",
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
    ONLINE + "__init__": "self model_config renderer * request_logger chat_template chat_template_content_format"
    " trust_request_chat_template enable_auto_tools exclude_tools_when_tool_choice_none tool_parser reasoning_parser"
    " default_chat_template_kwargs log_error_stack",
    ONLINE + "preprocess_chat": "self request messages default_template default_template_content_format"
    " default_template_kwargs tool_dicts parser * skip_mm_cache",
    RENDERER + "_tokenize_prompt": "self prompt params",
    RENDERER + "_tokenize_singleton_prompt_async": "self prompt params",
    "vllm.renderers.hf:safe_apply_chat_template": "model_config tokenizer conversation * tools chat_template tokenize"
    " return_assistant_tokens_mask **kwargs",
    "vllm.entrypoints.serve.utils.api_utils:listen_for_disconnect": "request",
    ONLINE + "warmup": "self",
    RENDERER + "get_tokenizer": "self",
    "vllm.renderers.params:ChatParams.with_defaults": "self default_chat_template_kwargs default_media_io_kwargs"
    " default_mm_processor_kwargs",
    "vllm.entrypoints.chat_utils:parse_chat_messages": "messages model_config content_format media_io_kwargs"
    " mm_processor_kwargs",
    "vllm.envs:enable_envs_cache": "",
    "vllm.envs:disable_envs_cache": "",
    "vllm.renderers.online_renderer:_reused_prompt_token_ids": "request",
    "vllm.renderers.hf:resolve_chat_template_content_format": "chat_template tools given_format tokenizer *"
    " model_config",
    "vllm.entrypoints.chat_utils:load_chat_template": "chat_template * is_literal",
    "vllm.entrypoints.generate.api_router:init_generate_state": "engine_client state args request_logger"
    " supported_tasks",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__": "self engine_client base_model_paths *"
    " lora_modules",
    "vllm.entrypoints.serve.exception_handling.register:init_exception_handler": "app",
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": "parser",
    "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args": "args",
    "vllm.parser.abstract_parser:DelegatingParser.parse": "self model_output request enable_auto_tools"
    " model_output_token_ids",
    "verl.utils.tokenizer.continuous_token_wiring:create_continuous_token_builder": "tokenizer * model_family"
    " hf_model_type chat_template_kwargs mm_processor_kwargs processor **builder_kwargs",
    BUILDER + "merge_context_tokens": "self previous_messages updated_messages runtime_token_ids * tools",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models": "self",
    "vllm.entrypoints.openai.models.protocol:BaseModelPath": "name model_path",
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": "args",
    "vllm.exceptions:GracefulHTTPError": "message http_status",
    "vllm.exceptions:VLLMValidationError": "message * parameter value",
    "fastapi:FastAPI.build_middleware_stack": "self",
    "fastapi._compat:ModelField.validate": "self value values * loc",
    "uvicorn:Server.startup": "self sockets",
    "uvicorn:Server.capture_signals": "self",
}
# Objects whose being there is all that is needed.
NAMES = (
    "vllm.entrypoints.openai.chat_completion.api_router:router",
    "vllm.entrypoints.openai.completion.api_router:router",
    "vllm.entrypoints.openai.responses.api_router:router",
    "vllm.entrypoints.openai.models.api_router:router",
    "vllm.entrypoints.anthropic.api_router:router",
    "vllm.engine.arg_utils:AsyncEngineArgs.create_model_config",
    "vllm.exceptions:GenerationError",
    "vllm.exceptions:VLLMNotFoundError",
    "vllm.v1.engine.exceptions:EngineGenerateError",
    "vllm.envs:VLLM_CPU_KVCACHE_SPACE",
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
    "vllm.config:VllmConfig": "model_config structured_outputs_config",
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
    from seamless_verl.gateway.http import METHODS, REWARD_PATH
    from seamless_verl.gateway.server import ROUTERS

    served = {(route.path, method) for router in ROUTERS for route in router.routes for method in route.methods}
    assert {(path, method) for path, method in METHODS.items() if path != REWARD_PATH} <= served


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
def test_requests_accept_token_ids_of_a_prompt(module: str) -> None:
    import importlib

    name = {"chat_completion": "ChatCompletionRequest", "responses": "ResponsesRequest"}[module]
    request = getattr(importlib.import_module(f"vllm.entrypoints.openai.{module}.protocol"), name)
    assert "kv_transfer_params" in request.model_fields and hasattr(request, "build_chat_params")


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
