"""Makes wheels small for one kind of card: code for other cards is zeroed, what a check never opens is left out.

A CUDA library carries its kernels once for each architecture, in "fat binaries" within its file: a header of 16 bytes
(magic number, version, its own size, the size of the entries), then entries, each with a header that names its kind (1:
PTX, 2: machine code), its own size, its payload's size and, 28 bytes in, the architecture (90 for compute capability
9.0). NVIDIA does not document this; it was read off vLLM's libraries, which ran on an H100 after it. Zeros keep every
offset, and compress to nothing. The driver takes the entry of its own architecture and never reads the others. PTX
goes too. The driver would compile it where machine code is missing, so such a kernel fails on this card.

A slim wheel is compressed by LZMA, which pip reads.
"""

from __future__ import annotations

import struct
import zipfile
from fnmatch import fnmatch
from pathlib import Path

MAGIC, VERSION = struct.pack("<I", 0xBA55ED50), 1
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
ARCHITECTURE_AT, MACHINE_CODE = 28, 2

# Of the packages of requirements/gpu.lock: what is for other programs, other Pythons or a browser.
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/*/include/*",
    "vllm/third_party/fmha_sm100/*",
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
FLASH_ATTENTION_2 = "vllm/vllm_flash_attn/_vllm_fa2_C*"  # vLLM takes version 3 on 9.x


def without_other_cards(library: bytes, architecture: int) -> bytes:
    """The library with the payloads of all entries zeroed that are not machine code for `architecture`."""
    data, at = bytearray(library), 0
    while (at := data.find(MAGIC, at)) >= 0:
        _, version, header, size = HEADER.unpack_from(data, at)
        end = at + header + size
        if version != VERSION or header != HEADER.size or end > len(data):
            at += len(MAGIC)  # these bytes are something else
            continue
        entry = at + header
        while entry < end:
            kind, _, own, payload = ENTRY.unpack_from(data, entry)
            (built_for,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
            if (kind, built_for) != (MACHINE_CODE, architecture):
                data[entry + own : entry + own + payload] = bytes(payload)
            entry += own + payload
        at = end
    return bytes(data)


def left_out(name: str, architecture: int) -> bool:
    patterns = (*LEFT_OUT, FLASH_ATTENTION_2) if architecture == 90 else LEFT_OUT
    return any(fnmatch(name, pattern) for pattern in patterns)


def slim(wheel: Path, architecture: int) -> None:
    """Rewrite a wheel in place."""
    slimmer = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(slimmer, "w", zipfile.ZIP_LZMA) as kept:
        for member in whole.infolist():
            if left_out(member.filename, architecture):
                continue
            content = whole.read(member)
            if member.filename.endswith(".so") and MAGIC in content:
                content = without_other_cards(content, architecture)
            kept.writestr(member, content, zipfile.ZIP_LZMA)
    slimmer.replace(wheel)
