"""The view of a real run: opened while the run trains, gone when it has ended, and opened again from its folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.browser import Browser, opened
from support.paths import RECIPES
from support.view import served

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = 5
SHORT = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "data.val_max_samples=8",
    "algorithm.rollout_correction.bypass_mode=false",
    "seamless.view=127.0.0.1:0",
)
ADDRESS = "The view of this run: "
KIND = "several_versions"
LIMIT_S = 300.0


def test_a_session_is_followed_to_the_update_that_cut_it_during_and_after_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with training(tmp_path, log) as run:
        wait_for(lambda: ADDRESS in log.read_text(errors="replace"), run, log)
        (address,) = re.findall(rf"{ADDRESS}(\S+)", log.read_text(errors="replace"))
        wait_for(lambda: has_a_cut_session(address), run, log)
        with opened() as browser:
            follow(browser, address, "running")
        assert run.wait(LIMIT_S) == 0, log.read_text(errors="replace")[-4000:]
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)
    assert log.read_text(errors="replace").count(ADDRESS) == 1 and "goes on without" not in log.read_text(
        errors="replace"
    )
    (journal,) = (tmp_path / "data").rglob("trajectories.sqlite")
    with served(journal.parent) as address, opened() as browser:
        follow(browser, address, "ended")
        check_overview(browser, address)


@contextmanager
def training(folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The tool agent's recipe after a short warm start; ended with the block if it has not."""
    own = {"PYTHON": sys.executable, "VERL_PLATFORM": "cpu", "DATA": str(folder / "data"), "WARM_STEPS": "100"}
    with log.open("wb") as output:
        command = [RECIPES / "openai_tool_agent" / "run.sh", *SHORT]
        run = subprocess.Popen(command, cwd=folder, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield run
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            run.wait(60)


def wait_for(condition: Callable[[], bool], run: subprocess.Popen[bytes], log: Path) -> None:
    """Until it holds; fails when the run has ended or too much time has passed."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline and run.poll() is None, log.read_text(errors="replace")[-4000:]
        time.sleep(0.5)


def has_a_cut_session(address: str) -> bool:
    """Whether the journal has a session of several weight versions; it may be half made."""
    found: int = httpx.get(f"{address}api/sessions?kind={KIND}").json().get("matching", 0)
    return found > 0


def follow(browser: Browser, address: str, state: str) -> None:
    """From the list to the first token of the newer weights, and to the replica that generated it."""
    browser.driver.get(f"{address}#/sessions?kind={KIND}&sort=oldest")
    browser.sees(state, "#state")
    session = browser.wait("a session", lambda: browser.all("tbody a") and browser.all("tbody a")[0].text)
    browser.click(session)
    browser.sees("Turn 1 · version")
    browser.press("n")
    browser.sees("replica-0", ".inspector [data-fact=replica]")
    newer = int(browser.text(".inspector [data-fact=version]"))
    headings = re.findall(r"Turn \d · version (\d+) · replica-0", browser.text(".trajectory"))
    assert newer in map(int, headings) and newer > int(headings[0])


def check_overview(browser: Browser, address: str) -> None:
    """Devices, and charts of what the trainer wrote."""
    browser.driver.get(f"{address}#/")
    browser.sees(f"step {STEPS}", "#state")
    browser.wait("charts", lambda: len(browser.all("figure .uplot")) >= 6)
    assert "rollout" in browser.one("canvas[data-lane]").get_attribute("aria-label")
    shown = {figure.get_attribute("data-chart") for figure in browser.all("figure")}
    assert {"reward", "throughput", "idle", "queue", "staleness", "seconds"} <= shown
    assert browser.errors() == []
