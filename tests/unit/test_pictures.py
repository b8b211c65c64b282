"""The drawn pictures of the documents are those that their source draws."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from support.modules import load_file
from support.pages import DOCS

from seamless_verl.tools.compare.store import write_table

IMAGES = DOCS / "images"


def source() -> ModuleType:
    return load_file(IMAGES / "concepts.py")  # type: ignore[no-any-return]


def test_the_pictures_are_what_their_source_draws() -> None:
    pictures = source()
    drawn = {f"{name}.svg": pictures.draw(name) for name in pictures.PICTURES}
    assert drawn == {file.name: file.read_text(encoding="utf-8") for file in IMAGES.glob("concepts_*.svg")}
    for picture in drawn.values():
        assert ElementTree.fromstring(picture)[0].tag.endswith("title")


def test_nothing_is_drawn_outside_of_a_picture() -> None:
    pictures = source()
    for name in pictures.PICTURES:
        root = ElementTree.fromstring(pictures.draw(name))
        for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
            right = float(shape.get("x", "0")) + float(shape.get("width", "0"))
            assert right <= pictures.WIDTH


def test_a_comparison_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark for each arm's speed against the first one's, and a thick line for each arm's rewards."""
    monkeypatch.syspath_prepend(str(IMAGES))
    results = load_file(IMAGES / "results.py")
    arms = [("sync", 100.0), ("seamless", 150.0)]
    run = {"seed": 1, "round": 1}
    write_table(tmp_path / "runs.parquet", [{"arm": arm, **run, "tokens_per_s": speed} for arm, speed in arms])
    steps = [
        {"arm": arm, **run, "at_s": 5.0 * n, "reward": n / 9, "validation": None} for arm, _ in arms for n in range(9)
    ]
    write_table(tmp_path / "steps.parquet", steps)
    results.main(str(tmp_path), str(tmp_path / "results.svg"))
    drawn = (tmp_path / "results.svg").read_text()
    root = ElementTree.fromstring(drawn)
    assert "150  x 1.50" in drawn and "40 s" in drawn
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert sum(line.get("stroke-width") == "3" for line in lines) == len(arms)
