"""verl makes one placeholder of each image for the processors that we say, and lets no engine write one."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from verl.workers.rollout.utils import get_vision_placeholder_token_ids, qwen2_5_vl_dedup_image_tokens
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from seamless_verl.replica.server import collapsed_by
from seamless_verl.runtime.pictures import takes_recorded_prompts

TEXT, IMAGE, VIDEO = 1, 8, 9


def processor(name: str) -> Any:
    return SimpleNamespace(image_processor=type(name, (), {})(), image_token_id=IMAGE, video_token_id=VIDEO)


def names() -> list[str]:
    """Of all image processors of transformers."""
    given = IMAGE_PROCESSOR_MAPPING_NAMES.values()
    found = [list(one.values()) if isinstance(one, dict) else one for one in given]
    return sorted({name for one in found for name in ([one] if isinstance(one, str) else one) if name})


def test_the_processors_that_are_said_are_those_for_which_verl_does_it() -> None:
    ids, once = [TEXT, IMAGE, IMAGE, IMAGE, TEXT], [TEXT, IMAGE, TEXT]
    taken = [name for name in names() if takes_recorded_prompts(processor(name))]
    assert "Qwen2VLImageProcessor" in taken and len(taken) < len(names()) / 2
    for name in names():
        expected = once if name in taken else ids
        assert list(qwen2_5_vl_dedup_image_tokens(ids, processor(name))) == expected
        assert collapsed_by(processor(name))(ids) == expected
    assert not takes_recorded_prompts(None) and not takes_recorded_prompts(SimpleNamespace())


def test_verl_bars_placeholders_from_what_its_engines_sample() -> None:
    assert get_vision_placeholder_token_ids(processor("Qwen2VLImageProcessor")) == [IMAGE, VIDEO]
    assert '"banned_token_ids": get_vision_placeholder_token_ids(' in inspect.getsource(vLLMHttpServer.run_server)
