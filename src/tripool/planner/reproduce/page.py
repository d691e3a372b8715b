"""Tables and figures as one self-contained HTML file. Lines are predicted, dots are published."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tripool.page import Plot, html_page, plots, table, tiles
from tripool.planner.reproduce.curves import Curve, Figure
from tripool.planner.reproduce.lines import HEADS, ROLES, Table, cells, error_words, summarise

_KINDS = ("one", "two", "three")
_OWN_STYLE = """
svg{overflow:visible}
.three.line{stroke:var(--three)}.line{stroke-width:2}svg .dot{fill-opacity:1;stroke:var(--card);stroke-width:1.5}
figure svg .name{font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:3px}
td:nth-child(n+6),th:nth-child(n+6){text-align:left}td{vertical-align:top}td:first-child{min-width:170px}
td:nth-child(-n+6){white-space:nowrap}td:first-child{white-space:normal}
td:nth-child(7),td:nth-child(8){min-width:150px;color:var(--soft);font-size:13px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:10px 0}
dt{font-weight:600}dd{margin:0;color:var(--soft)}
@media (max-width:560px){td:first-child{min-width:124px}td:nth-child(n+7){white-space:nowrap}
dl{grid-template-columns:1fr}dd{margin-bottom:6px}}
"""


def render_page(tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    roles = "".join(f"<dt>{escape(role)}</dt><dd>{escape(text)}</dd>" for role, text in ROLES.items())
    shown = "".join(
        f"<h2>{escape(each.title)}</h2><p>{escape(each.description)}</p>{table(HEADS, map(cells, each.lines))}"
        for each in tables
    )
    body = (
        "<h1>CloudMatrix-Infer: published and predicted</h1>"
        "<p>DeepSeek-R1 in INT8 on Ascend 910C in CloudMatrix384 (arXiv:2506.12708), through the planner's cost model. "
        "Nothing is tuned for this page.</p>"
        f"{tiles(_tiles(tables))}<h2>What a line is worth</h2><dl>{roles}</dl>"
        f"<h2>Plots</h2><p>Lines are predicted, dots are published.</p>{plots(map(draw, figures))}{shown}"
    )
    return html_page("tripool reproduce: CloudMatrix-Infer", body, _OWN_STYLE)


def _tiles(tables: Sequence[Table]) -> list[tuple[str, str]]:
    found = summarise(tables)
    lines = [line for each in tables for line in each.lines]
    return [
        (f"median error of {found.num_validation} validation lines", f"{found.median:.1%}"),
        (f"worst: {found.worst.name}", error_words(found.worst)),
        (f"worst of {found.num_gains} validation gains: {found.worst_gain.name}", error_words(found.worst_gain)),
        ("published lines", f"{sum(line.published is not None for line in lines)}"),
        ("predictions alone", f"{sum(line.published is None for line in lines)}"),
    ]


def draw(figure: Figure) -> str:
    pairs = [pair for curve in figure.curves for pair in (*curve.predicted, *curve.published)]
    heights = [y for _, y in pairs] + [y for y, _ in figure.levels]
    plot = Plot(
        figure.title, figure.x_label, max(x for x, _ in pairs), max(heights) * 1.08, figure.y_label, y_low=min(heights)
    )
    if plot.y_ticks[0] < 0:
        plot.across(0, "axis")
    for kind, curve in zip(_KINDS, figure.curves, strict=False):
        plot.line(curve.predicted, kind)
    for height, text in figure.levels:
        _draw_level(plot, height, text, [pair for curve in figure.curves for pair in curve.predicted])
    for kind, curve in zip(_KINDS, figure.curves, strict=False):
        dots = ((x, y, f"published: {curve.name} {y:,.4g} at {x:,.4g}") for x, y in curve.published)
        plot.points(dots, f"{kind} dot", radius=4.5)
    _name_curves(plot, figure.curves)
    return plot.render()


def _draw_level(plot: Plot, height: float, text: str, line: Sequence[tuple[float, float]]) -> None:
    """Draw a published value as a horizontal line, with its label at the end farther from the predicted line."""
    last = plot.x_ticks[-1]
    gaps = {
        "start": min((abs(y - height) for x, y in line if x < 0.4 * last), default=height),
        "end": min((abs(y - height) for x, y in line if x > 0.6 * last), default=height),
    }
    anchor = max(gaps, key=lambda end: gaps[end])
    plot.level(height, text, anchor)


def _name_curves(plot: Plot, curves: Sequence[Curve]) -> None:
    """Label the curves in a row above the plot, in their colours, from the right."""
    named = [(kind, curve.name) for kind, curve in zip(_KINDS, curves, strict=False) if curve.name]
    spans = "  ".join(f'<tspan class="{kind}">{escape(name)}</tspan>' for kind, name in named)
    at = plot.x(plot.x_ticks[-1])
    plot.marks.append(f'<text class="name" x="{at:.1f}" y="14" text-anchor="end" xml:space="preserve">{spans}</text>')
