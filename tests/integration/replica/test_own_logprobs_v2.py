"""The recorder of vLLM's second model runner, whose kernels need a GPU, on stand-ins that change logits as it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from seamless_verl.replica.own_logprobs import HIDDEN, LABELS, PROCESSED, LogprobRecorderV2, split_rank
from seamless_verl.trajectory.records import Grammar

pytestmark = pytest.mark.integration
VOCABULARY = 64


class Grammars:
    def apply_grammar_bitmask(self, logits: Any, input_batch: Any, grammar_req_ids: Any, grammar_bitmask: Any) -> None:
        for req_id, words in zip(grammar_req_ids, grammar_bitmask, strict=True):
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
            logits[input_batch.req_ids.index(req_id), ~torch.from_numpy(allowed)] = -torch.inf


class Greedy:
    """Samples the likeliest token after a bias, and computes logprobs of the biased logits at the temperature."""

    def __init__(self) -> None:
        self.requests: dict[int, SamplingParams] = {}

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: SamplingParams) -> None:
        self.requests[req_idx] = sampling_params

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        processed = logits.clone()
        for row, req_idx in enumerate(input_batch.idx_mapping_np):
            params = self.requests[int(req_idx)]
            for token, bias in (params.logit_bias or {}).items():
                processed[row, token] += bias
            processed[row] /= params.temperature
        sampled = processed.argmax(-1)
        tensors: LogprobsTensors = Sampler.gather_logprobs(processed.log_softmax(-1), 2, sampled)
        return SimpleNamespace(sampled_token_ids=sampled[:, None], logprobs_tensors=tensors)


def mask(*allowed: int) -> list[int]:
    bits = np.zeros(VOCABULARY, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32).tolist()


def test_rows_that_were_changed_get_the_models_own_logprobs() -> None:
    runner = SimpleNamespace(sampler=Greedy(), structured_outputs_worker=Grammars())
    LogprobRecorderV2(runner, PROCESSED)
    labelled = {LABELS: True}
    params = [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, logit_bias={3: 50.0}),
        SamplingParams(temperature=0.5, extra_args=labelled),
        SamplingParams(extra_args=labelled),
        SamplingParams(extra_args=labelled),
        SamplingParams(),
    ]
    names, places = list("abcdef"), np.array([7, 2, 0, 5, 4, 1])
    for place, one in zip(places, params, strict=True):
        runner.sampler.add_request(int(place), 3, one)
    logits = torch.randn(len(params), VOCABULARY, generator=torch.Generator().manual_seed(1))
    own = (logits / torch.tensor([one.temperature for one in params])[:, None]).log_softmax(-1)
    batch = SimpleNamespace(req_ids=names, idx_mapping_np=places, num_draft_tokens=0)
    masks = {"c": mask(5, 6), "e": mask(40), "d": [-1, -1], "f": mask(8, 9, 10)}
    runner.structured_outputs_worker.apply_grammar_bitmask(
        logits, batch, list(masks), np.array(list(masks.values()), np.int32)
    )
    output = runner.sampler(logits, batch)
    sampled, tensors = output.sampled_token_ids[:, 0], output.logprobs_tensors
    assert sampled[1] == 3 and sampled[2] in (5, 6) and sampled[4] == 40 and sampled[5] in (8, 9, 10)
    assert torch.allclose(tensors.logprobs[:, 0], own.gather(1, sampled[:, None])[:, 0])
    assert torch.allclose(tensors.logprobs[:, 1:], own.topk(2).values)
    ranks, labels = zip(*(split_rank(rank) for rank in tensors.selected_token_ranks.tolist()), strict=True)
    assert labels == (Grammar.NONE, Grammar.NONE, Grammar.CHOSEN, Grammar.NONE, Grammar.FORCED, Grammar.NONE)
    assert ranks == tuple((own >= own.gather(1, sampled[:, None])).sum(1).tolist())
    hidden = (tensors.logprob_token_ids[:, 1:] == HIDDEN).any(1).tolist()
    assert hidden == [label > 0 and rank <= 2 for label, rank in zip(labels, ranks, strict=True)]
    again = runner.sampler(own.clone(), batch)  # no grammar in this step
    assert [split_rank(rank)[1] for rank in again.logprobs_tensors.selected_token_ranks.tolist()] == [Grammar.NONE] * 6


def test_a_stage_that_does_not_sample_is_left_alone() -> None:
    LogprobRecorderV2(SimpleNamespace(sampler=None, structured_outputs_worker=None), PROCESSED)
