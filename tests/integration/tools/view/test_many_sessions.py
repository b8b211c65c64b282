"""The page with 10,000 sessions: how long a reader waits for it. It measures times, so nothing may run beside it."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from support.browser import opened
from support.view import JOURNAL, served, write_many

from seamless_verl.journal import SqliteJournal

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]
SESSIONS = 10_000
LIMIT_S = 2.0
QUERIES = ("", "?sort=lowest_logprob", "?kind=several_versions&sort=longest", "?dropped=session", "?page=199")


def test_it_opens_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SqliteJournal(tmp_path / JOURNAL) as journal:
        write_many(journal, SESSIONS)
    began = time.monotonic()
    with served(tmp_path) as address, opened() as browser:
        started = time.monotonic() - began
        times = {}
        for page in ("#/sessions", "#/", "#/groups", f"#/session/{SESSIONS // 2:016x}"):
            browser.driver.get("about:blank")
            browser.driver.get(f"{address}{page}")
            browser.wait(page, lambda: browser.all("tbody tr, .tiles dd"))
            times[page] = browser.script("return performance.now()") / 1000
        with httpx.Client(base_url=address) as client:
            for query in QUERIES:
                asked = time.monotonic()
                answer = client.get(f"api/sessions{query}").json()
                times[f"api/sessions{query}"] = time.monotonic() - asked
                assert len(answer["rows"]) == 50 and answer["total"] == SESSIONS
    with capsys.disabled():
        print(f"\nthe server was ready after {started:.2f} s;", {page: round(s, 3) for page, s in times.items()})  # noqa: T201
    assert max(times.values()) < LIMIT_S
