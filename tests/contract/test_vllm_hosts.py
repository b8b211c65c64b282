"""Pins what a replica's server uses of vLLM's engine: after an upgrade, a failing test names what changed."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hosts import VLLM, attributes, found, listed, parameters

from seamless_verl.rollout.engine import BESIDE_SAMPLING
from seamless_verl.rollout.precedence import Precedence

ENGINE = "vllm.v1.engine.async_llm:AsyncLLM."
CORE = "vllm.v1.engine.core_client:AsyncMPClient"
PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor."
MANAGER = "vllm.v1.structured_output:StructuredOutputManager."
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts."
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner."
SAMPLER_V2 = "vllm.v1.worker.gpu.sample.sampler:Sampler."
GRAMMARS_V2 = "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker."
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1."
COLLECTOR = "vllm.v1.engine.output_processor:RequestOutputCollector."
PLACES = {
    "young": Precedence(1 << 20, True, -2, 1),
    "old": Precedence(3, True, 1, 2),
    "old and long": Precedence(3, True, -1, 3),
    "old and begun": Precedence(3, False, 0, 4),
}
# What we call, with its parameters by name and in order; `*` stands before keyword-only ones.
CALLED = {
    ENGINE + "add_request": "self request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers"
    f" priority data_parallel_rank{'' if VLLM == '0.24' else ' session_id'} prompt_text reasoning_ended"
    " reasoning_parser_kwargs",
    ENGINE + "abort": "self request_id internal",
    CORE + ".pause_scheduler_async": "self mode clear_cache",
    ENGINE + "resume_generation": "self",
    ENGINE + "collective_rpc": "self method timeout args kwargs",
    ENGINE + "reset_prefix_cache": "self reset_running_requests reset_connector",
    ENGINE + "reset_mm_cache": "self",
    ENGINE + "reset_encoder_cache": "self",
    ENGINE + "shutdown": "self timeout",
    ENGINE + "get_tokenizer": "self",
    CONNECTOR + "reset_cache": "self",
    "vllm.v1.request:Request.update_block_hashes": "self",
    COLLECTOR + "get": "self",
    COLLECTOR + "get_nowait": "self",
    COLLECTOR + "close": "self",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.num_output_tokens": "self",
    MANAGER + "_get_reasoner": "self request",
    "vllm.reasoning:ReasoningParser.is_reasoning_end": "self input_ids",
    "vllm.reasoning:ReasoningParser.is_reasoning_end_streaming": "self input_ids delta_ids",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens": "self request_id tokens",
    MANAGER + "_create_grammar": "self request",  # replaced
    "vllm.v1.worker.gpu_worker:Worker.wake_up": "self tags",  # for the KV cache alone
    "vllm.device_allocator:get_mem_allocator_instance": "",
    SCHEDULER
    + "_preempt_request": f"self request timestamp{'' if VLLM == '0.24' else ' drop_stale_output'}",  # replaced
    SCHEDULER + "reset_prefix_cache": "self reset_running_requests reset_connector",  # replaced
    SCHEDULER + "make_stats": "self spec_decoding_stats kv_connector_stats cudagraph_stats perf_stats",  # replaced
    SCHEDULER + "make_spec_decoding_stats": "self spec_decoding_stats num_draft_tokens num_accepted_tokens"
    " num_invalid_spec_tokens request_id",  # replaced
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from"
    " replace_to",  # replaced
    PROCESSOR + "update_scheduler_stats": "self scheduler_stats",  # replaced
    RUNNER + "sample_tokens": "self grammar_output",  # replaced
    RUNNER + "_sample": "self logits spec_decode_metadata",  # replaced
    "vllm.v1.sample.sampler:Sampler.gather_logprobs": "logprobs num_logprobs token_ids",
    SAMPLER_V2 + "__call__": "self logits input_batch",  # replaced
    SAMPLER_V2 + "add_request": "self req_idx prompt_len sampling_params",  # replaced
    RUNNER + "init_routed_experts_capturer": "self",  # replaced
    "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights": "self model"
    " model_config",  # replaced
    **(
        {
            "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._apply_quant_method": "self hidden_states"
            " router_logits shared_experts_input input_ids",  # replaced
            "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter.set_capture_fn": "self capture_fn",
        }
        if VLLM == "0.24"
        else {
            CPU_EXPERTS + "_select_experts": "self hidden_states router_logits num_expert_group topk_group"
            " e_score_correction_bias routed_scaling_factor",  # replaced
            CPU_EXPERTS + "supports_routing_replay_capture": "self",  # replaced
            CPU_EXPERTS + "set_capture_fn": "self capture_fn",
        }
    ),
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts"
    if VLLM == "0.24"
    else "vllm.model_executor.layers.fused_moe.experts.cpu_moe:select_experts": "hidden_states router_logits top_k"
    " use_grouped_topk renormalize topk_group num_expert_group custom_routing_function scoring_func"
    " routed_scaling_factor e_score_correction_bias",
    GRAMMARS_V2 + "apply_grammar_bitmask": "self logits input_batch grammar_req_ids grammar_bitmask",  # replaced
}
# What we read of its objects, or give them by name.
HELD = {
    ENGINE[:-1]: "engine_core output_processor errored output_handler model_config vllm_config",
    CORE: "outputs_queue",
    PROCESSOR[:-1]: "request_states",
    COLLECTOR[:-1]: "request_id",
    "vllm.v1.engine.output_processor:RequestState": "detokenizer logprobs_processor stream_interval"
    " routed_experts_chunks",
    "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer": "output_text skip_special_tokens",
    "vllm.v1.engine.logprobs:LogprobsProcessor": "tokenizer",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": "_connectors",
    "vllm.outputs:RequestOutput": "finished outputs num_cached_tokens",
    "vllm.v1.metrics.stats:SchedulerStats": "prefix_cache_stats spec_decoding_stats",
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": "num_draft_tokens num_accepted_tokens",
    "vllm.v1.metrics.stats:PrefixCacheStats": "preempted_requests",
    "vllm.outputs:CompletionOutput": "token_ids logprobs finish_reason stop_reason routed_experts",
    "vllm.logprobs:Logprob": "logprob rank",
    "vllm:TokensPrompt": "prompt_token_ids cache_salt multi_modal_data mm_processor_kwargs",
    "vllm.sampling_params:SamplingParams": "logprobs structured_outputs detokenize output_kind extra_args temperature"
    " top_p top_k min_p presence_penalty frequency_penalty repetition_penalty min_tokens logit_bias allowed_token_ids"
    " bad_words thinking_token_budget stop routed_experts_prompt_start",
    RUNNER[:-1]: "execute_model_state input_batch requests",
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": "scheduler_output logits",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids logitsprocs",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": "sampling_params num_prompt_tokens",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_new_reqs scheduled_spec_decode_tokens",
    "vllm.v1.core.sched.output:NewRequestData": "req_id sampling_params",
    "vllm.v1.core.sched.output:GrammarOutput": "structured_output_request_ids grammar_bitmask",
    "vllm.v1.sample.logits_processor:LogitsProcessors": "argmax_invariant non_argmax_invariant",
    "vllm.v1.outputs:SamplerOutput": "sampled_token_ids logprobs_tensors",
    "vllm.v1.outputs:LogprobsTensors": "logprob_token_ids logprobs selected_token_ranks",
    RUNNER_V2[:-1]: "sampler structured_outputs_worker",
    "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids idx_mapping_np num_draft_tokens",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": "sampled_token_ids logprobs_tensors",
    "vllm.config:ModelConfig": "logprobs_mode enable_return_routed_experts",
    "vllm.v1.worker.gpu_worker:Worker": "vllm_config use_v2_model_runner model_runner",
    SCHEDULER[:-1]: "structured_output_manager connector requests num_spec_tokens",
    MANAGER[:-1]: "enable_in_reasoning tokenizer",
    "vllm.v1.request:Request": "request_id prompt_token_ids sampling_params structured_output_request cache_salt"
    " block_hashes",
    "vllm.v1.structured_output.request:StructuredOutputRequest": "reasoning_ended",
    "vllm.tokenizers:TokenizerLike": "get_added_vocab",
    "vllm.config:SchedulerConfig": "scheduler_cls async_scheduling policy",
    "vllm.sampling_params:RequestOutputKind": "DELTA",
}


@pytest.mark.parametrize("symbol", CALLED)
def test_what_we_call_takes_what_it_took(symbol: str) -> None:
    assert parameters(found(symbol, "engine-source")) == CALLED[symbol]


@pytest.mark.parametrize(("owner", "name"), listed(HELD))
def test_its_objects_hold_what_we_read(owner: str, name: str) -> None:
    assert name in attributes(found(owner, "engine-source"))


def test_a_request_is_refused_by_an_error_of_the_client() -> None:
    from seamless_verl.platform.vllm_versions import VLLMClientError

    refusal = found("vllm.exceptions:VLLMValidationError", "engine-source")
    assert issubclass(refusal, (ValueError, VLLMClientError))


@pytest.mark.parametrize("name", BESIDE_SAMPLING)
def test_values_beside_the_sampling_have_parameters_of_their_own(name: str) -> None:
    assert name in parameters(found(ENGINE + "add_request", "engine-source")).split()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_the_engine_has_our_modes_of_a_pause(mode: str) -> None:
    assert repr(mode) in str(inspect.signature(found(ENGINE + "pause_generation", "engine-source")).parameters["mode"])


def test_replies_are_in_a_queue_that_shows_whether_a_task_waits_for_them() -> None:
    assert "self.outputs_queue = asyncio.Queue[" in inspect.getsource(found(CORE, "engine-source"))
    assert not asyncio.Queue()._getters  # type: ignore[attr-defined]


def request() -> Any:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

    from seamless_verl.replica.engine_source import sampling_params as parameters_of

    fields = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
    params = parameters_of({"max_tokens": 8})
    requested = EngineCoreRequest("one", [1, 2], sampling_params=params, arrival_time=0.0, **fields)
    InputProcessor.assign_request_id(requested)
    return requested


def added_state(requested: Any) -> Any:
    """The state of a request in vLLM's own table, found as the source finds it."""
    collector = found(COLLECTOR[:-1], "engine-source")(requested.sampling_params.output_kind, requested.request_id)
    processor = found(PROCESSOR[:-1], "engine-source")(None, log_stats=False)
    processor.add_request(requested, None, queue=collector)
    return processor.request_states[collector.request_id]


def test_a_state_counts_tokens_without_detokenizing_them() -> None:
    state = added_state(request())
    assert state.detokenizer.num_output_tokens() == 0
    state.detokenizer.update([5, 6, 7], False)
    assert state.detokenizer.num_output_tokens() == 3


@pytest.mark.parametrize(("requested", "kept"), [({}, 1), ({"stream_interval": 64}, 64)])
async def test_a_request_sets_how_many_tokens_a_chunk_has(requested: dict[str, int], kept: int) -> None:
    """Through the source, with vLLM's table of requests, and an engine that only fills it."""
    from seamless_verl.replica.engine_source import AsyncLLMSource
    from seamless_verl.rollout.engine import EngineRequest
    from seamless_verl.trajectory.records import tokens

    processor = found(PROCESSOR[:-1], "engine-source")(None, log_stats=False)

    class Filling:
        output_processor, vllm_config = processor, SimpleNamespace(kv_transfer_config=None)
        model_config = SimpleNamespace(enable_return_routed_experts=False)

        async def add_request(self, request_id: str, prompt: Any, params: Any, **beside: Any) -> Any:
            added = request()
            added.sampling_params = params
            collector = found(COLLECTOR[:-1], "engine-source")(params.output_kind, added.request_id)
            processor.add_request(added, None, queue=collector)
            return collector

    source = AsyncLLMSource(Filling(), 0)  # type: ignore[arg-type]
    collector = await source._send(EngineRequest("one", tokens([1, 2]), {"max_tokens": 8, **requested}), media={})
    assert processor.request_states[collector.request_id].stream_interval == kept


def test_an_engine_takes_a_function_that_makes_a_scheduler() -> None:
    from vllm.config import SchedulerConfig

    from seamless_verl.replica import scheduler

    named = SchedulerConfig.default_factory(scheduler_cls=scheduler.SCHEDULER_CLS)
    assert named.get_scheduler_cls() is scheduler.make_scheduler  # type: ignore[comparison-overlap]
    core = inspect.getsource(found("vllm.v1.engine.core:EngineCore.__init__", "engine-source"))
    assert "Scheduler = vllm_config.scheduler_config.get_scheduler_cls()" in core
    assert "= Scheduler(\n            vllm_config=vllm_config,\n" in core


def test_an_engine_orders_requests_by_priority_where_its_policy_says_so() -> None:
    """The smaller number goes first, and the largest loses its cache where memory is short."""
    from typing import get_args

    from vllm.config.scheduler import SchedulerPolicy
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
    from vllm.v1.request import Request

    assert "priority" in get_args(SchedulerPolicy)
    queue = create_request_queue(SchedulingPolicy("priority"))
    for name, place in PLACES.items():
        added = request()
        added.priority = place.priority
        queue.add_request(Request.from_engine_core_request(added, None))
        assert queue.peek_request().priority <= place.priority, name
    assert [queue.pop_request().priority for _ in PLACES] == sorted(place.priority for place in PLACES.values())
    schedule = inspect.getsource(found("vllm.v1.core.sched.scheduler:Scheduler.schedule", "engine-source"))
    assert "key=lambda r: (r.priority, r.arrival_time)" in schedule


def test_statistics_of_preemptions_arrive_in_the_server_s_process() -> None:
    """With every step; nothing of vLLM itself reads the field that carries them."""
    import vllm
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    updated = inspect.getsource(found(SCHEDULER + "update_from_output", "engine-source"))
    assert "stats := self.make_stats(" in updated
    handler = inspect.getsource(found(ENGINE + "_run_output_handler", "engine-source"))
    assert "output_processor.update_scheduler_stats(outputs.scheduler_stats)" in handler
    sources = Path(vllm.__file__).parent.rglob("*.py")
    assert {file.name for file in sources if "preempted_requests" in file.read_text()} == {"stats.py"}
    sent = SchedulerStats()
    sent.prefix_cache_stats.preempted_requests = 3
    outputs = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=sent)))
    assert outputs.scheduler_stats.prefix_cache_stats.preempted_requests == 3


def test_a_priority_arrives_in_the_engine_s_process() -> None:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    sent = request()
    sent.priority = PLACES["young"].priority
    assert sent.priority > 1 << 20
    assert MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent)).priority == sent.priority


def test_verl_has_a_setting_for_it() -> None:
    server = inspect.getsource(found("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer", "server"))
    assert '"scheduling_policy": self.config.scheduling_policy' in server


def test_a_grammar_that_fails_to_compile_ends_only_its_request() -> None:
    from seamless_verl.platform.vllm_versions import ending_its_request

    def fail(failing: Any) -> Any:
        raise ValueError(failing.request_id)

    init = inspect.getsource(found(MANAGER + "grammar_init", "engine-source"))
    assert "self.executor.submit(self._create_grammar, request)" in init
    if VLLM == "0.24":  # a grammar in its place rejects the first token
        updated = found("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", "engine-source")
        assert "grammar.accept_tokens(" in inspect.getsource(updated)
        assert not ending_its_request(fail)(request()).accept_tokens("one", [1])
        return
    promoted = found("vllm.v1.core.sched.scheduler:Scheduler._try_promote_blocked_waiting_request", "engine-source")
    assert "isinstance(structured_output_req.grammar, Exception)" in inspect.getsource(promoted)
    assert ending_its_request(fail) is fail


def test_a_grammar_masks_between_the_methods_that_we_replace() -> None:
    steps = inspect.getsource(found(RUNNER + "sample_tokens", "own-logprobs"))
    order = [steps.index(step) for step in ("self.execute_model_state", "apply_grammar_bitmask(", "self._sample(")]
    assert order == sorted(order)
    worker = inspect.getsource(found("vllm.v1.worker.gpu_worker:Worker.sample_tokens", "own-logprobs"))
    assert "self.model_runner.sample_tokens(grammar_output)" in worker


def test_a_proposer_of_ones_own_gets_the_tokens_of_each_request() -> None:
    drafted = inspect.getsource(found(RUNNER + "propose_draft_token_ids", "drafts"))
    _, _, of_its_own = drafted.partition('spec_config.method == "custom_class"')
    call = "".join(of_its_own.split())
    arguments = "sampled_token_ids,self.input_batch.num_tokens_no_spec,self.input_batch.token_ids_cpu,"
    assert f"self.drafter).propose({arguments}slot_mappings=slot_mappings,)" in call
    assert "user_class(vllm_config)" in inspect.getsource(
        found("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", "drafts")
    )
    fits = "".join(inspect.getsource(found(RUNNER + "_input_fits_in_drafter", "drafts")).split())
    assert "common_attn_metadata.max_seq_len+num_drafter_query_tokens<=self.effective_drafter_max_model_len" in fits


def test_the_second_runner_masks_and_samples_through_what_we_replace() -> None:
    steps = inspect.getsource(found(RUNNER_V2 + "sample", "own-logprobs"))
    masked = steps.index("self.structured_outputs_worker.apply_grammar_bitmask(")
    assert masked < steps.index("self.sampler(logits, input_batch)")
    processed = inspect.getsource(found(SAMPLER_V2 + "apply_sampling_params", "own-logprobs"))
    assert "logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)" in processed


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_an_engine_has_our_modes_of_logprobs(mode: str) -> None:
    from typing import get_args

    from vllm.config.model import LogprobsMode

    from seamless_verl.config.checks.keys import LOGPROBS_MODES
    from seamless_verl.replica.own_logprobs import MODES

    assert MODES == LOGPROBS_MODES and mode in MODES and mode in get_args(LogprobsMode)


def test_a_prompts_logprobs_are_made_where_we_set_their_temperature() -> None:
    read = inspect.getsource(found(RUNNER + "_get_prompt_logprobs_dict", "rereading"))
    assert "num_prompt_logprobs_dict = self.num_prompt_logprobs" in read and "self.requests[req_id]" in read
    assert "self.sampler.compute_logprobs(logits)" in read
    prompts = "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker."
    add, compute = (found(prompts + name, "rereading") for name in ("add_request", "compute_prompt_logprobs"))
    assert list(inspect.signature(add).parameters) == ["self", "req_id", "req_idx", "sampling_params"]
    assert list(inspect.signature(compute).parameters)[:2] == ["self", "logits_fn"]
