"""The agents page says with which versions agents and environments were tried: those that their tests install."""

from __future__ import annotations

import re

from support.paths import ROOT

PAGE = ROOT / "docs" / "agents.md"
LISTS = ("requirements/cpu.lock", "requirements/agents.lock", "recipes/*/requirements.txt")
ROW = re.compile(r"^\| [^|]+ \| `([\w-]+)` ([\d.]+)[^|]* \| \[[^\]]+\]\(\.\./(tests/[\w/.]+)\) \|", re.MULTILINE)


def test_each_version_that_was_tried_is_one_that_its_test_installs() -> None:
    section = PAGE.read_text().split("## What was tried\n")[1].split("\n## ")[0]
    rows = ROW.findall(section)
    assert len(rows) == section.count("\n| ") - 1, "each row has a package, its version and its test"
    pinned = {line for name in LISTS for path in ROOT.glob(name) for line in path.read_text().splitlines()}
    for package, version, test in rows:
        assert f"{package}=={version}" in pinned
        assert (ROOT / test).exists()
