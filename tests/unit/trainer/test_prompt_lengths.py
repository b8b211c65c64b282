"""Prompts that are too long, or cannot be rendered, are counted, and the user is warned with a way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from seamless_verl.trainer.prompt_lengths import PromptScan, warn_of_long_prompts

KEY = "data.train_files"


def warnings(*prompts: Any, seconds: float = 60.0) -> list[str]:
    return PromptScan(KEY, prompts, len).warnings(3, seconds)


def test_prompts_that_fit_give_no_warning() -> None:
    assert warnings("a", "abc") == warnings() == []


def test_long_prompts_are_counted() -> None:
    assert warnings("a", "abcd", "abcdefg") == [
        f"data.max_prompt_length=3: 2 of 3 scanned prompts of {KEY} have more tokens, up to 7, and lose their "
        "beginning. Set data.max_prompt_length=7 to keep them whole, or data.filter_overlong_prompts=True to leave "
        "them out"
    ]


def test_prompts_that_cannot_be_rendered_are_counted_apart() -> None:
    long, text = warnings("abcd", 1, None)
    first = "TypeError: object of type 'int' has no len()"
    assert "1 of 3 scanned" in long
    assert text == f"2 of 3 scanned prompts of {KEY} cannot be rendered. The first: {first}"


def test_a_scan_ends_in_time() -> None:
    assert warnings(*["abcd"] * 9, seconds=-1) == []


def test_a_scan_that_fails_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def prompts() -> Iterator[str]:
        raise OSError("gone")
        yield ""

    warn_of_long_prompts([PromptScan(KEY, prompts(), len)], 3)
    assert f"the prompts of {KEY} that are too long cannot be counted: OSError: gone" in caplog.text
