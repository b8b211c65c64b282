"""How a report says a number, and that there is none. Pure."""

from __future__ import annotations

from seamless_verl.tools.compare.statistics import Spread

ABSENT = "-"
WITHOUT = "without validations"


def spread(values: Spread | None, form: str, *, alone: bool = False) -> str:
    """The median, and the lowest and highest if there are several and not `alone`."""
    if values is None:
        return ABSENT
    text = f"{values.median:{form}}"
    return text if alone or values.values < 2 else f"{text} ({values.lowest:{form}}-{values.highest:{form}})"
