"""The page in a real browser, as a reader uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.keys import Keys
from support.browser import Browser, opened
from support.journal import chunk_appended, session_opened, write
from support.view import CUT, JOURNAL, REPLY, ids_of, make_run, served, session_events, started

from seamless_verl.journal import SqliteJournal

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with opened() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with served(run) as address:
        yield address


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """With nothing on its page; each test leaves its console without errors."""
    chromium.driver.get("about:blank")
    chromium.resize(1280, 900)
    chromium.scheme("light")
    chromium.errors()
    yield chromium
    assert chromium.errors() == []


def test_the_overview(browser: Browser, address: str) -> None:
    browser.driver.get(address)
    browser.sees("recipe/seamless", "h1")
    browser.sees("ended · step 2 · colocated", "#state")
    browser.wait("charts", lambda: browser.all("figure .uplot canvas"))
    lane = browser.one("canvas[data-lane='0']")
    assert lane.get_attribute("aria-label").startswith("train-0: train 40.0%")
    drawn = browser.script(
        "const c = document.querySelector('canvas[data-lane]'); const d = c.getContext('2d');"
        "return [0.1, 0.6, 0.95].map(x => [...d.getImageData(Math.floor(x * c.width), 5, 1, 1).data].join())"
    )
    assert len(set(drawn)) == 3, "it generated, trained and waited"
    colours = browser.script(
        "const colour = (found, of) => getComputedStyle(document.querySelector(found))[of];"
        "return [colour('.swatch.use-idle', 'backgroundColor'),"
        " colour('figure[data-chart=idle] .u-series:nth-child(2) .u-marker', 'borderTopColor')]"
    )
    assert colours[0] == colours[1], "a kind of use has one colour in lanes and chart"
    titles = [figure.get_attribute("data-chart") for figure in browser.all("figure")]
    assert titles == ["reward", "throughput", "idle"]
    browser.choose("Also draw", "perf/throughput")
    browser.wait("the chosen chart", lambda: browser.all("figure[data-chart='any'] canvas"))


def test_a_session_is_followed_to_the_token_before_which_the_weights_changed(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}#/sessions")
    browser.choose("Kind", "several_versions")
    browser.wait("focus", lambda: browser.driver.switch_to.active_element.tag_name == "select")
    browser.sees("2 of 4 sessions", "caption")
    assert "kind=several_versions" in browser.driver.current_url, "the filter is in the address"
    browser.click(CUT)
    browser.sees("Turn 1 · version 3 · replica-0 · 12 tokens")
    browser.sees(REPLY)
    browser.press("n")
    browser.sees("replica-1", ".inspector [data-fact=replica]")
    assert (
        browser.text(".inspector [data-fact=version]") == "4" and browser.text(".inspector [data-fact=token]") == '" "'
    )
    browser.press(Keys.ARROW_RIGHT)
    browser.sees('"a"', ".inspector [data-fact=token]")
    browser.press(Keys.ARROW_LEFT + Keys.ARROW_LEFT)
    browser.sees("3", ".inspector [data-fact=version]")
    assert browser.text(".inspector [data-fact=replica]") == "replica-0"
    assert browser.text(".inspector [data-fact=trained]") == "no: stale"
    browser.driver.back()
    browser.sees("2 of 4 sessions", "caption")


def test_branches_drift_and_colours(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}#/session/{CUT}")
    browser.sees("turn 3 left the record of turn 2 at token")
    browser.sees("0.25 (-0.5 to 0.75)", ".tiles")
    assert len(browser.all(".tree .branch")) == 2
    browser.all(".tree .branch button")[2].click()
    browser.sees("Turn 3 · version 4 · replica-0")
    assert "replica-1" not in browser.text(".trajectory"), "the other branch is not on this path"
    generated = "article.generated .token"

    def colours() -> set[str]:
        return {token.get_attribute("class") for token in browser.all(generated)}

    browser.wait("tokens", lambda: len(browser.all(generated)) == 35)
    assert colours() == {"token v0", "token v1"}
    browser.one("input[value=mask]").click()
    assert colours() == {"token trained", "token untrained"}
    browser.one("input[value=logprob]").click()
    assert len(colours()) > 2 and all(name.startswith("token p") for name in colours())


def test_what_agents_wrote_is_shown_as_text(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}#/session/{CUT}")
    browser.click("Request and reply")
    browser.sees("<b>question</b> of", "pre")
    assert browser.all("b") == []


def test_two_sessions_side_by_side(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}#/session/plain1")
    browser.click("plain2 (0.5)")
    browser.wait("both", lambda: len(browser.all(".session .trajectory article")) == 5)
    headings = [heading.text for heading in browser.all("h2")]
    assert headings == ["Session plain1", "Session plain2"]
    left, right = (pane.rect for pane in browser.all(".session"))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]


@pytest.mark.parametrize("page", ["#/", "#/sessions", "#/groups", f"#/session/{CUT}"])
def test_each_page_fits_its_screen_and_has_names(browser: Browser, address: str, page: str) -> None:
    browser.driver.get(f"{address}{page}")
    for width, height in ((1280, 900), (390, 800)):
        browser.resize(width, height)
        browser.wait("content", lambda: browser.all("main h2") and browser.all("main canvas, main table, main .token"))
        assert browser.script("return document.documentElement.scrollWidth") <= width
        assert browser.nameless() == []
    paper = {}
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        paper[scheme] = browser.script("return getComputedStyle(document.body).backgroundColor")
    assert paper["light"] != paper["dark"]


def test_it_is_used_by_the_keyboard_alone(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}#/sessions")
    browser.wait("rows", lambda: browser.all("tbody tr"))
    browser.press("/")
    browser.press("p1" + Keys.ENTER)
    browser.sees("2 of 4 sessions", "caption")
    browser.press(Keys.TAB * 2)
    focused = browser.driver.switch_to.active_element
    assert focused.tag_name == "a" and focused.text.startswith("plain")
    browser.press(Keys.ENTER)
    browser.sees("Session plain", "h2")


def test_a_run_is_followed_while_it_writes(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with SqliteJournal(run / JOURNAL) as journal, served(run) as address:
        browser.driver.get(f"{address}#/sessions")
        browser.sees("4 sessions", "caption")
        browser.sees("running", "#state")
        write(journal, *session_events("another", "p9", 5))
        browser.sees("5 sessions", "caption")
        browser.sees("another", "tbody")
        write(journal, session_opened("open"))
        browser.driver.get(f"{address}#/session/open")
        browser.sees("0 generated, 0 trained")
    browser.sees("The view's process does not answer", "#problem")
    assert all("ERR_CONNECTION_REFUSED" in message for message in browser.errors())


def test_the_focus_stays_while_a_session_grows(browser: Browser, tmp_path: Path) -> None:
    """On a token, also within the part that grows, on a part of the tree, and on a button of the table of turns."""

    def focused() -> tuple[str, str]:
        active = browser.driver.switch_to.active_element
        return active.tag_name, active.text

    def grows() -> None:
        count = len(browser.all("article.generated .token"))
        write(journal, chunk_appended([ord("x") % 90], call, 3, "replica-0"))
        browser.wait("one more token", lambda: len(browser.all("article.generated .token")) == count + 1)

    run = make_run(tmp_path)
    prompt, reply = ids_of(tmp_path / "model", "What?"), ids_of(tmp_path / "model", "abc")
    with SqliteJournal(run / JOURNAL) as journal, served(run) as address:
        call = "open.1"
        write(
            journal, session_opened("open"), started("open", call, prompt), chunk_appended(reply, call, 3, "replica-0")
        )
        browser.driver.get(f"{address}#/session/open")
        browser.wait("tokens", lambda: len(browser.all("article.generated .token")) == 3)
        for found, text in (
            ("article.context .token[data-at='2']", "a"),
            ("article.generated .token[data-at='1']", "b"),
            (".tree button[data-node='0']", "context 5"),
            ("tbody button", "Request and reply"),
        ):
            browser.script(f'document.querySelector("{found}").focus()')
            before = focused()
            assert before[1] == text
            grows()
            browser.wait("the focus", lambda before=before: focused() == before)
    browser.errors()  # the page asks once more, of nobody


def test_a_damaged_journal_hides_only_sessions(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with served(run) as address:
        (run / JOURNAL).write_bytes(b"no database")  # while the run is shown; before, the command refuses it
        browser.driver.get(address)
        browser.sees("Sessions cannot be shown.", ".notes")
        browser.wait("charts", lambda: browser.all("figure .uplot canvas"))
        browser.driver.get("about:blank")


def test_a_wrong_address_says_so(browser: Browser, address: str) -> None:
    parts = urlsplit(address)
    browser.driver.get(f"{parts.scheme}://{parts.netloc}/wrong/")
    browser.sees("403: this address has no token, or another run's")
    assert all("403" in message for message in browser.errors())
