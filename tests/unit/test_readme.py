"""What the documents show is what the commands print, their links resolve, and the table of settings has them all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from support.journal import call_ended, call_started, chunk_appended, write
from support.pages import DOCS, PAGES, page_name
from support.paths import ROOT

from seamless_verl.cli.main import main, make_parser
from seamless_verl.config.composing import HERE
from seamless_verl.journal import (
    GroupDecided,
    GroupOutcome,
    HandedOver,
    HandOverBegun,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
)

TRAJECTORIES, LAYOUTS, SETTINGS = DOCS / "trajectories.md", DOCS / "layouts.md", DOCS / "settings.md"
FOLDERS = ("docker", "docs", "patches", "recipes", "requirements", "scripts", "seamless_verl", "tests")
MARKDOWN = [*sorted(ROOT.glob("*.md")), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]
PLACEHOLDER = re.compile(r"\b(SEEN|TODO|TBD|FIXME)\b")
README_LINES = 110
CUT, NEXT = "9f2c41d07a5be3c8", "e8d3307f4c16a952"
OPENED = datetime.fromisoformat("2026-11-21T12:19:51+00:00").timestamp()
TIMES = re.compile(r"\d{4}-\d\d-\d\dT[\d:+]+(\s+\w+$)?")  # by the reader's clock and zone


def recorded(journal: SqliteJournal) -> None:
    """A weight update cuts the second call of a session; the third does not repeat all of the second's reply."""
    one, two, three = (f"{CUT}.{number}" for number in (1, 2, 3))
    prompt, reply, result = [1] * 41, [2] * 60, [3] * 18
    first, later = [4] * 44, [5] * 44
    whole = [*prompt, *reply, *result, *first, *later]
    write(journal, SessionOpened(CUT, "7d1e0b9c-3f52-4a06-b1d7-20c5a94f8e63", {}, OPENED))
    write(journal, call_started(CUT, one, prompt), chunk_appended(reply, one, 3, "replica-0"), call_ended(one))
    write(journal, call_started(CUT, two, [*prompt, *reply, *result]), chunk_appended(first, two, 3, "replica-0"))
    write(journal, chunk_appended(later, two, 4, "replica-1"), call_ended(two))
    write(
        journal,
        call_started(CUT, three, [*whole[:187], *[6] * 49]),
        chunk_appended([7] * 42, three, 4, "replica-0"),
        call_ended(three),
    )
    write(journal, RewardPosted(CUT, "reward", 1.0), SessionClosed(CUT, "finished"))
    limits = {"limits": {"max_sequence": 1024}}
    write(journal, HandOverBegun(CUT, limits), HandedOver(CUT, OPENED + 60, {"kept": True}))
    trained = {"policy": "train_all", "version": 4}
    write(journal, GroupDecided("7d1e0b9c-3f52-4a06-b1d7-20c5a94f8e63", GroupOutcome.TRAINED, 5, trained))
    write(journal, SessionOpened(NEXT, "b490d2f7-86ae-4c1b-9e35-7fd1064ba8c2", {}, OPENED + 104))
    write(journal, call_started(NEXT, f"{NEXT}.1"), chunk_appended([8] * 33, f"{NEXT}.1", 4, "replica-1"))


def shown() -> str:
    [block] = re.findall(r"^```\n(SESSION .*?)```$", TRAJECTORIES.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(block)


def lines(text: str) -> list[str]:
    return [" ".join(TIMES.sub("", line).split()) for line in text.splitlines() if line.strip()]


def test_the_example_is_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SqliteJournal(tmp_path / "trajectories.sqlite") as journal:
        recorded(journal)
        for arguments in (["ls", str(journal.path)], ["show", str(journal.path), CUT[:4]]):
            assert main(["trajectories", *arguments]) == 0
    printed, expected = lines(capsys.readouterr().out), lines(shown())
    cut = {line: line.removesuffix("...") for line in expected if line.endswith("...")}  # long ones, on the page
    assert [line[: len(cut.get(of, line))] for line, of in zip(printed, expected, strict=True)] == [
        cut.get(of, of) for of in expected
    ]


def keys(node: Mapping[str, object], prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from keys(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}"


def test_every_setting_is_in_the_table() -> None:
    settings = yaml.safe_load((HERE / "seamless.yaml").read_text(encoding="utf-8"))
    listed = re.findall(r"^\| `(seamless\.[\w.]+)` \| ", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(keys(settings, "seamless"))


def test_the_plan_works_as_it_is_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    page = LAYOUTS.read_text(encoding="utf-8")
    [command] = re.findall(r"^seamless-verl (plan (?!--optimize)(?:.*\\\n)*.*)$", page, re.MULTILINE)
    [expected] = re.findall(r"^```\n(multiplexed: .*?)```$", page, re.MULTILINE | re.DOTALL)
    assert main(shlex.split(command.replace("\\\n", ""))) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("multiplexed: 3 machines, 24 devices\n")
    assert lines(printed) == lines(expected)


def test_the_commands_that_search_layouts_have_the_options_they_are_given() -> None:
    page = LAYOUTS.read_text(encoding="utf-8")
    commands = re.findall(r"^seamless-verl ((?:plan --optimize|calibrate) (?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        args = make_parser().parse_args(shlex.split(command.replace("\\\n", ""), comments=True))
        assert args.run


def anchor(heading: str) -> str:
    """The heading's anchor on its page, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8"))
    targets = [((page.parent / path).resolve() if path else page, part) for path, part in links]
    assert [str(path) for path, _ in targets if not path.exists()] == []
    for path, part in targets:
        headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE) if part else []
        assert not part or part in map(anchor, headings), f"{path.name} has no heading #{part}"


def test_no_page_has_a_placeholder() -> None:
    assert set(PAGES) <= set(MARKDOWN)
    found = {str(page.relative_to(ROOT)): PLACEHOLDER.findall(page.read_text(encoding="utf-8")) for page in MARKDOWN}
    assert {page: words for page, words in found.items() if words} == {}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_settings_in_the_readme_have_their_defaults() -> None:
    rows = re.findall(r"^\| `(seamless\.[\w.]+)` \| `(.+?)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    known = re.findall(r"^\| `(seamless\.[\w.]+)` \| [^|]+ \| `(.+?)` \|", SETTINGS.read_text(), re.MULTILINE)
    assert len(rows) == 10
    assert set(rows) <= set(known)
