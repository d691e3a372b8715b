"""Plots have sane axes, and nothing is drawn outside of them."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.page import Plot
from tripool.page.svg import HEIGHT, WIDTH, round_ticks


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_round_and_cover(high, most):
    ticks = round_ticks(0, high, most)
    assert ticks[0] == 0 and ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= most + 2
    step = ticks[1]
    assert float(f"{step:e}".partition("e")[0]) in (1, 2, 5)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=20))
def test_points_stay_inside(points):
    plot = Plot("t", "x", max(x for x, _ in points), max(y for _, y in points))
    plot.points([(x, y, "said") for x, y in points], "one")
    for mark in plot.marks:
        cx, cy = (float(number) for number in re.findall(r'c[xy]="([-\d.]+)"', mark))
        assert 0 <= cx <= WIDTH and 0 <= cy <= HEIGHT


def test_a_line_goes_through_its_points_and_none_has_no_line():
    plot = Plot("t", "x", 10, 10)
    plot.line([], "one")
    assert plot.marks == []
    plot.line([(0, 0), (5, 10), (10, 0)], "two")
    (mark,) = plot.marks
    corners = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", mark)]
    assert corners == [(plot.x(0), plot.y(0)), (plot.x(5), plot.y(10)), (plot.x(10), plot.y(0))]
    assert 'class="two line"' in mark


def test_words_on_a_plot_cannot_write_the_page():
    plot = Plot("<b>t</b>", "<i>x</i>", 1, 1, "<u>y</u>")
    plot.points([(0, 0, "</title><script>")], "one")
    plot.rule(0.5, "<em>p50</em>")
    plot.level(0.5, "<em>limit</em>")
    assert not re.search("<(b|i|u|em|script)>", plot.render())


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.text("ab 1", min_size=1, max_size=12)), min_size=1, max_size=8))
def test_words_of_rules_cover_no_others(rules):
    plot = Plot("t", "x", 100, 1)
    for value, said in rules:
        plot.rule(value, said)
    places = []
    for (_, said), mark in zip(rules, plot.marks[1::2], strict=True):
        x, y = (float(number) for number in re.findall(r' [xy]="([-\d.]+)"', mark))
        width = 6.0 * len(said)
        places.append((y, x - width if 'anchor="end"' in mark else x, x if 'anchor="end"' in mark else x + width))
    for number, (y, left, right) in enumerate(places):
        assert all(y != other or right <= a or b <= left for other, a, b in places[:number])
