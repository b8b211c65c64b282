"""The command line of `seamless-verl compare`: which words are the job, which are settings, and which are options."""

from __future__ import annotations

import pytest

from seamless_verl.cli.main import settings_first
from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.command import FLAGS, parse_seeds, split_job


def test_settings_may_stand_anywhere() -> None:
    given = ["sums", "a.b=1", "--arms", "sync,seamless:seamless.x=1", "+c=2", "--out", "x=y", "--steps=4", "~d"]
    expected = ["sums", "a.b=1", "+c=2", "~d", "--arms", "sync,seamless:seamless.x=1", "--out", "x=y", "--steps=4"]
    assert settings_first(given, FLAGS) == expected
    assert settings_first(["--steps", "4", "a=1"], FLAGS) == ["a=1", "--steps", "4"]
    others = ["--equal-tokens", "--target-reward", "b=2"]
    assert settings_first([others[0], "a=1", *others[1:]], FLAGS) == ["a=1", *others]
    assert settings_first(["--equal", "~a=1", "--steps", "4", "~b"], FLAGS) == ["~a=1", "~b", "--equal", "--steps", "4"]
    assert settings_first([], FLAGS) == []


def test_the_first_word_without_a_value_is_the_job() -> None:
    assert split_job(["sums", "a=1"]) == ("sums", ["a=1"])
    assert split_job(["a=1", "b=2"]) == (None, ["a=1", "b=2"])


@pytest.mark.parametrize("words", [[], ["sums", "more"], ["sums", "a=1", "b"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        split_job(words)


def test_seeds_are_numbers() -> None:
    assert parse_seeds("1,22") == (1, 22)
    with pytest.raises(ConfigError, match="--seeds='1,'"):
        parse_seeds("1,")
