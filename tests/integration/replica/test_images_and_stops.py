"""Calls with images and with stop strings, on a real engine: updated, cut and resumed like all others."""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.engine_requests import RunningRequest
from support.vision import IMAGE_TOKENS, PIXELS, make_vision_model
from support.vllm_engine import Engine, redrawn, started
from transformers import AutoProcessor, AutoTokenizer

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.trajectory.records import Finish, TokenChunk

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("vision")
    return folder, make_vision_model(nano / "model", folder)


@pytest.fixture(scope="module")
def engine(model: tuple[Path, Any]) -> Iterator[Engine]:
    cores = sorted(os.sched_getaffinity(0))
    with started(model[0], cores=cores, devices=[len(cores) - 1], skip_tokenizer_init=False) as engine:
        yield engine


def picture(color: str) -> Image.Image:
    return Image.new("RGB", (PIXELS, PIXELS), color)


def media(color: str) -> bytes:
    return pickle.dumps({"multi_modal_data": {"image": [picture(color)]}})


def expected(folder: Path, model: Any, color: str, generated: list[int]) -> torch.Tensor:
    """The log-probabilities [N, vocabulary] that the model gives for these tokens after the image and the prompt."""
    pixels = AutoProcessor.from_pretrained(folder).image_processor(picture(color), return_tensors="pt")["pixel_values"]
    ids = torch.tensor([model.config.image_token_index] * IMAGE_TOKENS + PROMPT + generated)[None]
    with torch.no_grad():
        logits = model(pixel_values=pixels, input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return logits[-len(generated) - 1 : -1].log_softmax(-1)


def test_calls_with_images_have_the_version_of_each_token(engine: Engine, model: tuple[Path, Any]) -> None:
    folder, first = model
    second, weights = redrawn(first, 1)
    colors = ("red", "blue")

    async def scenario() -> list[RunningRequest]:
        source = AsyncLLMSource(engine.llm, version=0)
        text = list(range(first.config.image_token_index))  # transformers takes no further image token
        calls = [
            RunningRequest(source, color, PROMPT, 400, media=media(color), allowed_token_ids=text) for color in colors
        ]
        for call in calls:
            await call.produced(20)
        await source.pause(PauseMode.KEEP)
        await engine.update(weights, bucket_mb=16, caches=False)
        await engine.llm.reset_mm_cache()  # in the order of the server's own update
        await engine.llm.reset_encoder_cache()
        await source.commit(1)
        await source.resume()
        for call in calls:
            await call.task
        return calls

    for color, call in zip(colors, engine.run(scenario()), strict=True):
        ids, versions = call.column("ids"), call.column("version")
        assert call.finish is Finish.LENGTH and set(versions) == {0, 1}
        tables = [expected(folder, one, color, ids) for one in (first, second)]
        found = [tables[version][i, ids[i]].item() for i, version in enumerate(versions)]
        assert call.column("logprobs") == pytest.approx(found, abs=2e-3)
        other = expected(folder, first, colors[color == "red"], ids)
        own = [version == 0 for version in versions]
        wrong = torch.tensor([other[i, ids[i]].item() for i in range(len(ids)) if own[i]])
        assert (wrong - torch.tensor(found)[own]).abs().max() > 0.05, "the image would make no difference"


@pytest.mark.parametrize(
    ("before", "resumed", "stop", "finish", "generated"),
    [
        ("12", 2, "23", Finish.STOP, 1),
        ("12", 2, "2333", Finish.STOP, 3),
        ("12", 1, "12", Finish.LENGTH, 8),
        ("12", 0, "23", Finish.LENGTH, 8),
        ("", 0, "333", Finish.STOP, 3),
    ],
    ids=["over the cut", "long after it", "before it", "begins in the prompt", "never cut"],
)
def test_a_stop_string_is_found_over_a_cut(
    engine: Engine, model: tuple[Path, Any], before: str, resumed: int, stop: str, finish: Finish, generated: int
) -> None:
    """The model can say nothing but 3."""
    source, tokenizer = AsyncLLMSource(engine.llm, version=0), AutoTokenizer.from_pretrained(model[0])
    (three,), earlier = tokenizer.encode("3"), tokenizer.encode(before)
    fields = {"max_tokens": 8, "ignore_eos": True, "allowed_token_ids": [three], "stop": [stop]}

    async def run() -> list[TokenChunk]:
        request = EngineRequest(stop + before, array("i", PROMPT + earlier), fields, resumed)
        return [chunk async for chunk in source.generate(request)]

    chunks = engine.run(run())
    assert chunks[-1].finish_reason is finish and chunks[-1].stop_reason in (stop, None)
    assert [token for chunk in chunks for token in chunk.ids] == [three] * generated
