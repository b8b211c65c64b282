"""KEY=VALUE among a command's options: settings of a run, as hydra takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

OVERRIDE = re.compile(r"[+]*[\w.@/-]+=|~[\w.@/-]+(?:=|$)")


def settings_first(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The arguments with every KEY=VALUE before the options, wherever it was: argparse takes them in one place only.

    What follows an option is its value, unless the option is one of the `flags`, or the beginning of one.
    """
    before = ["", *arguments]
    found = [
        OVERRIDE.match(word) is not None
        and not word.startswith("-")
        and (not re.fullmatch("--[a-z-]+", last) or any(flag.startswith(last) for flag in flags))
        for last, word in zip(before, arguments, strict=False)
    ]
    settings = [word for word, is_setting in zip(arguments, found, strict=True) if is_setting]
    others = [word for word, is_setting in zip(arguments, found, strict=True) if not is_setting]
    target = others[:1] if others and not others[0].startswith("-") else []
    return [*target, *settings, *others[len(target) :]]
