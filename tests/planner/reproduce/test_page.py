"""The page stands alone, shows every line and draws every published point. The document's tables are the code's."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.planner_tables import reproduce_document
from tripool.page.svg import HEIGHT, WIDTH
from tripool.planner.reproduce import cloudmatrix_figures, cloudmatrix_tables
from tripool.planner.reproduce.curves import Curve, Figure
from tripool.planner.reproduce.lines import tables_data
from tripool.planner.reproduce.page import draw, render_page

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reproduce.md"
TABLES, FIGURES = cloudmatrix_tables(), cloudmatrix_figures()
PAGE = render_page(TABLES, FIGURES)
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Cells of tables, and whether every tag that opens is closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


@pytest.fixture(scope="module")
def read() -> Reader:
    reader = Reader()
    reader.feed(PAGE)
    return reader


def test_the_page_needs_nothing_else(read) -> None:
    assert read.open == [] and read.links == []
    assert "http:" not in PAGE and "https:" not in PAGE and "url(" not in PAGE and "<script" not in PAGE


def test_every_line_is_on_the_page(read) -> None:
    names = [line.name for table in TABLES for line in table.lines]
    assert read.cells[::8] == names and len(read.cells) == 8 * len(names)
    assert PAGE.count("<figure>") == len(FIGURES)


def test_every_published_point_is_drawn_inside_its_plot() -> None:
    for figure in FIGURES:
        drawn = draw(figure)
        dots = re.findall(r'<circle class="\w+ dot" cx="([\d.]+)" cy="([\d.]+)"', drawn)
        assert len(dots) == sum(len(curve.published) for curve in figure.curves)
        corners = re.findall(r"([-\d.]+),([-\d.]+)", " ".join(re.findall(r'points="([^"]*)"', drawn)))
        assert drawn.count("<polyline") == sum(bool(curve.predicted) for curve in figure.curves)
        for x, y in (*dots, *corners):
            assert 58 <= float(x) <= WIDTH - 14 and 20 <= float(y) <= HEIGHT - 42


def test_an_axis_may_begin_below_zero() -> None:
    drawn = draw(Figure("t", "x", "y", (Curve("", ((0.0, -10.0), (10.0, 10.0)), ((5.0, 0.0),)),)))
    (middle,) = re.findall(r'cy="([\d.]+)"', drawn)
    low, high = re.findall(r'points="[\d.]+,([\d.]+) [\d.]+,([\d.]+)"', drawn)[0]
    assert float(high) < float(middle) < float(low)
    assert float(middle) == pytest.approx((float(low) + float(high)) / 2, abs=0.2)


def test_json_holds_every_line() -> None:
    told = json.loads(json.dumps(tables_data(TABLES)))
    lines = [line for table in told["tables"] for line in table["lines"]]
    assert len(lines) == sum(len(table.lines) for table in TABLES)
    for line in lines:
        if line["published"] is None or line["predicted"] is None:
            assert line["error"] is None
        elif line["error_is"] == "relative":
            assert line["error"] == pytest.approx(line["predicted"] / line["published"] - 1)


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert reproduce_document(text, TABLES) == text, "run: python bench/reproduce.py --document docs/reproduce.md"
    assert reproduce_document(text.replace("1,943", "1,944"), TABLES) == text
    with pytest.raises(AssertionError, match="no place"):
        reproduce_document("nothing", TABLES)
