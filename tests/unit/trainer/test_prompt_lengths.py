"""Prompts that are too long, or cannot be rendered, are counted, and the user is warned with a way out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seamless_verl.trainer.prompt_lengths import PromptLengths, PromptScan, scan_lengths

KEY = "data.train_files"


def test_prompts_that_fit_give_no_warning() -> None:
    found = scan_lengths(["a", "abc"], len, 3)
    assert found == PromptLengths(scanned=2, longest=3) and found.warnings(KEY, 3) == []
    assert scan_lengths([], len, 3).warnings(KEY, 3) == []


def test_long_prompts_are_counted() -> None:
    found = scan_lengths(["a", "abcd", "abcdefg"], len, 3)
    assert found == PromptLengths(scanned=3, too_long=2, longest=7)
    (text,) = found.warnings(KEY, 3)
    assert text.startswith(
        f"data.max_prompt_length=3: 2 of 3 scanned prompts of {KEY} have more tokens, up to 7, and lose"
    )
    assert text.endswith(
        "Set data.max_prompt_length=7 to keep them whole, or data.filter_overlong_prompts=True to leave them out"
    )


def test_prompts_that_cannot_be_rendered_are_counted_apart() -> None:
    found = scan_lengths(["abcd", 1, None], len, 3)  # type: ignore[arg-type]
    assert (found.scanned, found.too_long, found.failed) == (3, 1, 2)
    _, text = found.warnings(KEY, 3)
    first = "TypeError: object of type 'int' has no len()"
    assert text == f"2 of 3 scanned prompts of {KEY} cannot be rendered. The first: {first}"


def test_a_scan_ends_in_time() -> None:
    assert scan_lengths(["abcd"] * 9, len, 3, seconds=-1) == PromptLengths()


def test_a_scan_that_fails_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def prompts() -> Iterator[str]:
        raise OSError("gone")
        yield ""

    PromptScan(KEY, prompts(), len).log_warnings(3)
    assert f"the prompts of {KEY} that are too long cannot be counted: OSError: gone" in caplog.text
