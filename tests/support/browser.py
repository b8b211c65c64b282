"""A headless Chromium for the tests of pages; scripts/browser finds or installs it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from support.paths import ROOT

LIMIT_S = 30.0
SIZE = (1280, 900)
# In a container there is neither a user namespace for its sandbox nor much of /dev/shm.
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--lang=en")
SPOKEN = {"button", "link", "combobox", "searchbox", "radio", "image", "region", "navigation", "table"}


def paths() -> tuple[str, str]:
    """Chromium and its driver; without them the test is skipped with the reason, and fails where CI runs it."""
    found = subprocess.run([ROOT / "scripts" / "browser"], capture_output=True, text=True)
    if found.returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(found.stderr.strip())
    chromium, driver = found.stdout.split()
    return chromium, driver


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser, closed after the block; what its console reported as an error fails the test."""
    chromium, driver = paths()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*OPTIONS, f"--window-size={SIZE[0]},{SIZE[1]}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Browser(webdriver.Chrome(options=options, service=Service(driver)))
    try:
        yield browser
    finally:
        browser.driver.quit()


class Browser:
    """What a reader of the page does, and sees; each wait ends with what it waited for."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def wait(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        # An element may be made anew between two commands, when the page is brought up to date.
        waiting = WebDriverWait(self.driver, limit_s, 0.05, ignored_exceptions=[StaleElementReferenceException])
        return waiting.until(lambda _: condition(), f"{what} in:\n{self.text('body')[:3000]}")

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        """The first that fits, when it is there."""
        self.wait(css, lambda: self.all(css))
        return self.all(css)[0]

    def text(self, css: str) -> str:
        found = self.all(css)
        return found[0].text if found else ""

    def sees(self, text: str, css: str = "body", limit_s: float = LIMIT_S) -> None:
        self.wait(
            f"{text!r}",
            lambda: text in self.script("return document.querySelector(arguments[0])?.innerText ?? ''", css),
            limit_s,
        )

    def press(self, keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(keys)

    def choose(self, label: str, value: str) -> None:
        """Chooses an option of the select with this label."""
        self._click(label, f"//label[contains(normalize-space(), '{label}')]/select/option[@value='{value}']")

    def click(self, text: str) -> None:
        """Clicks the button or link with this text."""
        self._click(text, f"//*[self::button or self::a][contains(normalize-space(), '{text}')]")

    def _click(self, what: str, xpath: str) -> None:
        def click() -> bool:
            found = self.driver.find_elements(By.XPATH, xpath)
            if found:
                found[0].click()
            return bool(found)

        self.wait(what, click)

    def script(self, code: str, *arguments: object) -> Any:
        return self.driver.execute_script(code, *arguments)

    def errors(self) -> list[str]:
        """What the console reported as an error since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def resize(self, width: int, height: int) -> None:
        """The page's own size, also one smaller than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def nameless(self) -> list[str]:
        """What a screen reader would announce without a name: its role, of all that has to have one."""
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        spoken = [node for node in nodes if not node["ignored"] and node["role"]["value"] in SPOKEN]
        assert spoken
        return [node["role"]["value"] for node in spoken if not node.get("name", {}).get("value", "").strip()]
