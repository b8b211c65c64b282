"""Images in requests: taken out of the body, checked, and named there by their digests.

A body names an image, in the form of its API, as base64 in an address `data:` or in an Anthropic source. vLLM's classes
get an address of our own in its place, which the renderer reads; the file goes beside the request. An address on the
network is refused: the gateway fetches nothing for an agent, which could reach what only this host can.
"""

from __future__ import annotations

import binascii
import io
import pickle
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from PIL import Image

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.runtime.pictures import FORMATS, picture_of
from seamless_verl.trajectory.images import DIGEST, PromptImage

MAX_BYTES, MAX_PIXELS = 20 << 20, 1 << 26
"""Of one file, and of its picture: one of few bytes may have pixels for gigabytes of memory."""
REFERENCE = "data:image/x-recorded;base64,"  # followed by the digest
IMAGE, ADDRESS, INPUT_IMAGE = "image", "image_url", "input_image"
WAY_OUT = f"Give a file of the format {', '.join(FORMATS)} as base64"


@dataclass
class TakenImages:
    """The files of a request's images by their digests; `param` is the field of the body that is named in errors."""

    param: str
    files: dict[str, bytes] = field(default_factory=dict)

    def take(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """The part with our address in place of its image; raises ApiError for one that cannot be taken."""
        source = part.get("source")
        if isinstance(source, Mapping):
            if source.get("type") != "base64":
                raise self._refused(ErrorCode.UNSUPPORTED, f"an image as {source.get('type')!r} is not fetched")
            digest = self._add(source.get("data"))
            return {**part, "source": {"type": "base64", "media_type": "image/x-recorded", "data": digest}}
        given = part.get(ADDRESS)
        address = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(address, str):
            raise self._refused(ErrorCode.MALFORMED, "an image has no address")
        head, comma, data = address.partition(",")
        if not head.startswith("data:"):
            raise self._refused(ErrorCode.UNSUPPORTED, f"an image at the address {address[:100]!r} is not fetched")
        if not comma or not head.endswith(";base64"):
            raise self._refused(ErrorCode.MALFORMED, f"an image's address {head[:100]!r} has no base64")
        digest = self._add(data)
        kept = {name: value for name, value in part.items() if name != "uuid"}  # the digest is its name
        if part.get("type") == INPUT_IMAGE:
            kept.setdefault("detail", "auto")  # which vLLM's class asks for, and the real service does not
        own = REFERENCE + digest
        return {**kept, ADDRESS: {**given, "url": own} if isinstance(given, Mapping) else own}

    def _add(self, text: object) -> str:
        if not isinstance(text, str):
            raise self._refused(ErrorCode.MALFORMED, "an image has no data")
        if len(text) > MAX_BYTES * 4 // 3 + 4:
            size = f"{len(text) * 3 / 4 / (1 << 20):.1f} MiB"
            raise self._refused(ErrorCode.TOO_LARGE, f"an image has {size}, and at most {MAX_BYTES >> 20} are taken")
        try:
            data = b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self._refused(ErrorCode.MALFORMED, f"an image's data is no base64: {error}") from error
        digest = sha256(data).hexdigest()
        if digest not in self.files:
            self._check(data)
            self.files[digest] = data
        return digest

    def _check(self, data: bytes) -> None:
        """Decodes it once, so that no engine gets what cannot be read."""
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                pixels = image.width * image.height
                if pixels > MAX_PIXELS:
                    most = f"{image.width} x {image.height} pixels, and at most {MAX_PIXELS} are taken"
                    raise self._refused(ErrorCode.OUT_OF_BOUNDS, f"an image has {most}")
            picture_of(data)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            reason = f"an image of {len(data)} bytes cannot be read: {type(error).__name__}"
            raise self._refused(ErrorCode.MALFORMED, reason) from error

    def _refused(self, code: ErrorCode, reason: str) -> ApiError:
        return ApiError(code, f"{self.param}: {reason}. {WAY_OUT}", param=self.param)


def digest_in(part: object) -> str | None:
    """The digest in a part of a message whose image was taken; None for any other part."""
    given = part.get(ADDRESS) if isinstance(part, Mapping) else None
    address = given.get("url") if isinstance(given, Mapping) else given
    return address.removeprefix(REFERENCE) if isinstance(address, str) and address.startswith(REFERENCE) else None


def with_parts(messages: Sequence[Any], files: Mapping[str, bytes] | None = None) -> list[Any]:
    """The messages with parts of pictures, from these `files`, for vLLM; without files, as they are recorded."""

    def changed(part: Any) -> Any:
        if (digest := digest_in(part)) is None:
            return part
        if files is None:
            return {"type": IMAGE, DIGEST: digest}
        return {"type": "image_pil", "image_pil": picture_of(files[digest]), "uuid": digest}

    return [_with_content(message, changed) for message in messages]


def _with_content(message: Any, change: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(digest_in(part) for part in content):
        return message
    return {**message, "content": [change(part) for part in content]}


def digests_in(messages: Iterable[Any]) -> list[str]:
    """The digests of all images of these messages, in their order."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [digest for part in parts if (digest := digest_in(part)) is not None]


class PackedPicture:
    """A file that becomes its picture where it is unpickled: a file is a tenth of its pixels, or less."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return picture_of, (self.data,)


def packed_images(images: Sequence[PromptImage], files: Mapping[str, bytes]) -> bytes:
    """The images as an engine's request has them; the digest names each in its caches."""
    if not images:
        return b""
    digests = [image.digest for image in images]
    pictures = [PackedPicture(files[digest]) for digest in digests]
    return pickle.dumps({"multi_modal_data": {IMAGE: pictures}, "multi_modal_uuids": {IMAGE: digests}})
