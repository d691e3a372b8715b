"""Small plots as inline SVG: axes with round numbers, bars, lines, points. Colours are CSS classes of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count as from_zero
from math import ceil, floor, log10

WIDTH, HEIGHT = 560, 240
_LEAST_SPAN = 1e-6
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 42
_LETTER, _ROW = 8.0, 17
"""Space for one letter and for one row of labels; on a narrow screen letters are larger (see `html`)."""


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, the last at or above `high`."""
    high = max(high, low + _LEAST_SPAN)
    span = high - low
    power = 10.0 ** floor(log10(span / most))
    step = next(s * power for s in (1, 2, 5, 10, 20) if span / (s * power) <= most)
    first = floor(low / step)
    return [round(k * step, 12) for k in range(first, first + ceil((high - first * step) / step - 1e-9) + 1)]


def label(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"


@dataclass
class Plot:
    """Data coordinates in, SVG out. Marks are drawn in the order in which they are added."""

    title: str
    x_label: str
    x_high: float
    y_high: float
    y_label: str = ""
    height: int = HEIGHT
    y_low: float | None = None
    """The y axis begins at or below this; None: at 0."""
    marks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._words: list[tuple[int, float, float]] = []
        """Row, left and right edge of the labels of rules."""
        self.x_ticks = round_ticks(0, self.x_high or 1)
        if self.y_low is None:
            self.y_ticks = round_ticks(0, self.y_high or 1, most=4)
        else:
            self.y_ticks = round_ticks(min(self.y_low, 0.0), max(self.y_high, 1e-6), most=5)

    def x(self, value: float) -> float:
        return _LEFT + value / self.x_ticks[-1] * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def bars(self, edges: Sequence[float], counts: Sequence[float], kind: str, hover: str) -> None:
        """`hover` is formatted with low, high and count."""
        for low, high, count in zip(edges, edges[1:], counts, strict=False):
            if count:
                left, top = self.x(low), self.y(count)
                width = max(self.x(high) - left - 1, 1)
                text = escape(hover.format(low=low, high=high, count=count))
                box = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{self.y(0) - top:.1f}"'
                self.marks.append(f'<rect class="{kind}" {box} rx="1"><title>{text}</title></rect>')

    def steps(self, slice_length: float, values: Sequence[float], end: float, kind: str) -> None:
        """One level per slice, filled down to the axis."""
        corners = []
        for index, value in enumerate(values):
            left, right = index * slice_length, min((index + 1) * slice_length, end)
            corners += [f"{self.x(left):.1f},{self.y(value):.1f}", f"{self.x(right):.1f},{self.y(value):.1f}"]
        outline = " ".join(corners)
        floor_line = f"{self.x(end):.1f},{self.y(0):.1f} {self.x(0):.1f},{self.y(0):.1f}"
        self.marks.append(f'<polygon class="{kind} fill" points="{outline} {floor_line}"/>')
        self.marks.append(f'<polyline class="{kind} line" points="{outline}"/>')

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """From point to point; nothing where there are none."""
        if corners := " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points):
            self.marks.append(f'<polyline class="{kind} line" points="{corners}"/>')

    def points(self, points: Iterable[tuple[float, float, str]], kind: str, radius: float = 3) -> None:
        """Points, each with its hover text."""
        for x, y, text in points:
            where = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}"'
            self.marks.append(f'<circle class="{kind}" {where}><title>{escape(text)}</title></circle>')

    def rule(self, value: float, text: str, kind: str = "rule") -> None:
        """A vertical line with a label at its top, in the first row where it overlaps no other label."""
        if not 0 <= value <= self.x_ticks[-1] * (1 + 1e-9):  # the largest value may be on the last tick
            return
        at, width = self.x(value), _LETTER * len(text)
        anchor, shift = ("end", -4) if at > WIDTH - 110 else ("start", 4)
        left = at + shift - (width if anchor == "end" else 0.0)
        row = next(
            row for row in from_zero() if all(row != r or left > b or left + width < a for r, a, b in self._words)
        )
        self._words.append((row, left - _LETTER, left + width + _LETTER))
        top = _TOP + _ROW * row
        self.marks.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{self.y(0):.1f}"/>')
        self.marks.append(
            f'<text class="{kind}" x="{at + shift:.1f}" y="{top + 9}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def across(self, value: float, kind: str) -> None:
        at = f'y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"'
        self.marks.append(f'<line class="{kind}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" {at}/>')

    def level(self, value: float, text: str, anchor: str = "end") -> None:
        """A horizontal line: a limit. `anchor`: start or end, where its label is."""
        if self.y_ticks[0] <= value <= self.y_ticks[-1]:
            self.across(value, "limit")
            x, y = (WIDTH - _RIGHT if anchor == "end" else _LEFT + 4), f"{self.y(value) - 4:.1f}"
            self.marks.append(f'<text class="limit" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def render(self) -> str:
        right, bottom = WIDTH - _RIGHT, self.height - _BOTTOM
        axes = []
        for tick in self.y_ticks:
            at = self.y(tick)
            axes.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            axes.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label(tick)}</text>')
        for tick in self.x_ticks:
            at = self.x(tick)
            axes.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            axes.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{label(tick)}</text>')
        axes.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle = (_LEFT + right) / 2
        axes.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{escape(self.x_label)}</text>')
        axes.append(f'<text x="{_LEFT - 6}" y="{_TOP - 12}" class="y-label">{escape(self.y_label)}</text>')
        body = "".join(axes) + "".join(self.marks)
        return (
            f'<figure><figcaption>{escape(self.title)}</figcaption><svg viewBox="0 0 {WIDTH} {self.height}" '
            f'role="img" aria-label="{escape(self.title)}">{body}</svg></figure>'
        )
