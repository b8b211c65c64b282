"""Wheels for one kind of card: which code of a CUDA library stays, and which files of a wheel."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.modules import load_file
from support.paths import ROOT

PTX, CODE = 1, 2
slim_wheels = load_file(ROOT / "scripts/lib/slim_wheels.py")


def fat(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (kind, architecture, payload), with entry headers of 64 bytes as CUDA 13 writes them."""
    body = b""
    for kind, architecture, payload in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
        body += header.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_what_the_card_runs_keeps_its_bytes() -> None:
    ours, other, source = b"ours" * 9, b"other" * 7, b"ptx" * 11
    library = b"\x7fELF before" + fat((CODE, 80, other), (CODE, 90, ours), (PTX, 90, source)) + b"after"
    slim = slim_wheels.without_other_cards(library, 90)
    assert len(slim) == len(library) and slim.startswith(b"\x7fELF before") and slim.endswith(b"after")
    assert ours in slim and other not in slim and source not in slim
    assert slim_wheels.without_other_cards(slim, 90) == slim


@pytest.mark.parametrize(
    ("card", "built", "kept"),
    [
        (89, [(CODE, 80), (CODE, 86), (PTX, 80)], (CODE, 86)),
        (90, [(CODE, 80), (PTX, 80), (PTX, 90), (PTX, 100)], (PTX, 90)),
        (103, [(CODE, 100), (CODE, 120), (PTX, 80)], (CODE, 100)),
        (86, [(CODE, 89), (CODE, 90)], None),
    ],
)
def test_a_card_runs_older_code_of_its_generation_and_else_older_ptx(card: int, built: Any, kept: Any) -> None:
    payloads = {entry: f"{entry}".encode() * 5 for entry in built}
    slim = slim_wheels.without_other_cards(fat(*((*entry, payload) for entry, payload in payloads.items())), card)
    assert [entry for entry, payload in payloads.items() if payload in slim] == ([kept] if kept else [])


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_bytes_that_only_look_like_a_fat_binary_stay(before: bytes, after: bytes) -> None:
    """The magic number may occur by chance, also at the end of the file, and with a size beyond it."""
    whole = fat((CODE, 80, b"x" * 30))
    nothing = bytearray(whole)
    nothing[20:32] = bytes(12)  # an entry without a size
    large = bytearray(whole)
    large[24:32] = b"\xff" * 8  # one that ends beyond the file
    chances = (b"", whole[:20], slim_wheels.MAGIC, slim_wheels.MAGIC + b"\xff" * 12, bytes(nothing), bytes(large))
    for library in (*(before + chance + after for chance in chances), before + slim_wheels.MAGIC):
        assert slim_wheels.without_other_cards(library, 90) == library


def test_a_slim_wheel_is_installed_by_pip(tmp_path: Path) -> None:
    wheel = tmp_path / "ray-1-py3-none-any.whl"
    info = "Metadata-Version: 2.1\nName: ray\nVersion: 1\n"
    names = ("ray/__init__.py", "ray/jars/large.jar", "ray/_raylet.so")
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("ray/__init__.py", "X = 1\n")
        made.writestr("ray/jars/large.jar", "java")
        made.writestr("ray/_raylet.so", fat((CODE, 80, b"x" * 4000), (CODE, 90, b"kept")))
        made.writestr("ray-1.dist-info/METADATA", info)
        made.writestr("ray-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr("ray-1.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    slim_wheels.slim(wheel, 90)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True)
    library = (tmp_path / "site/ray/_raylet.so").read_bytes()
    assert (tmp_path / "site/ray/__init__.py").exists() and not (tmp_path / "site/ray/jars").exists()
    assert b"kept" in library and b"xxxx" not in library


def test_a_wheel_that_could_not_be_rewritten_is_as_it_was(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1-py3-none-any.whl"
    wheel.write_bytes(b"no archive")
    with pytest.raises(zipfile.BadZipFile):
        slim_wheels.slim(wheel, 90)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"no archive"]


@pytest.mark.parametrize("card", [90, 100])
def test_flash_attention_2_goes_where_vllm_takes_version_3(card: int) -> None:
    assert slim_wheels.left_out("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", card) is (card == 90)
    assert not slim_wheels.left_out("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", card)
