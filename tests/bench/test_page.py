"""The report: a page that needs nothing else and lets nothing through."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from tripool.bench import Goodput, Sample, summarise
from tripool.bench.page import render_page
from tripool.bench.report import Report, RunSettings
from tripool.bench.summary import timeline

from .made_samples import made


def report(samples: list[Sample], *, model: str = "m", goodput: str | None = "ttft:500,tpot:50") -> Report:
    asked = RunSettings(
        url="http://u", model=model, endpoint="chat", workload="w", load="l", requests=9, seed=0, began="today"
    )
    limits = Goodput.parse(goodput) if goodput else None
    duration_s = max([0.0, *(sample.end_s for sample in samples)])
    summary = summarise(samples, duration_s, goodput=limits)
    return Report(asked=asked, summary=summary, timeline=timeline(samples, duration_s), samples=samples, goodput=limits)


SAMPLES = [
    made(i, sent_s=i * 0.1, events_s=[i * 0.1 + 0.2, i * 0.1 + 0.24], prompt_tokens=8, cached_tokens=2)
    for i in range(30)
] + [made(30, sent_s=1.0, end_s=1.5, error="http 429", detail="<b>full</b>")]


class Reader(HTMLParser):
    """Counts elements and checks that every one is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attrs}
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_a_page_with_everything():
    page = render_page(report(SAMPLES))
    found = read(page)
    assert found.counts["svg"] == 6
    assert found.counts["circle"] == 2 * 30 + 1
    assert found.counts["rect"] >= 2
    assert "http 429" in found.text and "<b>full</b>" in found.text
    assert "prefers-color-scheme:dark" in page
    assert not re.search(r"https?://(?!u\b)|@import|url\(", page), "the page must need nothing from elsewhere"


def test_names_cannot_write_the_page():
    found = read(render_page(report(SAMPLES, model="<script>alert(1)</script>")))
    assert "script" not in found.counts
    assert "<script>alert(1)</script>" in found.text


def test_a_page_of_nothing():
    assert read(render_page(report([], goodput=None))).counts["svg"] == 2


def test_a_page_of_failures():
    assert "rect" not in read(render_page(report([SAMPLES[-1]]))).counts


def test_many_requests_are_thinned_out():
    samples = [made(i, events_s=[0.5]) for i in range(7000)]
    found = read(render_page(report(samples)))
    assert found.counts["circle"] <= 2 * 3000
    assert "one of 3" in found.text


def test_the_json_holds_every_request():
    told = json.loads(json.dumps(report(list(reversed(SAMPLES))).as_json()))
    assert [row["index"] for row in told["requests"]] == list(range(31))
    assert told["requests"][3]["ttft_s"] == pytest.approx(0.2)
    assert told["requests"][30]["error"] == "http 429"
    assert told["summary"]["good"] == 30 and told["goodput_limits_ms"] == {"ttft": 500, "tpot": 50}
