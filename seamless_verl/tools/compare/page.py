"""The report as text and as one page of HTML, which opens without a network: plotly's own script is in it, once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from seamless_verl.runtime.step_metrics import COUNTED
from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.report import last_lines, poll_line, sections, verdicts, warnings_of

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
PLOT_OPTIONS = {"displaylogo": False, "displayModeBar": False, "responsive": True}


def two_lines(cell: str) -> Markup:
    """A cell with its spread, or its verdict, in a smaller second line."""
    first, _, second = cell.partition(" (" if cell.endswith(")") else ": ")
    return escape(first) + (Markup("<small>{}</small>").format(second.rstrip(")")) if second else "")


TEMPLATES.filters |= {"two_lines": two_lines, "last_lines": last_lines}


def markdown(comparison: Comparison) -> str:
    """The whole report as text."""
    text: str = TEMPLATES.get_template("report.md.jinja").render(contents(comparison))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page(comparison: Comparison) -> str:
    """The whole page."""
    from seamless_verl.tools.compare.plots import plots

    return page_of("report.html.jinja", plots(comparison), **contents(comparison))


def page_of(template: str, figures: Iterable[tuple[str, str, Any]], **given: Any) -> str:
    """A page of this template with plots: (title, what it shows, figure of plotly)."""
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    drawn = []
    for number, (title, text, figure) in enumerate(figures):
        plot = {"include_plotlyjs": False, "full_html": False, "config": PLOT_OPTIONS, "div_id": f"plot-{number}"}
        drawn.append((title, text, Markup(to_html(figure, **plot))))
    found: str = TEMPLATES.get_template(template).render(given, plots=drawn, script=Markup(get_plotlyjs()))
    return found


def contents(comparison: Comparison) -> dict[str, Any]:
    """What both templates show."""
    return {
        "comparison": comparison,
        "warnings": warnings_of(comparison),
        "verdicts": list(verdicts(comparison)),
        "sections": list(sections(comparison)),
        "failures": [(one.arm, reason, log) for one in comparison.summaries for reason, log in one.reasons],
        "explanations": explanations(comparison),
    }


def explanations(comparison: Comparison) -> list[str]:
    """What the columns say."""
    summaries = comparison.summaries
    unknown = any(summary.finished and summary.idle is None for summary in summaries)
    text = TEMPLATES.get_template("explanations.jinja").render(
        comparison=comparison,
        baselines=comparison.baselines or [comparison.baseline],
        reward_of=next((summary.reward_of for summary in summaries if summary.reward_of), ""),
        counted=COUNTED,
        idle_unknown=comparison.idle_unknown if unknown else "",
        poll_line=poll_line(comparison),
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
