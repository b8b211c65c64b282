"""Words of a command line that are no KEY=VALUE: what the shell split, open brackets, keys without `=`.

Without quotes the shell makes several words of `key=[{count: 1, tags: [train]}]`, and hydra would refuse each of them
by itself. Here the words of one override are one mistake, which says how it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from seamless_verl.errors import ConfigError, WordError

SETTING = re.compile(r"[+~]*[\w@./:][\w@./:-]*=")
KEY = re.compile(r"[+]*[A-Za-z_][\w@/]*(\.[\w@/]+)+")  # a key that is meant as one, though it has no `=`
OPTION = re.compile(r"--?[A-Za-z]|~")
PAIRS = {"[": "]", "{": "}", "(": ")"}


def quoted(text: str) -> str:
    """The text as the value of an override, whatever characters it has."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text=text, quote=Quote.single).with_quotes())


def grouped(words: Sequence[str]) -> list[list[str]]:
    """The words by override: those that follow an open bracket, a `key=` or a `key` belong to it."""
    rest, groups = list(words), list[list[str]]()
    while rest:
        group = [rest.pop(0)]
        while rest and not _begins(rest[0]) and _expects_more(group, rest[0]):
            group.append(rest.pop(0))
        groups.append(group)
    return groups


def misread(group: Sequence[str], before: str = "") -> ConfigError | None:
    """The mistake of the words of one override; None if these rules find none. `before`: the word before them."""
    first, text = group[0], joined(group)
    key, _, value = text.lstrip("+~").partition("=")
    opened = open_bracket(text)
    if opened is not None:
        split = f"the shell split this into {len(group)} words, and " if len(group) > 1 else ""
        place, closing = opened
        way_out = f"Close it with {closing}{', and write it in single quotes' if split else ''}"
        return ConfigError(key, value, f"{split}a bracket is not closed: {place}", way_out)
    if len(group) > 1 and SETTING.match(first) and not first.endswith("="):
        return ConfigError(key, value, f"the shell split this into {len(group)} words", f"Write {shlex.quote(text)}")
    if len(group) > 1:
        return WordError(group[-1], None, "is no KEY=VALUE", f"Write {_plain(text)}")
    if "=" in first or first.startswith("~"):
        return None
    if _is_key(first):
        return WordError(first, None, "is no KEY=VALUE", f"Write {first}=VALUE")
    together = f", or {shlex.quote(f'{before} {first}')} if this is part of it" if SETTING.match(before) else ""
    return WordError(first or "''", None, "is no KEY=VALUE", f"Write key=value{together}")


def misread_of(word: str, words: Sequence[str]) -> ConfigError | None:
    """The mistake of the override that this word belongs to."""
    groups = grouped(words)
    for before, group in zip([[""], *groups], groups, strict=False):
        if word in group:
            return misread(group, before[-1])
    return misread([word])


def joined(group: Sequence[str]) -> str:
    """The override that the words were meant as."""
    if SETTING.match(group[0]) or len(group) == 1:
        rest = " ".join(group[1:])
        return f"{group[0]}{rest}" if group[0].endswith("=") else " ".join(group)
    value = " ".join(group[1:]).removeprefix("=").lstrip()
    return f"{group[0]}={value}"


def open_bracket(text: str) -> tuple[str, str] | None:
    """The text from a bracket that is not closed, to where it should have been, and what closes it."""
    opened = list[int]()
    for place, character in _outside_quotes(text):
        if character in PAIRS:
            opened.append(place)
        elif opened and character in PAIRS.values():
            start = opened.pop()
            if PAIRS[text[start]] != character:
                return text[start:place].strip(), PAIRS[text[start]]
    return (text[opened[-1] :].strip(), "".join(PAIRS[text[start]] for start in reversed(opened))) if opened else None


def is_open(word: str) -> bool:
    """Whether a setting's word has a bracket that a later word may close."""
    return SETTING.match(word) is not None and open_bracket(word) is not None


def _expects_more(group: Sequence[str], following: str) -> bool:
    text = joined(group)
    if SETTING.match(group[0]):
        return text.endswith("=") or open_bracket(text) is not None
    if len(group) == 1:
        return _is_key(group[0]) and not _is_key(following)
    return text.endswith("=") or open_bracket(text) is not None


def _is_key(word: str) -> bool:
    return word in ("platform", "model_engine") or KEY.fullmatch(word) is not None


def _begins(word: str) -> bool:
    """Whether a word is a setting or an option of its own."""
    return SETTING.match(word) is not None or OPTION.match(word) is not None


def _plain(text: str) -> str:
    return text if re.fullmatch(r"[\w@./:=+,-]+", text) else shlex.quote(text)


def _outside_quotes(text: str) -> Iterator[tuple[int, str]]:
    """The characters that are not inside of hydra's quotes, with their places."""
    quote, escaped = "", False
    for place, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            yield place, character
