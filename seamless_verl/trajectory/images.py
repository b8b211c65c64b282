"""Images in prompts: where their placeholders are, and which image each stands for.

The placeholders of all images have equal token ids. So a prompt is compared with others by *keyed* ids, in which the
first placeholder of each image has a number of that image, below 0: equal images have equal numbers, and no others.
A placeholder that no image has is that of a text, which an agent sent or a model wrote.

A request on record names its images, and where they are, under KEY; the files are kept by their digests beside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GATEWAY_KEY = "gateway"  # of a stored request: the gateway's own fields, which find its call again
KEY = "images"  # among these
DIGEST = "sha256"  # of a part of a stored message that is an image: names the file


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: its placeholders' first place and number, in tokens, and the sha256 of its file, in hex."""

    start: int
    length: int
    digest: str


def images_of(request: Mapping[str, Any]) -> tuple[PromptImage, ...]:
    """The images of a stored request's prompt, in their order."""
    return tuple(PromptImage(*place) for place in request.get(GATEWAY_KEY, {}).get(KEY, ()))


def stored_images(images: Iterable[PromptImage]) -> list[list[int | str]]:
    """The images as a stored request has them."""
    return [[image.start, image.length, image.digest] for image in images]


@dataclass(eq=False)
class ImageKeys:
    """The numbers of a session's images: -1 of the first, -2 of the second, with the placeholder that each replaces
    and how many it has."""

    _numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)  # by digest, placeholder and length
    _images: list[tuple[str, int, int]] = field(default_factory=list)

    def keyed(self, ids: array[int], images: Sequence[PromptImage]) -> array[int]:
        """The prompt's ids, int32 [P], with the number of each image at its first placeholder."""
        if not images:
            return ids
        keyed = ids[:]
        for image in images:
            known = (image.digest, ids[image.start], image.length)
            if known not in self._numbers:
                self._images.append(known)
                self._numbers[known] = -len(self._images)
            keyed[image.start] = self._numbers[known]
        return keyed

    def restored(self, keyed: array[int]) -> array[int]:
        """The ids that were keyed, as the model reads them."""
        if not self._images:
            return keyed
        ids = keyed[:]
        for place in self.places(keyed):
            ids[place] = self._images[-1 - keyed[place]][1]
        return ids

    def digests(self, keyed: Iterable[int]) -> tuple[str, ...]:
        """The digests of the images among keyed ids, in their order."""
        return tuple(self._images[-1 - number][0] for number in keyed if number < 0) if self._images else ()

    def first_without_image(self, keyed: array[int]) -> int | None:
        """Where the first placeholder is that no image has; None where each is an image's."""
        if not self._images:
            return None
        ids = np.array(keyed)
        for place in self.places(keyed):
            ids[place : place + self._images[-1 - keyed[place]][2]] = keyed[place]
        found = np.flatnonzero(np.isin(ids, [placeholder for _, placeholder, _ in self._images]))
        return int(found[0]) if len(found) else None

    def places(self, keyed: Iterable[int]) -> list[int]:
        """Where images begin among keyed ids."""
        return [place for place, number in enumerate(keyed) if number < 0] if self._images else []
