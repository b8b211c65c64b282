"""The plots of what staleness brings and costs, and of the lengths that were drawn and trained. Pure but for plotly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from math import isfinite

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.lengths import drawn_and_trained
from seamless_verl.tools.compare.outcome import ArmSummary
from seamless_verl.tools.compare.plots import arms_of, figure, styled

PANELS = (("tokens_per_s", "tokens/s", ",.0f"), ("reward", "reward", ".3f"))
Colours = Mapping[str, str]


def frontier_plots(comparison: Comparison, colours: Colours) -> Iterator[tuple[str, str, go.Figure]]:
    """(title, what it shows, figure) of each plot that has something to show."""
    if any(place(comparison, summary) is not None for summary in comparison.summaries):
        what = (
            "tokens/s and the reward at the end by permitted staleness: the median, and each run. An arm "
            "without such a bound is a ring at the highest staleness that it had."
        )
        yield "The frontier", what, frontier(comparison, colours)
    if any(run.lengths is not None for run in comparison.runs):
        what = (
            "Share of samples that are at most so long: trained, and as dots those of as many prompts as "
            "drawn. Prompts that were drawn and have no length count as longer than all; their line ends below 1."
        )
        yield "Lengths", what, lengths(comparison, colours)


def frontier(comparison: Comparison, colours: Colours) -> go.Figure:
    """Speed above, reward below, by staleness in weight versions."""
    found = make_subplots(rows=len(PANELS), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, (name, title, form) in enumerate(PANELS, 1):
        for system, arms in systems_of(comparison).items():
            known = [(at, one) for one in arms if (at := place(comparison, one)) is not None and getattr(one, name)]
            found.add_scatter(
                x=[at for at, _ in known],
                y=[getattr(one, name).median for _, one in known],
                mode="lines+markers",
                name=system,
                legendgroup=system,
                showlegend=row == 1,
                line={"color": colours[arms[0].arm], "width": 2},
                marker={"size": 10, "symbol": [symbol(comparison, one) for _, one in known]},
                text=[one.arm for _, one in known],
                hovertemplate=f"%{{text}}: %{{y:{form}}} {title}<extra></extra>",
                row=row,
                col=1,
            )
            add_runs(found, comparison, known, name, colours, row)
        found.update_yaxes(title=title, rangemode="tozero", row=row, col=1)
    found.update_xaxes(title="staleness in weight versions: permitted, or the highest", dtick=1, row=len(PANELS), col=1)
    return styled(found, height=520)


def add_runs(
    found: go.Figure,
    comparison: Comparison,
    known: list[tuple[float, ArmSummary]],
    name: str,
    colours: Colours,
    row: int,
) -> None:
    """A small point for each run."""
    for at, one in known:
        runs = comparison.finished(one.arm).values()
        values = [value for run in runs if (value := getattr(run.figures, name)) is not None]
        point = {"color": colours[one.arm], "size": 5, "opacity": 0.6}
        found.add_scatter(
            x=[at] * len(values),
            y=values,
            mode="markers",
            marker=point,
            showlegend=False,
            hovertemplate=f"{one.arm}: %{{y}}<extra></extra>",
            row=row,
            col=1,
        )


def systems_of(comparison: Comparison) -> dict[str, list[ArmSummary]]:
    """The arms of a line: those that differ in nothing but what they permit."""
    found: dict[str, list[ArmSummary]] = {}
    for one in comparison.summaries:
        if one.arm in comparison.arms:
            found.setdefault(comparison.arms[one.arm].line or one.arm, []).append(one)
    return {line: sorted(arms, key=lambda one: comparison.arms[one.arm].permitted or 0) for line, arms in found.items()}


def place(comparison: Comparison, one: ArmSummary) -> float | None:
    """Where an arm is on the axis of staleness; None where nothing is known."""
    if one.arm not in comparison.arms or one.tokens_per_s is None:
        return None
    permitted = comparison.arms[one.arm].permitted
    if permitted is not None:
        return float(permitted)
    return None if one.staleness_max is None else one.staleness_max.highest


def symbol(comparison: Comparison, one: ArmSummary) -> str:
    return "circle-open" if comparison.arms[one.arm].permitted is None else "circle"


def lengths(comparison: Comparison, colours: Colours) -> go.Figure:
    """Distribution functions of an arm's samples, its runs together."""
    found = figure("response tokens", "share")
    for arm in arms_of(comparison.runs):
        records = [run.lengths for run in comparison.runs if run.arm == arm and run.lengths is not None]
        pairs = [drawn_and_trained(record) for record in records]
        for side, dash in enumerate(("dot", "solid")):
            every = list(chain.from_iterable(chain.from_iterable(pair[side].values()) for pair in pairs))
            values = sorted(filter(isfinite, every))
            if not values:
                continue
            found.add_scatter(
                x=values,
                y=[(index + 1) / len(every) for index in range(len(values))],
                mode="lines",
                name=arm,
                legendgroup=arm,
                showlegend=side == 1,
                line={"color": colours[arm], "dash": dash, "width": 2, "shape": "hv"},
                hovertemplate=f"{arm}, {('drawn', 'trained')[side]}: %{{y:.1%}} up to %{{x}}<extra></extra>",
            )
    return found
