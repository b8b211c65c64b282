"""The model's own logprobs, recorded in vLLM's workers whatever constrained the sampling.

The trainer computes log_softmax(logits / temperature) of the whole vocabulary; vLLM's logprobs come after a grammar has
masked the logits, and in its mode `processed_logprobs`, verl's default, after every other sampling parameter too. These
hooks keep the logits of such requests as the model made them, and write the model's own logprobs in place of vLLM's.
They run on the device and wait for nothing. A step without such a request passes through.

A request that asks for it (`LABELS` in its extra arguments) also learns how far a grammar chose each of its tokens: the
sampled token's rank carries the label above `RANK_BITS`. Its entry among the likeliest tokens, which would hide that
rank, gets the id `HIDDEN`. Each of vLLM's two model runners has a recorder here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.sampler import Sampler

from seamless_verl.trajectory.records import Grammar

LABELS = "seamless_labels"
"""In SamplingParams.extra_args: whether the ranks of this request carry labels."""
RANK_BITS = 28  # a rank is at most the size of the vocabulary; with two bits of label it fits into 31
HIDDEN = -1  # no token's id
GREEDY = 1e-5  # vLLM samples greedily below this temperature, and computes logprobs at 1
MODES = PROCESSED, RAW = ("processed_logprobs", "raw_logprobs")
Labels: TypeAlias = NDArray[np.int64]


def alters(params: SamplingParams, mode: str) -> bool:
    """Whether, without a grammar, vLLM's logprobs of this request differ from the model's own."""
    if mode == RAW:  # before all parameters, the temperature too
        return effective_temperature(params) != 1.0
    return bool(
        params.top_p < 1
        or params.top_k > 0
        or params.min_p > 0
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.min_tokens > 0
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.thinking_token_budget is not None
    )


def effective_temperature(params: SamplingParams) -> float:
    return 1.0 if params.temperature < GREEDY else params.temperature


def grammar_labels(bitmask: NDArray[np.int32]) -> Labels:
    """The label of each row of a bitmask int32 [rows, words], which has a bit for each token that is allowed."""
    used = bitmask != 0
    word = np.take_along_axis(bitmask, used.argmax(1)[:, None], 1)[:, 0].view(np.uint32)
    one_allowed = (used.sum(1) == 1) & (word & (word - np.uint32(1)) == 0)
    masked = (bitmask != -1).any(1)
    return np.where(one_allowed, Grammar.FORCED, np.where(masked, Grammar.CHOSEN, Grammar.NONE)).astype(np.int64)


def split_rank(rank: int) -> tuple[int, Grammar]:
    """The rank of a sampled token, and its label."""
    return rank & ((1 << RANK_BITS) - 1), Grammar(rank >> RANK_BITS)


@dataclass(frozen=True)
class KeptRow:
    """A position whose logits were kept: its row in the logits, where it is in the output, temperature and label."""

    logits_row: int
    request: int  # its index in the batch
    offset: int  # 0, or the number of drafts before it
    temperature: float
    label: int = 0


@dataclass(frozen=True)
class KeptLogits:
    """`logits` [rows, vocabulary] of `rows`, as the model made them."""

    rows: Sequence[KeptRow]
    logits: torch.Tensor

    @classmethod
    def copy(cls, rows: Sequence[KeptRow], logits: torch.Tensor) -> KeptLogits:
        return cls(rows, logits[column([row.logits_row for row in rows], torch.int64, logits)])

    def write_into(self, output: Any) -> None:
        """Writes the model's own logprobs and the labels over those of vLLM's sampler output."""
        if (recorded := output.logprobs_tensors) is None:
            return
        width = output.sampled_token_ids.shape[1]
        at = column([row.request * width + row.offset for row in self.rows], torch.int64, self.logits)
        temperatures = column([row.temperature for row in self.rows], torch.float32, self.logits)
        labels = column([row.label for row in self.rows], torch.int64, self.logits)
        sampled = output.sampled_token_ids.flatten()[at].clamp(min=0).to(torch.int64)  # -1: a rejected draft
        logprobs = self.logits.float().div(temperatures[:, None]).log_softmax(-1)
        own = Sampler.gather_logprobs(logprobs, recorded.logprobs.shape[1] - 1, sampled)
        ids, again = own.logprob_token_ids, own.logprob_token_ids == sampled[:, None]
        again[:, 0] = False
        ids = ids.masked_fill(again & (labels > 0)[:, None], HIDDEN)
        recorded.logprob_token_ids[at] = ids.to(recorded.logprob_token_ids.dtype)
        recorded.logprobs[at] = own.logprobs
        ranks = own.selected_token_ranks + (labels << RANK_BITS)
        recorded.selected_token_ranks[at] = ranks.to(recorded.selected_token_ranks.dtype)


def column(values: Sequence[float], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """The values on the device of `like`, copied there without waiting."""
    return torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda).to(like.device, non_blocking=True)


@dataclass(frozen=True)
class Wanted:
    """What a request's parameters say about its rows."""

    temperature: float
    always: bool
    """also where no grammar masks"""
    labels: bool

    @classmethod
    def of(cls, params: SamplingParams, mode: str, *, own_processors: bool = False) -> Wanted:
        """`own_processors`: the engine has logits processors that are not vLLM's."""
        labels = bool((params.extra_args or {}).get(LABELS))
        return cls(effective_temperature(params), alters(params, mode) or own_processors, labels)

    def row(self, logits_row: int, request: int, offset: int, label: int) -> KeptRow:
        return KeptRow(logits_row, request, offset, self.temperature, label if self.labels else 0)


class LogprobRecorder:
    """For vLLM's first model runner (`GPUModelRunner`, on CPUs too), which keeps logits between two methods.

    Owned state: the running requests whose rows are always kept, and the logits of the current step.
    """

    covers_drafts = True  # rows of speculative decoding too

    def __init__(self, runner: Any, mode: str) -> None:
        self.runner, self.mode = runner, mode
        processors = runner.input_batch.logitsprocs
        self.own_processors = mode == PROCESSED and any(
            type(processor) not in BUILTIN_LOGITS_PROCESSORS
            for processor in (*processors.argmax_invariant, *processors.non_argmax_invariant)
        )
        self.always: set[str] = set()
        self.kept: KeptLogits | None = None
        self.vllm_sample_tokens, self.vllm_sample = runner.sample_tokens, runner._sample
        runner.sample_tokens, runner._sample = self.sample_tokens, self.sample

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.runner.execute_model_state
        self.kept = None if state is None else self.keep(state.scheduler_output, state.logits, grammar_output)
        return self.vllm_sample_tokens(grammar_output)

    def sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        output = self.vllm_sample(logits, spec_decode_metadata)
        if self.kept is not None:
            self.kept.write_into(output)
            self.kept = None
        return output

    def keep(self, scheduled: Any, logits: torch.Tensor, grammar_output: Any) -> KeptLogits | None:
        """Copies the rows of this step that vLLM is about to change."""
        if self.always:
            self.always &= self.runner.requests.keys()
        for new in scheduled.scheduled_new_reqs:
            if new.sampling_params is not None and self.wanted(new.sampling_params).always:
                self.always.add(new.req_id)
        drafts = scheduled.scheduled_spec_decode_tokens
        labels = {} if grammar_output is None else labels_by_request(grammar_output, drafts)
        if not labels and not self.always:
            return None
        rows = list(self.rows(labels, drafts))
        with torch.inference_mode():
            return KeptLogits.copy(rows, logits) if rows else None

    def rows(self, labels: Mapping[str, Labels], drafts: Mapping[str, Sequence[int]]) -> Iterator[KeptRow]:
        """Rows to keep. A request has a row for each of its drafts in the logits, and one more."""
        req_ids = self.runner.input_batch.req_ids
        counts = [1 + len(drafts.get(req_id, ())) for req_id in req_ids]
        begins, none = np.cumsum([0, *counts]).tolist(), int(Grammar.NONE)
        for index, (req_id, (begin, end)) in enumerate(zip(req_ids, pairwise(begins), strict=True)):
            if (found := labels.get(req_id)) is None and req_id not in self.always:
                continue
            wanted = self.wanted(self.runner.requests[req_id].sampling_params)
            for offset in range(end - begin):
                label = none if found is None else int(found[offset])
                if label != none or wanted.always:
                    yield wanted.row(begin + offset, index, offset, label)

    def wanted(self, params: SamplingParams) -> Wanted:
        return Wanted.of(params, self.mode, own_processors=self.own_processors)


def labels_by_request(grammar_output: Any, drafts: Mapping[str, Sequence[int]]) -> dict[str, Labels]:
    """The labels of each request under a grammar, one for each of its drafts and one more; none if nothing masks."""
    req_ids, labels = list(grammar_output.structured_output_request_ids), grammar_labels(grammar_output.grammar_bitmask)
    ends = np.cumsum([1 + len(drafts.get(req_id, ())) for req_id in req_ids])
    parts = zip(req_ids, np.split(labels, ends[:-1]), strict=True) if req_ids else ()
    return {req_id: part for req_id, part in parts if part.any()}


class LogprobRecorderV2:
    """For vLLM's second model runner, whose sampler leaves the logits as they were, but for a grammar's mask.

    Owned state: what the requests want, by their index in the runner, and the masked rows of the current step.
    """

    covers_drafts = False  # its rejection sampler computes logprobs by itself

    def __init__(self, runner: Any, mode: str) -> None:
        self.mode = mode
        self.wanted: dict[int, Wanted] = {}
        self.masked: dict[int, tuple[int, torch.Tensor]] = {}
        if runner.sampler is None:  # only the last stage of a pipeline samples
            return
        self.vllm_add_request = runner.sampler.add_request
        runner.sampler.add_request = self.add_request
        runner.sampler.__class__ = recording(type(runner.sampler), self)
        if (grammars := runner.structured_outputs_worker) is not None:
            self.vllm_apply = grammars.apply_grammar_bitmask
            grammars.apply_grammar_bitmask = self.apply_grammar_bitmask

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: SamplingParams) -> None:
        self.vllm_add_request(req_idx, prompt_len, sampling_params)
        self.wanted[req_idx] = Wanted.of(sampling_params, self.mode)

    def apply_grammar_bitmask(
        self, logits: torch.Tensor, input_batch: Any, grammar_req_ids: list[str], grammar_bitmask: NDArray[np.int32]
    ) -> None:
        self.masked = {}
        if input_batch.num_draft_tokens == 0 and grammar_req_ids:
            labels, index = grammar_labels(grammar_bitmask).tolist(), {r: i for i, r in enumerate(input_batch.req_ids)}
            rows = {index[req_id]: label for req_id, label in zip(grammar_req_ids, labels, strict=True) if label}
            copies = logits[column(list(rows), torch.int64, logits)] if rows else ()
            self.masked = {row: (label, copy) for (row, label), copy in zip(rows.items(), copies, strict=True)}
        self.vllm_apply(logits, input_batch, grammar_req_ids, grammar_bitmask)

    def sampled(self, output: Any, logits: torch.Tensor, input_batch: Any) -> Any:
        """The sampler's output for these logits, corrected."""
        masked, self.masked = self.masked, {}
        rows, kept = list[KeptRow](), list[torch.Tensor]()
        for row, req_idx in enumerate(input_batch.idx_mapping_np.tolist()):
            wanted = self.wanted.get(req_idx)
            if wanted is not None and (wanted.always or row in masked):
                label, copy = masked.get(row, (int(Grammar.NONE), logits[row]))
                rows.append(wanted.row(row, row, 0, label))
                kept.append(copy)
        if rows:
            KeptLogits(rows, torch.stack(kept)).write_into(output)
        return output


def recording(sampler_class: type[Any], recorder: LogprobRecorderV2) -> type[Any]:
    """The sampler's class, which gives its output to the recorder; a call of an object is looked up in its class."""

    class OwnLogprobsSampler(sampler_class):  # type: ignore[misc]
        def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
            return recorder.sampled(super().__call__(logits, input_batch), logits, input_batch)

    return OwnLogprobsSampler


def record_own_logprobs(worker: Any) -> LogprobRecorder | LogprobRecorderV2:
    """Installs the recorder in a worker's model runner; ValueError if the engine does not record logprobs."""
    config = worker.vllm_config.model_config
    if config.logprobs_mode not in MODES:
        problem = f"actor_rollout_ref.rollout.logprobs_mode={config.logprobs_mode} gives no logprobs to train with"
        raise ValueError(f"{problem}. Set it to one of {', '.join(MODES)}")
    kind = LogprobRecorderV2 if getattr(worker, "use_v2_model_runner", False) else LogprobRecorder
    return kind(worker.model_runner, config.logprobs_mode)
