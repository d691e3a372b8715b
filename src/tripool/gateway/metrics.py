"""Counters and histograms of one gateway, under its own names and under those that vLLM's dashboards read.

A request is counted once, when it ends; only the gaps between tokens are reported earlier, a handful at a time.
Backend statistics are read when Prometheus scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tripool.core import ServingStats, Usage
from tripool.gateway.record import Record

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_HISTOGRAMS: Sequence[tuple[str, str | None, Sequence[float], str]] = (
    ("time_to_first_token_seconds", "time_to_first_token_seconds", _SECONDS, "From the request's arrival."),
    ("inter_token_latency_seconds", "inter_token_latency_seconds", _GAPS, "Between two tokens of a choice."),
    ("request_seconds", "e2e_request_latency_seconds", _SECONDS, "From a request's arrival to its last byte."),
    ("gateway_seconds", None, _SECONDS, "Reading, tokenising and submitting."),
    ("queue_seconds", "request_queue_time_seconds", _SECONDS, "Until the first work on a request."),
    ("lookup_seconds", None, _SECONDS, "Lookup in the cache pool."),
    ("prefill_seconds", "request_prefill_time_seconds", _SECONDS, "From the first work to the first token."),
    ("transfer_seconds", None, _SECONDS, "KV transfer between workers."),
    ("decode_seconds", "request_decode_time_seconds", _SECONDS, "After the first token."),
    ("prompt_tokens_per_request", "request_prompt_tokens", _TOKENS, "Prompt tokens of a request."),
    ("completion_tokens_per_request", "request_generation_tokens", _TOKENS, "Generated tokens of a request."),
    ("max_tokens_per_request", "request_max_num_generation_tokens", _TOKENS, "Most tokens that it may generate."),
)

_COUNTERS: Sequence[tuple[str, Sequence[str], str]] = (
    ("prompt_tokens", ("prompt_tokens", "prefix_cache_queries"), "Prompt tokens."),
    ("cached_prompt_tokens", ("prompt_tokens_cached", "prefix_cache_hits"), "Those found in the prefix cache."),
    ("completion_tokens", ("generation_tokens",), "Generated tokens."),
)


class Histogram:
    """Buckets of one quantity. prometheus-client's own takes a lock for every value."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, help_text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        return histogram_family(name, help_text, labels, self._bounds, self._counts, self._sum)


def histogram_family(
    name: str, help_text: str, labels: dict[str, str], bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """`counts`: of each bucket, one more than bounds; `total`: the sum of all values."""
    family = HistogramMetricFamily(name, help_text, labels=list(labels))
    buckets, num_values = [], 0
    for bound, count in zip([*map(float, bounds), float("inf")], counts, strict=True):
        num_values += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(num_values)))
    family.add_metric(list(labels.values()), buckets, total)
    return family


class Metrics(Collector):
    """One per model of an application. Used from the event loop only."""

    def __init__(
        self,
        model: str,
        stats: Callable[[], ServingStats],
        num_open: Callable[[], int],
        more: Callable[[dict[str, str]], Iterable[Metric]] | None = None,
        gateway: str = "",
    ) -> None:
        """`more`: further metrics of the backend, under the same labels. `gateway`: a label of what this one counts, if
        a server may have several; the backend's metrics are the same from each."""
        self._labels, self._backend_labels, self._more = {"model_name": model}, {"model_name": model}, more
        if gateway:
            self._labels = self._labels | {"gateway": gateway}
        self._stats, self._num_open = stats, num_open
        self._histograms = {name: Histogram(bounds) for name, _, bounds, _ in _HISTOGRAMS}
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[str] = Counter()
        self._connections_ended: Counter[str] = Counter()

    def refused(self, code: str) -> None:
        """Refused with this error code before any token."""
        self._refused[code] += 1

    def connection_ended(self, code: str) -> None:
        """Closed by the server, before or outside any request."""
        self._connections_ended[code] += 1

    def ended(self, record: Record) -> None:
        self._requests[(record.api, record.state)] += 1
        if not record.keyed:
            self.counted(record.usages)
        for usage in record.usages:
            self._observe("prompt_tokens_per_request", usage.prompt_tokens)
            self._observe("completion_tokens_per_request", usage.completion_tokens)
        if record.max_tokens is not None:
            self._observe("max_tokens_per_request", record.max_tokens)
        if record.state == "finished":
            self._finished.update(record.finish_reasons)
        if record.has_tokens and not record.background:
            stages = record.stages_us()
            self._observe("time_to_first_token_seconds", record.first_token_us / 1e6)
            self._observe("request_seconds", sum(stages.values()) / 1e6)
            for name, microseconds in stages.items():
                self._observe(f"{name}_seconds", microseconds / 1e6)

    def counted(self, usages: Iterable[Usage]) -> None:
        for usage in usages:
            self._totals["prompt_tokens"] += usage.prompt_tokens
            self._totals["cached_prompt_tokens"] += usage.cached_tokens
            self._totals["completion_tokens"] += usage.completion_tokens

    def gaps(self, gaps_s: Iterable[float]) -> None:
        """Gaps between tokens."""
        observe = self._histograms["inter_token_latency_seconds"].observe
        for gap_s in gaps_s:
            observe(gap_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def describe(self) -> Iterable[Metric]:
        """Empty: the names are this class's own, and a scrape asks the backend."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self.own()
        yield from self.of_backend()

    def own(self) -> Iterator[Metric]:
        for name, alias, _, help_text in _HISTOGRAMS:
            for full in _names(name, [alias] if alias else []):
                yield self._histograms[name].family(full, help_text, self._labels)
        for name, aliases, help_text in _COUNTERS:
            for full in _names(name, aliases):
                yield self._family(CounterMetricFamily, full, help_text, [((), self._totals[name])])
        yield from self._requests_families()

    def of_backend(self) -> Iterator[Metric]:
        yield from self._backend_families(self._stats())
        if self._more is not None:
            yield from self._more(self._backend_labels)

    def _requests_families(self) -> Iterator[Metric]:
        by_state = list(self._requests.items())
        ended = [((reason,), count) for reason, count in self._finished.items()]
        refused = [((code,), count) for code, count in self._refused.items()]
        cut = [((code,), count) for code, count in self._connections_ended.items()]
        counters: tuple[tuple[str, str, list[tuple[Any, int]], tuple[str, ...]], ...] = (
            ("tripool_requests", "Requests by final state.", by_state, ("api", "state")),
            ("tripool_requests_refused", "Refused requests by error code.", refused, ("code",)),
            ("tripool_connections_ended", "Connections closed by the server.", cut, ("code",)),
            ("tripool_choices_finished", "Finished choices.", ended, ("reason",)),
            ("vllm:request_success", "Finished choices.", ended, ("finished_reason",)),
        )
        for name, help_text, samples, labels in counters:
            yield self._family(CounterMetricFamily, name, help_text, samples, labels)
        yield self._family(GaugeMetricFamily, "tripool_requests_open", "Open requests.", [((), self._num_open())])

    def _backend_families(self, stats: ServingStats) -> Iterator[Metric]:
        gauges: tuple[tuple[str, Sequence[str], float], ...] = (
            ("choices_running", ("num_requests_running",), stats.running),
            ("choices_waiting", ("num_requests_waiting",), stats.waiting),
            ("kv_usage_ratio", ("kv_cache_usage_perc",), stats.kv_usage),
            ("stalled_seconds", (), stats.stalled_s),
            ("slo_ceiling_choices", (), stats.slo_ceiling or 0),
            ("slo_held_back", (), float(stats.slo_held_back)),
            ("predicted_step_seconds", (), stats.predicted_step_ms / 1e3),
            ("predicted_step_error_seconds", (), stats.step_error_ms / 1e3),
        )
        counters: tuple[tuple[str, Sequence[str], float], ...] = (
            ("steps", (), stats.num_steps),
            ("preemptions", ("num_preemptions",), stats.num_preemptions),
            ("draft_tokens", ("spec_decode_num_draft_tokens", "spec_decode_num_drafts"), stats.num_drafted),
            ("accepted_draft_tokens", ("spec_decode_num_accepted_tokens",), stats.num_accepted),
            ("slos_given_up", (), stats.num_slos_given_up),
        )
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, aliases, value in rows:
                for full in _names(name, aliases):
                    family = kind(full, "Of the backend.", labels=list(self._backend_labels))
                    family.add_metric(list(self._backend_labels.values()), value)
                    yield family

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        help_text: str,
        samples: Iterable[tuple[tuple[str, ...], float]],
        labels: Sequence[str] = (),
    ) -> Metric:
        family = kind(name, help_text, labels=[*self._labels, *labels])
        for values, value in samples:
            family.add_metric([*self._labels.values(), *values], value)
        return family


class _Merged(Collector):
    """Each metric once, with the samples of every model."""

    def __init__(self, several: Iterable[Iterable[Metric]]) -> None:
        self._several = several

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metrics in self._several:
            for family in metrics:
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


def scrape_own(several: Sequence[Metrics]) -> str:
    """What this gateway counts, in Prometheus's text format."""
    return _text(one.own() for one in several)


def scrape(several: Sequence[Metrics], others: Iterable[str] = ()) -> str:
    """All, with what other gateways count (`scrape_own`)."""
    samples: dict[str, tuple[str, list[str]]] = {}
    for text in (scrape_own(several), *others, _text(one.of_backend() for one in several)):
        for block in text.split("# HELP ")[1:]:
            about, kind, *lines = block.rstrip("\n").split("\n")
            samples.setdefault(about.partition(" ")[0], (f"# HELP {about}\n{kind}", []))[1].extend(lines)
    return "".join("\n".join([head, *lines, ""]) for head, lines in samples.values())


def _text(several: Iterable[Iterable[Metric]]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(several))
    return generate_latest(registry).decode()


def _names(name: str, aliases: Iterable[str]) -> list[str]:
    return [f"tripool_{name}", *(f"vllm:{alias}" for alias in aliases)]
