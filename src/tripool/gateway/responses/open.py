"""A response while it is generated: how it is found, cancelled, and kept in the store at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tripool.gateway.job import Job
from tripool.gateway.respond import Formatter, encode
from tripool.gateway.responses.output import OutputItem
from tripool.gateway.responses.parse import Shown
from tripool.gateway.responses.respond import ResponsesFormatter
from tripool.gateway.responses.store import ResponseStore, Stored, with_ids
from tripool.text import Tokenizer


def response_formatter(
    job: Job, shown: Shown, tokenizer: Tokenizer, store: ResponseStore, *, model: str, created_s: int
) -> ResponsesFormatter:
    """Keeps the response in the store before its client has all of it: the next request may follow at once."""
    tenant = job.requests[0].slo.tenant
    previous = shown.fields["previous_response_id"]
    store.used(tenant, previous)

    def keep(response: bytes, output: Sequence[OutputItem]) -> None:
        store.ended(tenant, job.id)
        if shown.stores and store.is_on:
            items = encode(with_ids(shown.items, job.key))
            store.keep(tenant, job.id, Stored(response, items, tuple(item.id for item in output), previous))
        elif shown.stores and store.recent is not None:
            store.recent.keep(tenant, ((item.id, b"".join(item.pieces("completed"))) for item in output))

    stored = shown.stores and store.is_on
    return ResponsesFormatter(job, shown, tokenizer, model=model, created_s=created_s, stored=stored, keep=keep)


class _Running:
    """An `OpenResponse`."""

    def __init__(self, formatter: ResponsesFormatter, cancel: Callable[[], None]) -> None:
        self.snapshot, self.cancel = formatter.snapshot, cancel


@contextmanager
def opened(job: Job, formatter: Formatter, store: ResponseStore, cancel: Callable[[str], object]) -> Iterator[None]:
    """While a job runs; `cancel` ends one of its requests. Jobs of other APIs cannot be found by their id."""
    if not isinstance(formatter, ResponsesFormatter):
        yield
        return

    def cancel_all() -> None:
        for request in job.requests:
            cancel(request.id)

    with store.opened(job.requests[0].slo.tenant, job.id, _Running(formatter, cancel_all)):
        yield
