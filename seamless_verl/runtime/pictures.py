"""Reads image files as models get them, alike in the gateway, in engines and in rows."""

from __future__ import annotations

import io
import warnings

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What the real services take; of an animation the first picture is seen."""


def picture_of(data: bytes) -> Image.Image:
    """The picture in a file: RGB, what is transparent on white; an error of PIL for a file that is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the gateway has a bound of its own
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
    if image.mode == "RGB":
        return image
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
