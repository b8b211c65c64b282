"""Converts between chunks and vLLM's outputs: the sampling fields of a replica's request, and its decoded tokens.

Detokenization, stop strings and logprobs are vLLM's own, in this process; a replica gets and returns numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from seamless_verl.rollout.engine import BESIDE_SAMPLING
from seamless_verl.trajectory.records import Finish, TokenChunk, TopLogprobs

ALWAYS_SENT = ("max_tokens", "temperature", "top_p")
SENT_WHEN_SET = (
    *("top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "structured_outputs"),
    "thinking_token_budget",
)
"""Fields of SamplingParams that are sent to a replica; stop strings and all other text stay in this process."""
STREAM_INTERVAL = 16
"""Tokens that a replica may collect into one chunk when nobody reads along. A crash costs at most so many, and each
chunk costs every process between the engine and the journal about the same, whatever its length."""

_FINISH = {Finish.STOP: FinishReason.STOP, Finish.LENGTH: FinishReason.LENGTH, Finish.CANCELLED: FinishReason.ABORT}
_DEFAULTS = SamplingParams()


def engine_sampling(request: EngineCoreRequest) -> dict[str, Any]:
    """The sampling of a replica's request, with the state of a grammar that begins after the reasoning."""
    params = request.sampling_params
    assert params is not None
    sampling = sampling_fields(params)
    # A call with stop strings streams each token, so that it ends at the string.
    if params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop:
        sampling["stream_interval"] = STREAM_INTERVAL
    if params.structured_outputs is not None:
        grammar = {name: getattr(request, name) for name in BESIDE_SAMPLING}
        sampling |= {name: value for name, value in grammar.items() if value is not None}
    return sampling


def stop_strings(params: SamplingParams) -> list[str]:
    """What ends a call in this process, of which a replica knows nothing."""
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The parameters as plain msgpack values; `logprobs` is always set, for the sampled token's."""
    values = {name: getattr(params, name) for name in ALWAYS_SENT}
    for name in SENT_WHEN_SET:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            values[name] = _plain(value)
    values["logprobs"] = params.logprobs or 0
    return values


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        public = {field.name: getattr(value, field.name) for field in fields(value) if not field.name.startswith("_")}
        return {name: item for name, item in public.items() if item is not None and item is not False}
    return value


class Decoder:
    """One call's tokens as vLLM outputs; `parent` is set when the request has several choices.

    `final_only`: the agent sees nothing before the end.
    """

    def __init__(self, tokenizer: Any, request: EngineCoreRequest, parent: ParentRequest | None, index: int) -> None:
        made_for = {"tokenizer": tokenizer, "request": request, "parent_req": parent, "request_index": index}
        self._state = RequestState.from_new_request(
            **made_for, prompt=None, queue=None, log_stats=False, stream_interval=1
        )
        params = request.sampling_params
        assert params is not None and self._state.detokenizer is not None
        self._has_stop_strings, self._wants_logprobs = bool(params.stop), params.num_logprobs is not None
        self.final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._detokenizer, self._logprobs = self._state.detokenizer, self._state.logprobs_processor
        self._request_id = request.request_id

    @property
    def text(self) -> str:
        """The whole text so far, without a stop string."""
        return str(self._detokenizer.get_next_output_text(finished=True, delta=False))

    @property
    def ids(self) -> Sequence[int]:
        return list(self._detokenizer.output_token_ids)

    def feed(self, chunk: TokenChunk) -> tuple[TokenChunk, RequestOutput | None]:
        """The chunk, cut after the token that completed a stop string, and the output to show for it, if any."""
        chunk = self._detokenize_to_stop(chunk) if self._has_stop_strings else self._detokenize(chunk)
        ids = chunk.ids.tolist()
        if self._wants_logprobs and ids:
            rows = logprob_rows(chunk)
            self._logprobs.update_from_output(EngineCoreOutput(self._request_id, ids, new_logprobs=rows))
        finish = None if chunk.finish_reason is None else _FINISH.get(chunk.finish_reason, FinishReason.ERROR)
        return chunk, self._state.make_request_output(ids, None, finish, chunk.stop_reason)

    def _detokenize(self, chunk: TokenChunk) -> TokenChunk:
        self._detokenizer.update(chunk.ids.tolist(), chunk.finish_reason is Finish.STOP)
        return chunk

    def _detokenize_to_stop(self, chunk: TokenChunk) -> TokenChunk:
        """Token by token, so that nothing after a stop string counts as generated."""
        last = len(chunk.ids) - 1
        for position, token in enumerate(chunk.ids):
            stop = self._detokenizer.update([token], position == last and chunk.finish_reason is Finish.STOP)
            if stop is not None:
                return _cut(chunk, position + 1, stop)
        return chunk


def _cut(chunk: TokenChunk, length: int, stop: int | str) -> TokenChunk:
    """The first `length` tokens, as the end of the call."""
    at = slice(length)
    top = None if chunk.top is None else chunk.top[at]
    kept = {"ids": chunk.ids[at], "logprobs": chunk.logprobs[at], "top": top, "grammar": chunk.grammar[at]}
    kept["routes"] = None if chunk.routes is None else chunk.routes.part(0, length)
    return replace(chunk, finish_reason=Finish.STOP, stop_reason=stop, **kept)


def logprob_rows(chunk: TokenChunk) -> LogprobsLists:
    """In the engine core's form: at each position the sampled token first, then the likeliest."""
    if chunk.top is None:
        ids = np.array(chunk.ids, dtype=np.int64)[:, None]
        return LogprobsLists(ids, np.array(chunk.logprobs, dtype=np.float32)[:, None], np.ones(len(ids), np.int64))
    rows = [_row(*position) for position in zip(chunk.ids, chunk.logprobs, chunk.top, strict=True)]
    ranks = np.array([entry.rank for entry in chunk.top])
    return LogprobsLists([np.array(row[0]) for row in rows], [np.array(row[1]) for row in rows], ranks)


def _row(token: int, logprob: float, top: TopLogprobs) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The sampled token, then the likeliest; it is listed last among those when it is none of them."""
    end = -1 if top.ids and top.ids[-1] == token else None
    return (token, *top.ids[:end]), (logprob, *top.logprobs[:end])
