"""The drawn pictures of the documents are those that their source draws."""

from __future__ import annotations

from types import ModuleType
from xml.etree import ElementTree

from support.modules import load_file
from support.pages import DOCS

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
