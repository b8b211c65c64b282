"""A Qwen2.5-VL of half a million random weights, made in seconds, with its processor; and pictures."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from pathlib import Path

import torch
from PIL import Image
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from seamless_verl.platform.without_torchvision import take_images_without_torchvision
from seamless_verl.tiny.tokenizer import END_OF_TURN, PAD, make_tokenizer, token_id

PATCH, MERGE = 14, 2
SIDE = PATCH * MERGE  # pixels of an image's side that are one token
MAX_IMAGE_TOKENS = 16
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_PART = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT_PART = "{{- part.text -}}"


def make_qwen_vision(folder: Path, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Writes the model with its processor to `folder`; returns it in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    take_images_without_torchvision()
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    assert TEXT_PART in tokenizer.chat_template
    with_images = "{%- if part.type == 'image' -%}" + IMAGE_PART + "{%- else -%}" + TEXT_PART + "{%- endif -%}"
    tokenizer.chat_template = tokenizer.chat_template.replace(TEXT_PART, with_images)
    start, end, image, video = (tokenizer.convert_tokens_to_ids(mark) for mark in MARKS)
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
    text |= {"bos_token_id": None, "eos_token_id": token_id(END_OF_TURN), "pad_token_id": token_id(PAD)}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "fullatt_block_indexes": [1], "window_size": 112}
    config = Qwen2_5_VLConfig(
        text_config=text | {"dtype": "float32"},
        vision_config=vision,
        **{"image_token_id": image, "video_token_id": video, "vision_start_token_id": start},
        vision_end_token_id=end,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    model.generation_config = GenerationConfig(eos_token_id=token_id(END_OF_TURN), pad_token_id=token_id(PAD))
    model.save_pretrained(folder)
    most = MAX_IMAGE_TOKENS * SIDE * SIDE
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": SIDE * SIDE, "longest_edge": most}
    )
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    processor = Qwen2_5_VLProcessor.from_pretrained(folder)
    processor.chat_template = tokenizer.chat_template
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    return model


@lru_cache
def picture(color: str, width: int = 2 * SIDE, height: int = SIDE, form: str = "PNG") -> bytes:
    """An image file of one colour, of `width * height / SIDE^2` tokens."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, form)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
