"""Between our pieces and vLLM's outputs: what is asked of a replica, and what its tokens become in this process.

Detokenization, stop strings and logprobs are vLLM's own, run here on the tokens as they come; a replica gets
numbers and gives numbers.
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

from seamless_verl.rollout.call import Piece
from seamless_verl.rollout.engine import BESIDE_SAMPLING, TopLogprobs
from seamless_verl.trajectory.records import Finish

ALWAYS = ("max_tokens", "temperature", "top_p")
WHEN_SET = (
    *("top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "structured_outputs"),
    "thinking_token_budget",
)
"""Fields of SamplingParams that reach a replica; stop strings and everything about text stay here."""

GATHERED = 16
"""Tokens that a replica may gather before it gives them where nobody reads along: so many a crash costs at most, and
each time costs every process between the engine and the journal much the same. verl's own agent loops, whose calls no
journal keeps, have more of them gathered."""

_FINISH = {Finish.STOP: FinishReason.STOP, Finish.LENGTH: FinishReason.LENGTH, Finish.CANCELLED: FinishReason.ABORT}
_DEFAULTS = SamplingParams()


def asked_of(request: EngineCoreRequest) -> dict[str, Any]:
    """What a replica is asked: sampling, and where a grammar begins that waits for the end of reasoning."""
    params = request.sampling_params
    assert params is not None
    asked = sampling_of(params)
    if params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop:  # at a stop string it is to stop at once
        asked["stream_interval"] = GATHERED
    if params.structured_outputs is not None:
        beside = {name: getattr(request, name) for name in BESIDE_SAMPLING}
        asked |= {name: value for name, value in beside.items() if value is not None}
    return asked


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    """Plain msgpack values, and always the sampled token's logprob."""
    asked = {name: getattr(params, name) for name in ALWAYS}
    for name in WHEN_SET:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            asked[name] = _plain(value)
    asked["logprobs"] = params.logprobs or 0
    return asked


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        public = {one.name: getattr(value, one.name) for one in fields(value) if not one.name.startswith("_")}
        return {name: held for name, held in public.items() if held is not None and held is not False}
    return value


class Decoder:
    """One call's tokens as vLLM outputs; `parent` where it is one of several choices of a request."""

    def __init__(self, tokenizer: Any, request: EngineCoreRequest, parent: ParentRequest | None, index: int) -> None:
        self._state = RequestState.from_new_request(
            tokenizer=tokenizer,
            request=request,
            prompt=None,
            parent_req=parent,
            request_index=index,
            queue=None,
            log_stats=False,
            stream_interval=1,
        )
        params = request.sampling_params
        assert params is not None and self._state.detokenizer is not None
        self._stops, self._top = bool(params.stop), params.num_logprobs is not None
        self.whole = params.output_kind is RequestOutputKind.FINAL_ONLY  # nobody is shown anything before the end
        self._detokenizer, self._logprobs = self._state.detokenizer, self._state.logprobs_processor
        self._request_id = request.request_id

    @property
    def text(self) -> str:
        """All of the text, less a stop string."""
        return str(self._detokenizer.get_next_output_text(finished=True, delta=False))

    @property
    def ids(self) -> Sequence[int]:
        return list(self._detokenizer.output_token_ids)

    def feed(self, piece: Piece) -> tuple[Piece, RequestOutput | None]:
        """The piece as it counts (cut after the token that completed a stop string), and what to show of it."""
        piece = self._stopped(piece) if self._stops else self._read(piece)
        ids = piece.ids.tolist()
        if self._top and ids:
            rows = logprob_rows(piece)
            self._logprobs.update_from_output(EngineCoreOutput(self._request_id, ids, new_logprobs=rows))
        finish = None if piece.finish is None else _FINISH.get(piece.finish, FinishReason.ERROR)
        return piece, self._state.make_request_output(ids, None, finish, piece.stop_reason)

    def _read(self, piece: Piece) -> Piece:
        self._detokenizer.update(piece.ids.tolist(), piece.finish is Finish.STOP)
        return piece

    def _stopped(self, piece: Piece) -> Piece:
        """Token by token, so that nothing after a stop string counts as generated."""
        last = len(piece.ids) - 1
        for place, token in enumerate(piece.ids):
            stop = self._detokenizer.update([token], place == last and piece.finish is Finish.STOP)
            if stop is not None:
                kept = slice(0, place + 1)
                top = None if piece.top is None else piece.top[kept]
                cut = {"ids": piece.ids[kept], "logprobs": piece.logprobs[kept], "top": top}
                return replace(piece, finish=Finish.STOP, stop_reason=stop, error=None, **cut)
        return piece


def logprob_rows(piece: Piece) -> LogprobsLists:
    """As the engine core gives them: at each position the sampled token first, then the likeliest."""
    if piece.top is None:
        ids = np.array(piece.ids, dtype=np.int64)[:, None]
        return LogprobsLists(ids, np.array(piece.logprobs, dtype=np.float32)[:, None], np.ones(len(ids), np.int64))
    rows = [_row(*position) for position in zip(piece.ids, piece.logprobs, piece.top, strict=True)]
    ranks = np.array([position.rank for position in piece.top])
    return LogprobsLists([np.array(row[0]) for row in rows], [np.array(row[1]) for row in rows], ranks)


def _row(token: int, logprob: float, top: TopLogprobs) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A sampled token outside the likeliest comes last among them; it leads here in any case."""
    end = -1 if top.ids and top.ids[-1] == token else None
    return (token, *top.ids[:end]), (logprob, *top.logprobs[:end])
