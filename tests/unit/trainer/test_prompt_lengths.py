"""Prompts that are too long are counted, and said with what helps; one that cannot be rendered is said too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seamless_verl.trainer.prompt_lengths import Lengths, PromptScan, measured, told

KEY = "data.train_files"


def test_what_fits_is_not_spoken_of() -> None:
    found = measured(["a", "abc"], len, 3)
    assert found == Lengths(looked_at=2, longest=3) and told(found, KEY, 3) == []
    assert told(measured([], len, 3), KEY, 3) == []


def test_what_is_too_long_is_counted() -> None:
    found = measured(["a", "abcd", "abcdefg"], len, 3)
    assert found == Lengths(looked_at=3, too_long=2, longest=7)
    (text,) = told(found, KEY, 3)
    assert text.startswith(
        f"data.max_prompt_length=3: 2 of 3 prompts looked at of {KEY} have more tokens, up to 7, and lose"
    )
    assert text.endswith(
        "Set data.max_prompt_length=7 to keep these whole, or data.filter_overlong_prompts=True to leave such out"
    )


def test_what_cannot_be_rendered_is_counted_apart() -> None:
    found = measured(["abcd", 1, None], len, 3)  # type: ignore[arg-type]
    assert (found.looked_at, found.too_long, found.failed) == (3, 1, 2)
    _, text = told(found, KEY, 3)
    first = "TypeError: object of type 'int' has no len()"
    assert text == f"2 of 3 prompts looked at of {KEY} cannot be rendered. The first: {first}"


def test_looking_ends_in_time() -> None:
    assert measured(["abcd"] * 9, len, 3, seconds=-1) == Lengths()


def test_what_cannot_be_counted_is_said_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def prompts() -> Iterator[str]:
        raise OSError("gone")
        yield ""

    PromptScan(KEY, prompts(), len).tell(3)
    assert f"how many prompts of {KEY} are too long cannot be said: OSError: gone" in caplog.text
