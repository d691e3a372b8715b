"""What a scrape shows, read by Prometheus' own parser: our names, and those that other people's dashboards read."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.serving import GatedEngine

HELLO: Any = [{"role": "user", "content": "hello"}]
DASHBOARD = [
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
]
STAGES = ("gateway", "queue", "lookup", "prefill", "transfer", "decode")


def scrape(served: Any) -> dict[tuple[str, str], float]:
    """(sample, the label besides the model's name) -> value."""
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake"
            found[(sample.name, ",".join(labels.values()))] = sample.value
    return found


def test_every_request_is_counted_once(serve):
    with serve() as served:
        usages = [
            served.openai.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, seed=1, n=n).usage
            for n in (1, 2)
        ]
        list(served.openai.completions.create(model="fake", prompt="a", max_tokens=4, seed=1, stream=True))
        served.http.post("/v1/chat/completions", json={"messages": 5})
        served.wait_empty()
        found = scrape(served)
    tokens = sum(usage.completion_tokens for usage in usages) + 4
    prompts = sum(usage.prompt_tokens for usage in usages) + 1
    for ours, theirs, value in (
        ("tripool_completion_tokens_total", "vllm:generation_tokens_total", tokens),
        ("tripool_prompt_tokens_total", "vllm:prompt_tokens_total", prompts),
        ("tripool_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count", 3),
        ("tripool_request_seconds_count", "vllm:e2e_request_latency_seconds_count", 3),
        # One pause fewer than tokens, for each of four choices.
        ("tripool_inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_count", tokens - 4),
        ("tripool_completion_tokens_per_request_sum", "vllm:request_generation_tokens_sum", tokens),
        ("tripool_max_tokens_per_request_sum", "vllm:request_max_num_generation_tokens_sum", 14),
    ):
        assert found[(ours, "")] == found[(theirs, "")] == value, ours
    assert found[("vllm:request_success_total", "length")] == 4
    assert found[("tripool_requests_total", "chat,finished")] == 2
    assert found[("tripool_requests_total", "completion,finished")] == 1
    assert found[("tripool_requests_refused_total", "invalid_request")] == 1
    assert found[("tripool_steps_total", "")] >= 9
    for stage in STAGES:
        assert found[(f"tripool_{stage}_seconds_count", "")] == 3
    spent = sum(found[(f"tripool_{stage}_seconds_sum", "")] for stage in STAGES)
    assert spent == pytest.approx(found[("tripool_request_seconds_sum", "")])


def test_dashboards_find_their_names(serve):
    with serve() as served:
        served.openai.chat.completions.create(model="fake", messages=HELLO, max_tokens=2)
        served.wait_empty()
        names = {name for name, _ in scrape(served)}
    assert names >= set(DASHBOARD)


def test_two_applications_do_not_share_counters(serve):
    with serve() as one, serve() as other:
        one.openai.chat.completions.create(model="fake", messages=HELLO, max_tokens=2)
        one.wait_empty()
        assert scrape(one)[("tripool_completion_tokens_total", "")] == 2
        assert scrape(other)[("tripool_completion_tokens_total", "")] == 0


def test_an_open_request_shows(serve):
    engine = GatedEngine(free_steps=3)
    body = {"messages": HELLO, "ignore_eos": True, "stream": True}
    with serve(engine=engine) as served:
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # kept: an iterator that is dropped hangs up
            assert next(lines)
            found = scrape(served)
            assert found[("vllm:num_requests_running", "")] == found[("tripool_requests_open", "")] == 1
            assert 0 < found[("vllm:kv_cache_usage_perc", "")] <= 1
        engine.in_flight.set()
        assert engine.wait_idle()
