"""The documents as a site: `scripts/docs` builds it, with every page and no link that leads nowhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.long]
PAGES = sorted(ROOT.glob("docs/*.md"))


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "scripts/docs", site], capture_output=True, text=True, timeout=300, check=False, cwd=root
    )


def test_the_site_has_every_page(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert [page.stem for page in PAGES if not (tmp_path / "site/docs" / page.stem / "index.html").is_file()] == []
    menu = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert [page.stem for page in PAGES if f'href="docs/{page.stem}/"' not in menu] == []


def test_a_link_that_leads_nowhere_fails(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    assert build(ROOT, tmp_path / "site").returncode == 0  # makes the environment
    (tmp_path / "clone/.venv-docs").symlink_to(ROOT / ".venv-docs")
    page = tmp_path / "clone/docs/layouts.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[nowhere](none.md)\n", encoding="utf-8")
    built = build(tmp_path / "clone", tmp_path / "site")
    assert built.returncode != 0
    assert "none.md" in built.stderr
