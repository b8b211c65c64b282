"""KEY=VALUE among a command's options: settings of a run, as hydra takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from seamless_verl.config.words import is_open

OVERRIDE = re.compile(r"[+]*[\w.@/-]+=|~[\w.@/-]+(?:=|$)")


def settings_first(arguments: Sequence[str], flags: Sequence[str], *, target: bool = True) -> list[str]:
    """The arguments with every KEY=VALUE before the options, wherever it was: argparse takes them in one place only.

    What follows an option is its value, unless the option is one of the `flags`, or the beginning of one. Words stay
    in order: those that follow a bracket that is open, since the shell split the setting; without a `target`, all.
    """
    settings, others, last, opened = list[str](), list[str](), "", ""
    for word in arguments:
        free = not re.fullmatch("--[a-z-]+", last) or any(flag.startswith(last) for flag in flags)
        free, last = free and not word.startswith("-"), word
        if not free:
            others.append(word)
            continue
        is_setting = OVERRIDE.match(word) is not None
        text = f"{opened} {word}" if opened and not is_setting else word
        (settings if is_setting or opened or not target else others).append(word)
        opened = text if is_open(text) else ""
    first = others[:1] if others and not others[0].startswith("-") else []
    return [*first, *settings, *others[len(first) :]]
