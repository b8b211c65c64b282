"""Draws the pictures of docs/concepts.md as SVG, with the standard library alone: `python docs/images/concepts.py`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, MARGIN = 860, 16
INK, GREY = "#1f2430", "#6b7280"
CONTEXT, TRAIN, SWITCH, SYNC, IDLE = "#e5e7eb", "#f2b8a0", "#fde68a", "#c4b5fd", "#f3f4f6"
V3, V4, V5 = "#a7d8c5", "#9cc4f0", "#f4b6d2"
TOKEN = 2.25  # width of a token


def text(x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, words: str = "", *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="{GREY}"{dash}/>'
    return shape + (text(x + width / 2, y + height / 2 + 5, words, anchor="middle") if words else "")


def line(points: Iterable[tuple[float, float]], *, colour: str = GREY, dashed: bool = False) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'


def tokens(x: float, y: float, parts: Iterable[tuple[int, str, str]]) -> tuple[float, str]:
    """Runs of tokens side by side, each a number, a colour and words; returns where they end."""
    shapes = []
    for number, colour, words in parts:
        shapes.append(box(x, y, number * TOKEN, 26, colour, words))
        x += number * TOKEN
    return x, "".join(shapes)


def tree() -> tuple[int, list[str]]:
    """The session of docs/trajectories.md: three calls, a weight update in the second, a fork in the third."""
    left, shapes = 90.0, []
    opening = [(41, CONTEXT, "context"), (60, V3, "reply 1, v3")]
    second = [*opening, (18, CONTEXT, "tool"), (44, V3, "v3")]
    rows = [
        ("call 1", opening),
        ("call 2", [*second, (44, V4, "reply 2, v4")]),
        ("call 3", [*second, (24, V4, "v4"), (49, CONTEXT, "other text"), (42, V4, "reply 3, v4")]),
    ]
    for number, (name, parts) in enumerate(rows):
        y = 44 + 40 * number
        shapes += [text(MARGIN, y + 18, name), tokens(left, y, parts)[1]]
    shapes.append(text(MARGIN, 28, "Each call, as the engine read and wrote it", colour=GREY))
    shapes.append(text(MARGIN, 190, "The tree of their longest common prefixes", colour=GREY))
    trunk, drawn = tokens(left, 204, [*second, (24, V4, "v4")])
    shapes.append(drawn)
    ends = [tokens(trunk + 30, 204, [(20, V4, "v4")]), tokens(trunk + 30, 250, [(49, CONTEXT, ""), (42, V4, "v4")])]
    for y, (end, drawn) in zip((204, 250), ends, strict=True):
        name = "sequence 1" if y == 204 else "sequence 2"
        shapes += [line([(trunk, 217), (trunk + 15, 217), (trunk + 15, y + 13), (trunk + 30, y + 13)]), drawn]
        shapes.append(text(end + 8, y + 18, name))
    note = "Grey is read only. Each coloured token is trained once: here those before the fork with sequence 1."
    shapes.append(text(MARGIN, 304, note, colour=GREY))
    return 320, shapes


def versions() -> tuple[int, list[str]]:
    """A call that two weight updates cut, beside the trainer's steps."""
    left, shapes = 110.0, [text(MARGIN, 28, "Time goes to the right; vN are weights of version N", colour=GREY)]
    steps = [("trains step 4", 200, ""), ("trains step 5", 230, "commits v4"), ("trains step 6", 220, "commits v5")]
    x, commits = left, []
    shapes.append(text(MARGIN, 72, "trainer"))
    for words, width, commit in steps:
        if commit:
            commits.append(x)
            shapes.append(text(x + 4, 46, commit, colour=GREY))
        shapes.append(box(x, 54, width, 28, TRAIN, words))
        x += width
    for at in commits:
        shapes.append(line([(at, 36), (at, 206)], dashed=True))
    lanes = [("replica 0", 104, (14.0, 14.0)), ("replica 1", 150, (34.0, 34.0))]
    for name, y, delays in lanes:
        shapes.append(text(MARGIN, y + 19, name))
        begins = [left, *(at + delay + 14 for at, delay in zip(commits, delays, strict=True))]
        stops = [*(at + delay for at, delay in zip(commits, delays, strict=True)), x]
        for begin, stop, colour, version in zip(begins, stops, (V3, V4, V5), ("v3", "v4", "v5"), strict=True):
            shapes.append(box(begin, y, stop - begin, 28, colour, version))
        shapes += [box(stop, y, 14, 28, SYNC) for stop in stops[:-1]]
    begun, ended = left + 70, commits[1] + 110
    shapes.append(text(MARGIN, 215, "one call"))
    first, second = commits[0] + 14, commits[1] + 14
    for begin, stop, colour, words in (
        (begun, first, V3, "v3"),
        (first + 14, second, V4, "v4"),
        (second + 14, ended, V5, "v5"),
    ):
        shapes.append(box(begin, 196, stop - begin, 28, colour, words))
    shapes += [box(at, 196, 14, 28, IDLE, dashed=True) for at in (first, second)]
    shapes.append(text(ended + 8, 215, "ends"))
    note = "Trained in step 7, which begins with v6, its v3 tokens have staleness 3, its v4 tokens 2, its v5 tokens 1."
    shapes.append(text(MARGIN, 252, note, colour=GREY))
    return 268, shapes


def devices() -> tuple[int, list[str]]:
    """One step of the multiplexed layout: who trains, generates, switches and loads."""
    left, width = 190.0, WIDTH - 190.0 - MARGIN
    kinds = {"rollout": V4, "switch": SWITCH, "train": TRAIN, "sync": SYNC}
    shapes, x = [text(MARGIN, 28, "A step of the multiplexed layout", colour=GREY)], left + 80
    for name, colour in kinds.items():
        shapes += [box(x, 16, 16, 16, colour), text(x + 22, 29, name)]
        x += 100
    lent = [("rollout", 0.30), ("switch", 0.03), ("train", 0.24), ("switch", 0.03), ("rollout", 0.14)]
    both = [*lent, ("switch", 0.03), ("train", 0.15), ("sync", 0.03), ("rollout", 0.05)]
    alone = [("rollout", 0.95), ("sync", 0.03), ("rollout", 0.02)]
    lanes = [("device 0: train, rollout", both), ("device 1: train, rollout", both), ("device 2: rollout", alone)]
    for number, (name, spans) in enumerate(lanes):
        x, y = left, 48 + 40 * number
        shapes.append(text(MARGIN, y + 19, name))
        for kind, share in spans:
            shapes.append(box(x, y, share * width, 28, kinds[kind], kind if share > 0.1 else ""))
            x += share * width
    note = "Between two computations of a step the trainer's devices generate, where it is worth two hand-overs."
    shapes.append(text(MARGIN, 188, note, colour=GREY))
    return 204, shapes


PICTURES = {
    "concepts_tree": ("A session's calls, and the tree that they make", tree),
    "concepts_versions": ("A call that goes on over two weight updates", versions),
    "concepts_devices": ("What each device does in a step of the multiplexed layout", devices),
}


def draw(name: str) -> str:
    """The picture as a file's text."""
    title, picture = PICTURES[name]
    height, shapes = picture()
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    for picture_name in PICTURES:
        (HERE / f"{picture_name}.svg").write_text(draw(picture_name), encoding="utf-8")
