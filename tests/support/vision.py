"""A vision model of half a million random weights, made in seconds: BLIP-2 around the nano model's shape."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    AutoConfig,
    AutoTokenizer,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

PIXELS = 32
IMAGE_TOKENS = 4


def make_vision_model(nano: Path, folder: Path) -> Blip2ForConditionalGeneration:
    """Writes the model with its processor to `folder`; returns it in fp32. `nano` is a folder of the nano model."""
    tokenizer, text = AutoTokenizer.from_pretrained(nano), AutoConfig.from_pretrained(nano)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    text.vocab_size = max(text.vocab_size, image_token + 1)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    vision = Blip2VisionConfig(**small, num_hidden_layers=1, image_size=PIXELS, patch_size=PIXELS // 2)
    bridge = Blip2QFormerConfig(**small, num_hidden_layers=2, encoder_hidden_size=64, vocab_size=text.vocab_size)
    config = Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=bridge.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=image_token,
    )
    model = Blip2ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    images = BlipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    Blip2Processor(image_processor=images, tokenizer=tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
    return model
