"""Images as the gateway sends them, on a real engine: the placeholders of a recorded prompt are those that it reads."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from support.qwen_vision import MARKS, make_qwen_vision, picture
from support.vllm_engine import Engine, started
from transformers import AutoProcessor
from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens

from seamless_verl.gateway.images import packed_images
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.worker_extension import extension_name
from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.runtime.pictures import picture_of
from seamless_verl.trajectory.images import PromptImage
from seamless_verl.trajectory.records import Finish, TokenChunk

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
FILES = {color: picture(color, 56, height) for color, height in (("red", 28), ("blue", 28), ("green", 56))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("vision")
    return folder, make_qwen_vision(folder)


@pytest.fixture(scope="module", params=["safetensors", "dummy"])
def engine(model: tuple[Path, Any], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One that read the weights from their files, and one that began with random ones and was sent them."""
    cores = sorted(os.sched_getaffinity(0))
    options = {"skip_tokenizer_init": False, "load_format": request.param, "worker_extension_cls": extension_name()}
    options["limit_mm_per_prompt"] = {"video": 0}  # vLLM 0.24 would start with one, which needs torchvision
    with started(model[0], cores=cores, devices=[len(cores) - 1], **options) as engine:
        if request.param == "dummy":
            engine.run(engine.update({name: weight.detach() for name, weight in model[1].named_parameters()}, 1))
        yield engine


@pytest.mark.parametrize("shown", [["red"], ["blue"], ["red", "green"], ["red", "red"]], ids="-".join)
def test_the_logprobs_of_a_call_are_those_of_its_images(
    engine: Engine, model: tuple[Path, Any], shown: list[str]
) -> None:
    """The second prompt has the ids of the first, of which the cache must not be used."""
    folder, hugging = model
    processor = AutoProcessor.from_pretrained(folder)
    start, end, pad, _ = (processor.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS)
    ids: list[int] = []
    images: list[PromptImage] = []
    for color in shown:
        length = 4 if color == "green" else 2
        images.append(PromptImage(len(ids) + 1, length, sha256(FILES[color]).hexdigest()))
        ids += [start, *[pad] * length, end, *b"what is it? " * 4]
    files = {sha256(data).hexdigest(): data for data in FILES.values()}
    source = AsyncLLMSource(engine.llm, 0, collapsed=partial(qwen2_5_vl_dedup_image_tokens, processor=processor))
    fields = {"max_tokens": 8, "ignore_eos": True, "allowed_token_ids": list(range(256))}

    async def run() -> list[TokenChunk]:
        request = EngineRequest("-".join(shown), array("i", ids), fields, media=packed_images(images, files))
        return [chunk async for chunk in source.generate(request)]

    chunks = engine.run(run())
    assert chunks[-1].finish_reason is Finish.LENGTH, chunks[-1]
    said = [token for chunk in chunks for token in chunk.ids]
    expected = expected_logprobs(processor, hugging, shown, ids, said)
    assert [value for chunk in chunks for value in chunk.logprobs] == pytest.approx(expected, abs=2e-3)


def expected_logprobs(processor: Any, model: Any, shown: list[str], ids: list[int], said: list[int]) -> list[float]:
    pictures = [picture_of(FILES[color]) for color in shown]
    inputs = dict(processor.image_processor(pictures, return_tensors="pt"))
    whole = torch.tensor([[*ids, *said]])
    kinds = (whole == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), mm_token_type_ids=kinds, **inputs).logits
    table = logits[0, -len(said) - 1 : -1].log_softmax(-1)
    return [float(table[place, token]) for place, token in enumerate(said)]
