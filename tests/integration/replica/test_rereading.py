"""A prompt's logprobs are of the temperature that its request names, on stand-ins of both of vLLM's model runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.sampler import Sampler

from seamless_verl.replica.rereading import TEMPERATURE, ReadingTemperature

pytestmark = pytest.mark.integration
LOGITS = torch.tensor([[1.0, 2.0, 4.0]])
WARM = SamplingParams(prompt_logprobs=0, extra_args={TEMPERATURE: 2.0})


class FirstRunner:
    def __init__(self) -> None:
        self.sampler, self.num_prompt_logprobs = Sampler(), dict[str, int]()
        self.requests = {"reread": SimpleNamespace(sampling_params=WARM)}

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: Any) -> Any:
        return self.sampler.compute_logprobs(hidden_states)


class Prompts:
    def __init__(self) -> None:
        self.requests = list[str]()

    def add_request(self, req_id: str, req_idx: int, sampling_params: SamplingParams) -> None:
        self.requests.append(req_id)

    def compute_prompt_logprobs(self, logits_fn: Any, hidden_states: Any) -> Any:
        return logits_fn(hidden_states).log_softmax(-1)


def test_of_the_first_runner_alone_while_it_reads() -> None:
    runner = FirstRunner()
    ReadingTemperature(SimpleNamespace(model_runner=runner, use_v2_model_runner=False))
    assert torch.equal(runner._get_prompt_logprobs_dict(LOGITS, {}), LOGITS.log_softmax(-1))
    runner.num_prompt_logprobs = {"reread": 0}
    assert torch.equal(runner._get_prompt_logprobs_dict(LOGITS, {}), (LOGITS / 2).log_softmax(-1))
    assert torch.equal(runner.sampler.compute_logprobs(LOGITS), LOGITS.log_softmax(-1)), "what is sampled"


def test_of_the_second_runner() -> None:
    prompts = Prompts()
    ReadingTemperature(
        SimpleNamespace(model_runner=SimpleNamespace(prompt_logprobs_worker=prompts), use_v2_model_runner=True)
    )
    prompts.add_request("reread", 0, WARM)
    prompts.add_request("another", 1, SamplingParams())
    read = prompts.compute_prompt_logprobs(lambda hidden: hidden * 2, LOGITS)
    assert torch.equal(read, LOGITS.log_softmax(-1)) and prompts.requests == ["reread", "another"]


def test_only_the_last_stage_of_a_pipeline_has_logprobs() -> None:
    runner = SimpleNamespace(prompt_logprobs_worker=None)
    ReadingTemperature(SimpleNamespace(model_runner=runner, use_v2_model_runner=True))
