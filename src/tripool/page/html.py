"""Frame of every page: one self-contained HTML file, light or dark as the reader's system is.

Escapes all text except `body`, which is HTML already. Independent of the content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--back:#fbfbfa;--card:#fff;--ink:#1d2128;--soft:#626a76;--line:#e3e5e8;--one:#2f6fd0;
--two:#b8622a;--three:#2c8a63;--bad:#c23b3b}
@media (prefers-color-scheme:dark){:root{--back:#14171b;--card:#1b1f25;--ink:#e7e9ec;--soft:#9aa3af;--line:#2d333b;
--one:#6ea3f2;--two:#e09a63;--three:#5fc298;--bad:#ef7676}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1220px;padding:28px 20px 48px;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 2px}h2{font-size:16px;margin:30px 0 10px}
p{margin:4px 0;color:var(--soft)}p.warn{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:10px;margin-top:18px}
.tile,figure,table{background:var(--card);border:1px solid var(--line);border-radius:8px}
.tile{padding:10px 14px}.tile span{display:block;color:var(--soft);font-size:13px}
.tile b{font-weight:600;font-size:16px;font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
figure{margin:0;padding:12px 10px 4px}figcaption{padding-left:8px;font-weight:600;font-size:14px}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}svg .grid{stroke:var(--line)}svg .axis{stroke:var(--soft)}
.one{fill:var(--one)}.two{fill:var(--two)}.three{fill:var(--three)}.bad{fill:var(--bad)}
circle{fill-opacity:.55}.fill{fill-opacity:.18}.line{fill:none;stroke-width:1.5}
.one.line{stroke:var(--one)}.two.line{stroke:var(--two)}
line.rule{stroke:var(--ink);stroke-dasharray:3 3}svg text.rule{fill:var(--ink)}
svg text.rule,svg text.limit{paint-order:stroke;stroke:var(--card);stroke-width:3px}
line.limit{stroke:var(--bad)}svg text.limit{fill:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:separate;border-spacing:0;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;text-align:right;border-bottom:1px solid var(--line)}tr:last-child td{border-bottom:0}
th:first-child,td:first-child,.errors :is(th,td):last-child{text-align:left}th{color:var(--soft);font-weight:500}
@media (max-width:560px){svg text{font-size:15px}body{padding:20px 12px 32px}
table{font-size:13px}th,td{padding:6px 5px}td:first-child{min-width:124px}}
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """`style`: additional CSS of this page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>{body}</body></html>\n"
    )


def tiles(rows: Iterable[tuple[str, str]]) -> str:
    """The headline numbers."""
    shown = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b></div>' for name, value in rows
    )
    return f'<div class="tiles">{shown}</div>'


def table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def plots(drawn: Iterable[str]) -> str:
    """Plots side by side where there is room."""
    return f'<div class="plots">{"".join(drawn)}</div>'
