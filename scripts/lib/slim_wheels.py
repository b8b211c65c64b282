"""Makes wheels small for one kind of card: code that it does not run is zeroed, what no check opens is left out.

A CUDA library carries its kernels once for each architecture, in "fat binaries" within its file: a header of 16 bytes
(magic number, version, its own size, the size of the entries), then entries, each with a header that names its kind (1:
PTX, 2: machine code), its own size, its payload's size and, 28 bytes in, the architecture (90 for compute capability
9.0). NVIDIA does not document this: it was found in vLLM's libraries, which ran on an H100 after it. Zeros keep every
offset, and compress well. A card runs machine code of its generation (the same first number) that is not newer than
itself. Where there is none, the driver compiles PTX that is not newer. One entry of these stays.

A slim wheel is compressed by LZMA, which pip reads.
"""

from __future__ import annotations

import struct
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

MAGIC, VERSION = struct.pack("<I", 0xBA55ED50), 1
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
ARCHITECTURE_AT, PTX, MACHINE_CODE = 28, 1, 2

# Of the packages of requirements/gpu.lock: what is for other programs, other Pythons or a browser.
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/*/include/*",
    "*.cpython-31[0134]-*.so",
    "ray/jars/*",
    "ray/cpp/*",
    "ray/dashboard/client/*",
    "xgrammar/lib/*.a",
    "plotly/labextension/*",
    "plotly/package_data/*.js",
    "plotly-*.data/data/*",
    "mistral_common/data/*",
)
# vLLM takes version 3 on 9.x
HOPPER, NOT_ON_HOPPER = 90, ("vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/third_party/fmha_sm100/*")


class Entry(NamedTuple):
    """One of a fat binary: what its payload is, the architecture that it was built for, and where it lies."""

    kind: int
    built_for: int
    begin: int
    end: int


def without_other_cards(library: bytes, architecture: int) -> bytes:
    """The library with the payloads zeroed that a card of `architecture` does not take."""
    data, at = bytearray(library), 0
    while (at := data.find(MAGIC, at)) >= 0:
        entries = entries_at(library, at)
        taken = taken_by(architecture, entries)
        for entry in entries:
            if entry != taken:
                data[entry.begin : entry.end] = bytes(entry.end - entry.begin)
        at = entries[-1].end if entries else at + len(MAGIC)
    return bytes(data)


def entries_at(library: bytes, at: int) -> list[Entry]:
    """The entries of the fat binary at `at`; none if these bytes only look like one."""
    if at + HEADER.size > len(library):
        return []
    _, version, header, size = HEADER.unpack_from(library, at)
    end, found = at + header + size, list[Entry]()
    if version != VERSION or header != HEADER.size or end > len(library):
        return []
    at += header
    while at < end:
        if at + ARCHITECTURE_AT + 4 > end:
            return []
        kind, _, own, payload = ENTRY.unpack_from(library, at)
        (built_for,) = struct.unpack_from("<I", library, at + ARCHITECTURE_AT)
        if own <= ARCHITECTURE_AT or at + own + payload > end:
            return []
        found.append(Entry(kind, built_for, at + own, at + own + payload))
        at += own + payload
    return found


def taken_by(architecture: int, entries: list[Entry]) -> Entry | None:
    """The entry that the driver takes: the newest machine code that the card runs, or PTX to compile."""
    older = [entry for entry in entries if entry.built_for <= architecture]
    code = [entry for entry in older if entry.kind == MACHINE_CODE and entry.built_for // 10 == architecture // 10]
    ptx = [entry for entry in older if entry.kind == PTX]
    return max(code or ptx, key=lambda entry: entry.built_for, default=None)


def left_out(name: str, architecture: int) -> bool:
    patterns = (*LEFT_OUT, *NOT_ON_HOPPER) if architecture == HOPPER else LEFT_OUT
    return any(fnmatch(name, pattern) for pattern in patterns)


def slim(wheel: Path, architecture: int) -> None:
    """Rewrite a wheel in place."""
    slimmer = wheel.with_suffix(".slim")
    try:
        rewrite(wheel, slimmer, architecture)
        slimmer.replace(wheel)
    finally:
        slimmer.unlink(missing_ok=True)


def rewrite(wheel: Path, slimmer: Path, architecture: int) -> None:
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(slimmer, "w", zipfile.ZIP_LZMA) as kept:
        for member in whole.infolist():
            if left_out(member.filename, architecture):
                continue
            content = whole.read(member)
            if member.filename.endswith(".so") and MAGIC in content:
                content = without_other_cards(content, architecture)
            kept.writestr(member, content, zipfile.ZIP_LZMA)
