"""The report's page in a headless Chromium without a network: every plot is drawn, and no error is reported."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.browser import paths
from support.comparison import comparison, frontier

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.page import page

pytestmark = pytest.mark.integration
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"),
    *("--window-size=1280,2600", "--virtual-time-budget=15000", "--enable-logging=stderr", "--v=0"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name is found: what is loaded from elsewhere would be missing
)


@pytest.fixture(scope="module")
def chromium() -> str:
    return paths()[0]


def browse(chromium: str, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    profile = f"--user-data-dir={file.parent / 'profile'}"
    return subprocess.run(
        [chromium, *OPTIONS, profile, *options, file.as_uri()], capture_output=True, text=True, timeout=180, check=True
    )


@pytest.mark.parametrize(("found", "count"), [(comparison(), 7), (frontier(), 9)], ids=["arms", "frontier"])
def test_every_plot_is_drawn_within_its_card(chromium: str, tmp_path: Path, found: Comparison, count: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(found), encoding="utf-8")
    done = browse(chromium, file, "--dump-dom")
    plots = re.findall(r'<div id="plot-\d+" class="plotly-graph-div.*?(?=<div id="plot-|<h2>)', done.stdout, re.DOTALL)
    assert len(plots) == count and all('class="main-svg"' in plot for plot in plots)
    widths = [int(width) for plot in plots for width in re.findall(r'class="main-svg"[^>]*? width="(\d+)"', plot)]
    assert widths and all(300 < width < 620 for width in widths)  # two cards beside each other in 1,280 pixels
    drawn = [len(re.findall(r'class="(?:point|js-line|points)', plot)) for plot in plots]
    assert all(count > 0 for count in drawn)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert errors == []


def test_a_script_that_fails_would_be_seen(chromium: str, tmp_path: Path) -> None:
    """The check above looks at what the browser reports, which must be something."""
    file = tmp_path / "report.html"
    file.write_text(page(comparison()).replace("<main>", "<main><script>no_such_name()</script>", 1), encoding="utf-8")
    done = browse(chromium, file, "--dump-dom")
    assert any("CONSOLE" in line and "no_such_name" in line for line in done.stderr.splitlines())


def test_the_page_of_an_interrupted_comparison_says_so(chromium: str, tmp_path: Path) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(page(comparison(interrupted=True)), encoding="utf-8")
    browse(chromium, file, f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000
