"""The report as one page of HTML that opens without a network: plotly's own script is in it, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from plotly.io import to_html
from plotly.offline import get_plotlyjs

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.frontier_plots import frontier_plots
from seamless_verl.tools.compare.plots import colours_of, plots
from seamless_verl.tools.compare.report import (
    EQUAL_TOKENS,
    FILES,
    arm_table,
    difference_table,
    equal_heading,
    equal_table,
    explanations,
    last_lines,
    learning_sections,
    machine_lines,
    ratio_caution,
    ratio_table,
    verdicts,
    warnings_of,
)

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #52606d; --line: #e4e7eb; --paper: #ffffff; --back: #f5f7fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 15px; margin: 0; }
.lead { color: var(--soft); margin: 0 0 18px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.verdicts { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 12px; }
.warning { border-left: 4px solid #d55e00; margin-bottom: 12px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 14px; }
.plots .card { min-width: 0; overflow: hidden; }
.plots p { color: var(--soft); margin: 2px 0 6px; font-size: 13px; }
.scroll { overflow-x: auto; padding: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 9px 10px; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; } td small { display: block; color: var(--soft); font-size: 12px; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; }
ul { padding-left: 20px; margin: 8px 0; } li { margin: 4px 0; overflow-wrap: anywhere; }
pre { background: #1f2933; color: #f5f7fa; border-radius: 8px; padding: 12px 16px; white-space: pre-wrap; }
@media (max-width: 560px) { .plots { grid-template-columns: 1fr; } }
"""
VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
REDRAW = (
    "<script>window.dispatchEvent(new Event('resize'))</script>"  # plots take the width that their cards have at last
)
PLOT_OPTIONS = {"displaylogo": False, "displayModeBar": False, "responsive": True}


def page(comparison: Comparison) -> str:
    """The whole page."""
    title = escape(comparison.title)
    head = f'<meta charset="utf-8">{VIEWPORT}<title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(sections(comparison))
    script = f"<script>{get_plotlyjs()}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{script}</head>\n<body><main>{body}</main></body></html>\n'


def sections(comparison: Comparison) -> Iterator[str]:
    yield f"<h1>{escape(comparison.title)}</h1>"
    yield f'<p class="lead">{escape(comparison.conditions[0])}</p>' if comparison.conditions else ""
    for text in warnings_of(comparison):
        yield f'<div class="card warning">{escape(text.replace("*", ""))}</div>'
    yield '<div class="verdicts">'
    for text in verdicts(comparison):
        yield f'<div class="card">{escape(text)}</div>'
    yield "</div>"
    yield f'<h2>Arms</h2><div class="card scroll">{html_table(*arm_table(comparison))}</div>'
    yield f'<h2>Ratios, pair by pair</h2><div class="card scroll">{html_table(*ratio_table(comparison))}</div>'
    yield f"<p>{escape(ratio_caution(comparison))}</p>{items(list(machine_lines(comparison)))}"
    if comparison.differences:
        header, rows = difference_table(comparison)
        yield f'<h2>Where settings differ</h2><div class="card scroll">{html_table(header, rows, whole=True)}</div>'
    if (equal := comparison.equal_tokens) is not None:
        yield f"<h2>{escape(equal_heading(equal))}</h2>"
        yield f'<div class="card scroll">{html_table(*equal_table(equal, comparison.baseline))}</div>'
        yield f"<p>{escape(EQUAL_TOKENS)}</p>"
    for title, lines, table in learning_sections(comparison):
        yield f'<h2>{escape(title)}</h2>{items(lines)}<div class="card scroll">{html_table(*table)}</div>'
    yield failures(comparison)
    yield '<h2>Plots</h2><div class="plots">'
    drawings = [*plots(comparison), *frontier_plots(comparison, colours_of(comparison))]
    for number, (title, text, figure) in enumerate(drawings):
        drawn = to_html(figure, include_plotlyjs=False, full_html=False, config=PLOT_OPTIONS, div_id=f"plot-{number}")
        yield f'<div class="card"><h3>{escape(title)}</h3><p>{escape(text)}</p>{drawn}</div>'
    yield f"</div>{REDRAW}"
    lines = [line.replace("`", "") for line in explanations(comparison)]
    yield f"<h2>What the columns say</h2>{items(lines)}"
    yield f"<h2>Conditions</h2>{items(comparison.conditions)}"
    yield f"<h2>To run it again</h2><pre>{escape(comparison.command)}</pre>"
    yield f"<p>{escape(FILES.replace('`', ''))}</p>"


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, whole: bool = False) -> str:
    """A table whose cells are in two lines, or `whole` as they are."""
    written = escape if whole else two_lines
    body = "".join(f"<tr>{''.join(f'<td>{written(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def two_lines(cell: str) -> str:
    """A cell with its spread, or its verdict, in a smaller second line."""
    first, _, second = cell.partition(" (" if cell.endswith(")") else ": ")
    return escape(first) + (f"<small>{escape(second.rstrip(')'))}</small>" if second else "")


def failures(comparison: Comparison) -> str:
    """The arms whose runs did not all finish, with the reasons and the logs."""
    cards = [
        f'<div class="card warning"><h3>{escape(summary.arm)}</h3><pre>{escape(last_lines(reason))}</pre>'
        f"{f'<p>Log: <code>{escape(log)}</code></p>' if log else ''}</div>"
        for summary in comparison.summaries
        for reason, log in summary.reasons
    ]
    return f"<h2>What did not finish</h2>{''.join(cards)}" if cards else ""


def items(lines: tuple[str, ...] | list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
