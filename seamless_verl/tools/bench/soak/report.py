"""The soak's table and its page of plots. Pure but for importing plotly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seamless_verl.runtime.tables import text_table
from seamless_verl.tools.bench.soak.growth import BLOCKS, Growth, Verdict, growth
from seamless_verl.tools.bench.soak.samples import Sample
from seamless_verl.tools.compare.page import page_of

MIB = float(1 << 20)
UNITS = {"memory": MIB, "shared memory": MIB, "disk": MIB}
HARMLESS = {"memory": 2 * MIB, "shared memory": 2 * MIB, "disk": 2 * MIB, "descriptors": 1.0, "threads": 1.0}
"""A change of a series over the measured time that counts as none, beside 1% of it."""
HEADER = ("what", "of", "first", "last", "an hour", "+-", "")
Series = tuple[str, str]


def measured(samples: Sequence[Sample], warm_up: float) -> list[Sample]:
    """Those after the part of the time in which the run warms up."""
    if not samples:
        return []
    begin = samples[0].at + warm_up * (samples[-1].at - samples[0].at)
    return [sample for sample in samples if sample.at >= begin]


def growths(samples: Sequence[Sample]) -> dict[Series, Growth]:
    """Of each series that all samples have; one that came or went, as a worker of Ray does, is in `passing`."""
    found = {}
    for series in sorted(always(samples)):
        values = [sample.values[series] for sample in samples]
        found[series] = growth([sample.at for sample in samples], values, HARMLESS.get(series[0], 0.0))
    return found


def always(samples: Sequence[Sample]) -> set[Series]:
    return set.intersection(*(set(sample.values) for sample in samples)) if samples else set()


def passing(samples: Sequence[Sample]) -> set[Series]:
    """Series that some samples have and others do not."""
    return {series for sample in samples for series in sample.values} - always(samples)


def table(found: dict[Series, Growth]) -> str:
    """A row for each series that was not the same all the time."""
    return text_table(HEADER, [_row(series, one) for series, one in found.items() if one.moves])


def _row(series: Series, one: Growth) -> tuple[str, ...]:
    unit = UNITS.get(series[0], 1.0)
    numbers = (f"{value / unit:,.1f}" for value in (one.first, one.last))
    changes = (f"{one.hourly / unit:+,.2f}", f"{one.hourly_error / unit:,.2f}")
    what = f"{series[0]}, MiB" if series[0] in UNITS else series[0]
    return what, series[1], *numbers, *changes, "" if one.verdict is Verdict.FLAT else str(one.verdict)


def summary(samples: Sequence[Sample], found: dict[Series, Growth]) -> str:
    """One paragraph: how long, how many steps, and what is not flat."""
    hours, steps = (samples[-1].at - samples[0].at) / 3600, samples[-1].steps - samples[0].steps
    others = [f"{what} of {whom} {one.verdict}" for (what, whom), one in found.items() if one.verdict != Verdict.FLAT]
    rest = f"; not flat: {', '.join(others)}" if others else ""
    gone = f"; not there in all samples: {len(passing(samples))} series" if passing(samples) else ""
    flat = len(found) - len(others)
    return (
        f"{hours:.2f} hours, {steps} steps, {len(samples)} samples in {BLOCKS} blocks: "
        f"{flat} of {len(found)} series are flat{rest}{gone}"
    )


def page(title: str, lead: str, samples: Sequence[Sample], begin: float) -> str:
    """A page of HTML that opens without a network: a plot for each thing held, with a line for each holder."""
    return page_of("plots.html.jinja", _figures(samples, begin), title=title, lead=lead)


def _figures(samples: Sequence[Sample], begin: float) -> Iterator[tuple[str, str, object]]:
    from seamless_verl.tools.compare.plots import COLOURS, figure

    names = dict.fromkeys(series for sample in samples for series in sample.values)
    for what in dict.fromkeys(series[0] for series in names):
        unit = UNITS.get(what, 1.0)
        found = figure("minutes", "MiB" if what in UNITS else "number")
        for index, series in enumerate(sorted(one for one in names if one[0] == what)):
            own = [sample for sample in samples if series in sample.values]
            x, y = [one.at / 60 for one in own], [one.values[series] / unit for one in own]
            line = {"color": COLOURS[index % len(COLOURS)], "dash": ("solid", "dot", "dash")[index // len(COLOURS) % 3]}
            found.add_scatter(x=x, y=y, mode="lines", name=series[1], line=line)
        found.add_vline(x=begin / 60, line_dash="dot", line_color="#999999")
        yield (f"{what}, MiB" if what in UNITS else what), "", found
