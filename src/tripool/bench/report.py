"""A run as data: settings, results, and every request. The JSON file and the HTML page are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tripool.bench.samples import Sample
from tripool.bench.summary import Goodput, Summary, Timeline

_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of the run, for the reader of the report."""

    url: str
    model: str
    endpoint: str
    workload: str
    """Which prompts: "conversation_trace.jsonl × 0.25 tokens", "512 in, 128 out"."""
    load: str
    """How they arrive: "trace times × 2", "Poisson 8/s", "32 at once"."""
    requests: int
    seed: int
    began: str
    """Date and time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    asked: RunSettings
    summary: Summary
    timeline: Timeline
    samples: Sequence[Sample]
    goodput: Goodput | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "asked": asdict(self.asked),
            "goodput_limits_ms": dict(self.goodput.limits_ms) if self.goodput is not None else None,
            "summary": asdict(self.summary),
            "timeline": asdict(self.timeline),
            "requests": [_row(sample) for sample in sorted(self.samples, key=lambda sample: sample.index)],
        }


def _row(sample: Sample) -> dict[str, Any]:
    times = ("due_s", "sent_s", "end_s", "ttft_s", "tpot_s")
    counts = ("input_tokens", "output_tokens", "prompt_tokens", "cached_tokens", "completion_tokens")
    return {
        "index": sample.index,
        **{name: _rounded(getattr(sample, name)) for name in times},
        **{name: getattr(sample, name) for name in counts},
        "events": len(sample.events_s),
        "error": sample.error,
        "detail": sample.detail,
    }


def _rounded(seconds: float | None) -> float | None:
    """Rounded to a microsecond, the resolution of the clock."""
    return None if seconds is None else round(seconds, _DIGITS)


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """Headline numbers as (name, value); the table and the page show the same."""
    summary = report.summary
    rows = [
        ("served", f"{summary.completed:,} of {report.asked.requests:,}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("requests", f"{summary.requests_per_s:,.2f} /s"),
        ("output", f"{summary.output_tokens_per_s:,.0f} tokens/s"),
        ("input + output", f"{summary.total_tokens_per_s:,.0f} tokens/s"),
        ("open at once", f"{summary.mean_concurrency:,.1f} on average"),
    ]
    if summary.cached_tokens is not None:
        share = summary.cached_tokens / max(summary.prompt_tokens, 1)
        rows.append(("prompt from cache", f"{share:.1%} of {summary.prompt_tokens:,}"))
    if summary.good is not None and summary.goodput_per_s is not None:
        share = summary.good / max(summary.completed + summary.failed, 1)
        rows.append((f"goodput ({report.goodput})", f"{summary.goodput_per_s:,.2f} /s, {share:.1%}"))
    if summary.failed:
        rows.append(("failed", f"{summary.failed:,}"))
    if summary.cancelled:
        rows.append(("ended early", f"{summary.cancelled:,} were still open"))
    return rows
