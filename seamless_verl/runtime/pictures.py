"""Reads image files as models get them, alike in the gateway, in engines and in rows."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What the real services take; of an animation the first picture is seen."""
COLLAPSED = "Qwen2VLImageProcessor"  # part of the class names of Qwen2-VL's, Qwen2.5-VL's and Qwen3-VL's


def takes_recorded_prompts(processor: Any) -> bool:
    """Whether an engine reads a recorded prompt beside its images as it was recorded, by the model's processor.

    vLLM puts an image's placeholders in the place of the first one that it finds, so that each image's must be made one
    before. verl's function for that knows these processors alone: of others vLLM would add placeholders.
    """
    return COLLAPSED in type(getattr(processor, "image_processor", None)).__name__


def picture_of(data: bytes) -> Image.Image:
    """The picture in a file: RGB, what is transparent on white; an error of PIL for a file that is none."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    image.load()
    if image.mode == "RGB":
        return image
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
