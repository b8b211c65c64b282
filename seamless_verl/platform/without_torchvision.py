"""Loads processors of image models where torchvision is not installed: it has no build for the host's torch on PyPI.

transformers gives the processor of such a model a part for videos, which needs torchvision, and refuses to make the
processor without that part. Images need no torchvision. So the part is made a class that takes no video.

vLLM's code of Qwen's models takes a function from a module of transformers that imports torchvision. The module that
transformers itself falls back to, of the same processor with PIL, has the same function, and takes its place. vLLM 0.24
also names the class of their part for videos, which stands in a module of its own.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from seamless_verl.platform.adaptation import VIDEO_CLASS, VIDEO_LOADER, WITHOUT_TORCHVISION

MODALITY = "video_processor"
NEEDS_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
OF_VIDEOS, QWENS_CLASS = "transformers.models.qwen2_vl.video_processing_qwen2_vl", "Qwen2VLVideoProcessor"
WITH_PIL = WITHOUT_TORCHVISION.symbol.partition(":")[0]


def take_images_without_torchvision() -> None:
    """Lets transformers load processors in this process; may be called again.

    With torchvision changes nothing, nor with a transformers that has no processors with PIL.

    Raises:
        HostMovedError: transformers has moved what it touches.
    """
    if find_spec("torchvision") is not None or find_spec(WITH_PIL) is None:
        return
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.models.auto import video_processing_auto

    class NoVideos(ImageProcessingMixin):  # type: ignore[misc]
        """The part for videos of a processor that takes none."""

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> NoVideos:
            return cls()

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise ImportError("a model is given a video, and torchvision is not installed. Install it, or give images")

    classes: Any = VIDEO_CLASS.find()
    if classes.get(MODALITY) not in ("BaseVideoProcessor", ImageProcessingMixin.__name__):
        raise VIDEO_CLASS.moved(str(classes.get(MODALITY)))
    VIDEO_LOADER.find()
    WITHOUT_TORCHVISION.find()
    sys.modules.setdefault(NEEDS_TORCHVISION, importlib.import_module(WITH_PIL))
    of_videos = ModuleType(OF_VIDEOS)
    setattr(of_videos, QWENS_CLASS, NoVideos)
    sys.modules.setdefault(OF_VIDEOS, of_videos)
    classes[MODALITY] = ImageProcessingMixin.__name__
    video_processing_auto.AutoVideoProcessor = NoVideos
