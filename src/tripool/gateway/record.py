"""Record of a generation request: its times, tokens and outcome. No prompt and no answer.

All times are of one clock, read only here. Stages are whole microseconds and the last one is the remainder, so they add
up to the total exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from tripool.answer import Answer
from tripool.core import Stages, TokenEvent, Usage
from tripool.gateway.backend import Facts
from tripool.gateway.job import Job
from tripool.token_stream import Tally

State = Literal["open", "finished", "cancelled", "failed"]
MAX_KEPT = 1000
_GAPS_AT_ONCE = 64
_USED = ("cached_tokens", "completion_tokens", "draft_tokens", "accepted_draft_tokens")


class Record:
    """One job. Created when it has been parsed, `ended` once.

    `on_gaps` gets the gaps between tokens, a handful at a time.
    """

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float],
        *,
        received_s: float,
        created_s: int,
        on_gaps: Callable[[Sequence[float]], object],
    ) -> None:
        # Facts only, not the job itself: records outlive their requests, and prompts are long and private.
        self.id, self.request_id, self.key, self.api, self.stream = job.id, job.request_id, job.key, job.api, job.stream
        self.tenant, self.background = job.requests[0].slo.tenant, job.requests[0].slo.background
        self.keyed = job.keyed is not None
        """Its tokens are counted where its answer is kept, once for all who read it."""
        self.num_prompts, self.n = len(job.requests), job.requests[0].params.n
        self.max_tokens = job.requests[0].params.max_tokens
        self.prompt_tokens = sum(len(request.prompt_ids) for request in job.requests)
        self.state: State = "open"
        self.error_code: str | None = None
        self.usages: Sequence[Usage] = ()
        self.finish_reasons: Counter[str] = Counter()
        self.placements: dict[int, Facts] = {}
        """Facts of the backend, per prompt."""
        self.request_ids = tuple(request.id for request in job.requests)
        self.ask: Callable[[str], Awaitable[Facts]] | None = None
        """Asks a backend in another process about one of them."""
        self.look: Callable[[], dict[int, Facts]] | None = None
        """Asks the backend about prompts that are still open."""
        self._clock, self._on_gaps = clock, on_gaps
        self._received_s, self._created_s = received_s, created_s
        self._stages = Stages()
        self._late_transfer_s = 0.0
        self._first_s: float | None = None
        self._ended_s: float | None = None
        self._num_made = 0
        self._last_s: dict[tuple[str, int], float] = {}
        self._gaps_s: list[float] = []
        self._gap_sum_s, self._num_gaps = 0.0, 0

    @property
    def has_tokens(self) -> bool:
        """Whether tokens were generated, read by the client or not."""
        return self._first_s is not None or self._num_made > 0

    def token(self, event: TokenEvent) -> None:
        """Called for every token: no more than a clock, a dict and a list."""
        now_s = self._clock()
        choice = (event.request_id, event.choice)
        last_s = self._last_s.get(choice)
        if last_s is not None:
            self._gaps_s.append(now_s - last_s)
            if len(self._gaps_s) == _GAPS_AT_ONCE:
                self._report_gaps()
        self._last_s[choice] = now_s
        if event.stages is not None:
            self._learn(event.stages, now_s)
        elif self._first_s is None:
            self._first_s = now_s

    def _learn(self, stages: Stages, now_s: float) -> None:
        """The client waited for the stages of the choice whose token came first."""
        if self._first_s is None:
            self._first_s, self._stages = now_s, stages
        elif not self._stages.transfer_s:
            self._late_transfer_s = max(self._late_transfer_s, stages.transfer_s)

    def _report_gaps(self) -> None:
        self._on_gaps(self._gaps_s)
        self._gap_sum_s += sum(self._gaps_s)
        self._num_gaps += len(self._gaps_s)
        self._gaps_s.clear()

    def ended(
        self, state: State, answers: Sequence[Answer], error_code: str | None = None, tally: Tally | None = None
    ) -> None:
        """An answer that its client did not read to its end counts with all that was generated for it."""
        tally = tally or Tally()
        self._ended_s = self._clock()
        self.state, self.error_code = state, error_code
        self.usages = [answer.usage if state == "finished" else _made(answer, tally) for answer in answers]
        self._num_made = sum(tally.num_made.values())
        self.finish_reasons = Counter(reason for answer in answers for reason in answer.finish_reasons)
        self._report_gaps()
        self._last_s = {}

    @property
    def first_token_us(self) -> int:
        return self._spans_us()[0]

    def _spans_us(self) -> tuple[int, int]:
        """Before and after the first token."""
        end_s = self._clock() if self._ended_s is None else self._ended_s
        first_s = end_s if self._first_s is None else self._first_s
        before = max(0, round((first_s - self._received_s) * 1e6))
        return before, max(0, round((end_s - first_s) * 1e6))

    def stages_us(self) -> dict[str, int]:
        """In order of time; they add up to the time so far."""
        before, after = self._spans_us()
        staged, left = self._stages, before
        stages = {}
        for name in ("queue", "lookup", "prefill", "transfer"):
            # Another process's clock may run ahead: a stage cannot be longer than what passed here.
            stages[name] = min(max(0, round(getattr(staged, f"{name}_s") * 1e6)), left)
            left -= stages[name]
        late = min(max(0, round(self._late_transfer_s * 1e6)), after)
        stages["transfer"] += late
        return {"gateway": left, **stages, "decode": after - late}

    def timing(self) -> dict[str, float]:
        """In milliseconds, as answers show it."""
        stages = self.stages_us()
        shown = {name: us / 1e3 for name, us in stages.items()}
        shown["first_token"] = self.first_token_us / 1e3
        shown["per_token"] = round(self._gap_sum_s / self._num_gaps * 1e3, 3) if self._num_gaps else 0.0
        shown["total"] = sum(stages.values()) / 1e3
        return shown

    def facts(self) -> dict[str, Any]:
        """Shown in an answer beside its usage. Once ended."""
        return {"request_id": self.request_id, "timing": self.timing()}

    def used(self, name: str) -> int:
        """A field of `Usage`, of all prompts together."""
        return sum(getattr(usage, name) for usage in self.usages)

    async def learn(self) -> None:
        """Ask a backend in another process where the request ran. Raises if none answers."""
        for position, request_id in enumerate(self.request_ids if self.ask is not None else ()):
            facts = await self.ask(request_id) if self.ask is not None else {}
            if facts:
                self.placements[position] = facts

    def explain(self) -> dict[str, Any]:
        placements = {**(self.look() if self.look is not None else {}), **self.placements}
        return {
            "id": self.id,
            "object": "request.explanation",
            "request_id": self.request_id,
            "key": self.key,
            "created": self._created_s,
            "api": self.api,
            "stream": self.stream,
            "state": self.state,
            "error": self.error_code,
            "prompts": self.num_prompts,
            "n": self.n,
            "prompt_tokens": self.prompt_tokens,
            **{name: self.used(name) for name in _USED},
            "finish_reasons": dict(self.finish_reasons),
            "timing": self.timing(),
            "placement": [dict(placements[i]) for i in sorted(placements)],
        }


def _made(answer: Answer, tally: Tally) -> Usage:
    usage, request_id = answer.usage, answer.request.id
    num_made = tally.num_made.get(request_id, 0)
    if num_made <= usage.completion_tokens:
        return usage
    return replace(usage, completion_tokens=num_made, cached_tokens=tally.num_cached[request_id])


class Journal:
    """The last requests, by the id of the request or of its answer. Of two with the same id, the later.

    Tenants choose their ids: one tenant's ids neither find nor hide another's requests. When there are too many
    records, the oldest of the tenant with most is dropped.
    """

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._records: dict[str, Record] = {}
        """In order of time, as are those of each tenant."""
        self._by_tenant: dict[str, dict[str, Record]] = {}
        self._names: dict[tuple[str, str], str] = {}
        """By tenant and id."""

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, record: Record) -> None:
        self._records[record.key] = record
        self._by_tenant.setdefault(record.tenant, {})[record.key] = record
        for name in (record.id, record.request_id):
            self._names[record.tenant, name] = record.key
        while len(self._records) > self._max_kept:
            self._forget_one()

    def _forget_one(self) -> None:
        tenant = max(self._by_tenant, key=lambda name: len(self._by_tenant[name]))
        of_tenant = self._by_tenant[tenant]
        old_key = next(iter(of_tenant))
        old = of_tenant.pop(old_key)
        del self._records[old_key]
        if not of_tenant:
            del self._by_tenant[tenant]
        for name in (old.id, old.request_id):
            if self._names.get((tenant, name)) == old_key:
                del self._names[tenant, name]

    def find(self, name: str, tenant: str = "") -> Record | None:
        key = self._names.get((tenant, name))
        return None if key is None else self._records[key]

    def find_anyones(self, name: str) -> Record | None:
        """For the operator."""
        return next(
            (record for record in reversed(self._records.values()) if name in (record.id, record.request_id)), None
        )
