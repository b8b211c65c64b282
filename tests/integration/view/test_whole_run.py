"""The view of a real run: opened while the run trains, gone when it has ended, and opened again from its folder."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest
from support.browser import Browser, opened
from support.job import AGENT, SEAMLESS, Job
from support.view import served

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = 8
KIND = "several_versions"
LIMIT_S = 240.0


def test_a_session_is_followed_to_the_update_that_cut_it_during_and_after_the_run(tmp_path: Path, nano: Path) -> None:
    options = AGENT | {
        "seamless__view__enabled": True,
        "trainer__total_training_steps": STEPS,
        "trainer__test_freq": -1,
        "trainer__save_freq": -1,
    }
    overrides = {key.replace("__", "."): value for key, value in options.items()}
    job = Job(tmp_path, nano, SEAMLESS, overrides, {}).start()
    try:
        job.wait_for("The view of this run: ")
        (address,) = re.findall(r"The view of this run: (\S+)", job.log())
        wait_for_a_cut_session(job, address)
        with opened() as browser:
            follow(browser, address, "running")
    finally:
        job.finish()
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)
    assert job.log().count("The view of this run: ") == 1 and "goes on without" not in job.log()
    with served(tmp_path / "checkpoints") as address, opened() as browser:
        follow(browser, address, "ended")
        check_overview(browser, address)


def wait_for_a_cut_session(job: Job, address: str) -> None:
    """Until the journal has a session of several weight versions."""
    deadline = time.monotonic() + LIMIT_S
    while (
        httpx.get(f"{address}api/sessions?kind={KIND}").json().get("matching", 0) == 0
    ):  # the journal may be half made
        assert time.monotonic() < deadline and job.process is not None and job.process.poll() is None, job.log()[-4000:]
        time.sleep(0.5)


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
