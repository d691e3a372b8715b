"""Answers under idempotency keys: which are kept, for how long and for whom, and who reads them. Pure.

| an answer is | until |
|---|---|
| claimed: its key has come, its request not yet | `claim_s` |
| read | its end, or its last reader has gone |
| alone: it is computed, and nobody reads | `alone_s`; then it is cancelled, and kept as far as it is |
| ended, whole or not | `kept_s` |

A tenant's answers are bounded in bytes, and all together are. Beyond that the tenant with most loses its oldest ones:
ended, then claimed, then alone; then the largest that is read is dropped: its readers go on, and nobody else can join.

Requests have the ids with which they came first. Every reader has an id of its own, and the line of its gateway.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tripool.core import Request, TokenEvent
from tripool.router.held import Held, Progress, Taken
from tripool.router.kept_types import (
    EACH_BYTES,
    AnswerChanged,
    AnswerNotKept,
    Claim,
    Count,
    Kept,
    KeptLimits,
    Keyed,
    KeyReused,
    Name,
    Part,
    Start,
    State,
    count_of,
)
from tripool.tenants import Tenant


class KeptAnswers:
    """What is left to be done by the caller is in `cancels`, (model, request id) of what is computed for nobody any
    more, and in `counts`, usage to be logged."""

    def __init__(self, limits: KeptLimits | None = None) -> None:
        self.limits = limits or KeptLimits()
        self.cancels: list[tuple[str, str]] = []
        self.counts: list[Count] = []
        self.changed: dict[Name, None] = {}
        """For the log: since it was last written."""
        self.removed: list[Name] = []
        self._kept: dict[Name, Kept] = {}
        self._by_request: dict[str, Part] = {}
        self._by_reader: dict[str, Part] = {}
        self._idle: dict[tuple[State, str], OrderedDict[Name, Kept]] = {}
        """Those that are not read, by state and tenant, the oldest first."""
        self._num_bytes: Counter[str] = Counter()
        """By tenant."""
        self._total_bytes = 0
        self.now_s = 0.0
        """As of the last call that had the time."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept.values())

    def get(self, name: Name) -> Kept | None:
        return self._kept.get(name)

    def of_request(self, request_id: str) -> Part | None:
        """By its own id."""
        return self._by_request.get(request_id)

    def of_reader(self, reader_id: str) -> Part | None:
        return self._by_reader.get(reader_id)

    # ---- keys and requests ------------------------------------------------------------------------------------------

    def repeats(self, tenant: str, name: str) -> bool:
        """Whether a request with this key comes again, and is free."""
        kept = self._kept.get((tenant, name))
        return kept is not None and kept.num_claims <= self.limits.free_repeats

    def claim(self, keyed: Keyed, tenant: Tenant, now_s: float) -> Claim:
        """Before the request is read. Raises KeyReused or AnswerNotKept."""
        self.now_s = now_s
        kept = self._found(keyed, tenant)
        if kept.dropped:
            hint = "wait for its end, or use another key"
            raise AnswerNotKept("the answer under this idempotency key is too large to be read twice", hint=hint)
        kept.num_claims += 1
        self._settle(kept, renews=True)
        return Claim(kept.keyed.created_s, kept.model)

    def submit(
        self, keyed: Keyed, tenant: Tenant, model: str, requests: Sequence[Request], line: bytes
    ) -> tuple[list[Part], list[Start]]:
        """The prompts of one HTTP request, whose ids are their reader's from now on. Returns its parts, and what has to
        be computed: all of it, or of what was cut off the rest. Without a start the answer is there or under way."""
        kept = self._found(keyed, tenant)
        if kept.dropped or (kept.parts and len(kept.parts) != len(requests)):
            raise AnswerNotKept("the answer under this idempotency key cannot be read again", hint="use another key")
        parts, starts = [], []
        for place, request in enumerate(requests):
            part = kept.parts.get(place)
            is_new = part is None
            if part is None:
                part = self._add(kept, model, place, request)
            parts.append(part)
            self._attach(part, request.id, line)
            if not (part.running or part.progress.done):
                starts.append(self._start(part, request, None if is_new else part.progress.held()))
        self._settle(kept)
        self._make_room(kept)
        return parts, starts

    def rejoin(
        self, keyed: Keyed, tenant: Tenant, model: str, place: int, request: Request, held: Held, line: bytes
    ) -> tuple[Part, list[Start]]:
        """After a takeover: a reader whose gateway has so much of the answer. Raises AnswerChanged or AnswerNotKept."""
        kept = self._found(keyed, tenant)
        part = kept.parts.get(place)
        if part is None:
            part = self._add(kept, model, place, request)
        elif kept.dropped:  # it goes on from where its first reader is
            raise AnswerNotKept("the answer under this idempotency key was too large to be kept", hint="ask again")
        if not kept.dropped and not part.progress.add(held):
            raise AnswerChanged("the answer was computed again, and is another one", hint="ask without a key")
        part.num_made = max(part.num_made, held.num_tokens)
        if part.running and part.progress.done:  # its last tokens were on their way to this reader
            self.cancels.append((kept.model, part.request_id))
            part.running, part.request = False, None
        self._attach(part, request.id, line)
        starts = []
        if not (part.running or part.progress.done):
            starts.append(self._start(part, request, held if kept.dropped else part.progress.held()))
        self._resize(kept)
        self._settle(kept)
        self._make_room(kept)
        return part, starts

    def _found(self, keyed: Keyed, tenant: Tenant) -> Kept:
        kept = self._kept.get((tenant.name, keyed.name))
        if kept is None:
            kept = self._kept[tenant.name, keyed.name] = Kept(keyed, tenant)
            self._grow(kept, EACH_BYTES)
            self._note(kept)
            self._settle(kept, renews=True)
            self._make_room(kept)
        elif kept.keyed.answer != keyed.answer:
            hint = "a key is for one request; use a new one for another"
            raise KeyReused("this idempotency key was used with another request", hint=hint, param="Idempotency-Key")
        return kept

    def _add(self, kept: Kept, model: str, place: int, request: Request) -> Part:
        progress = Progress(request.params.n, keeps_scores=True)
        part = Part(kept, place, request.id, request, progress, len(request.prompt_ids))
        kept.model, kept.parts[place] = model, part
        self._by_request[request.id] = part
        self._resize(kept)
        return part

    def _attach(self, part: Part, reader_id: str, line: bytes) -> None:
        assert reader_id not in self._by_reader, "a reader's id is in use"
        if not part.progress.done:
            part.readers[reader_id] = line
            self._by_reader[reader_id] = part

    def _start(self, part: Part, request: Request, held: Held | None) -> Start:
        part.request = replace(request, id=part.request_id)
        part.running, part.resumes, part.resubmitted = True, False, True
        self._resize(part.kept)
        return Start(part, part.request, held)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def take(self, part: Part, event: TokenEvent) -> Taken:
        """A token of a request that runs: whether its readers get it. What contradicts what they have ends it."""
        kept, progress = part.kept, part.progress
        if kept.dropped:
            progress.skip(event)
        else:
            taken = progress.take(event)
            if taken is not Taken.NEW:
                return taken
            num_bytes = 4 if event.logprobs is None else 28 + 24 * len(event.logprobs.top)
            self._grow(kept, num_bytes)
            self.changed[kept.name] = None
            if progress.num_tokens + progress.num_scores > self.limits.answer_tokens:
                self._drop(kept)
            elif self._is_full(kept.tenant.name):
                self._make_room(kept)
        part.num_made += 1
        return Taken.NEW

    def ended(self, part: Part) -> None:
        """Its readers have the last token of it."""
        for reader_id in part.readers:
            del self._by_reader[reader_id]
        part.readers.clear()
        part.running, part.request = False, None
        self._resize(part.kept)
        self._settle(part.kept)

    def stopped(self, reader_id: str, lengths: Sequence[int]) -> Part | None:
        """A reader found its end, which the engine does not know. The other readers will find it, too."""
        part = self._by_reader.get(reader_id)
        if part is None or len(lengths) != len(part.progress.tokens):
            return None
        if not part.kept.dropped:
            part.progress.stop(lengths)
        part.num_made = sum(lengths)
        del self._by_reader[reader_id], part.readers[reader_id]
        if part.running:
            self.cancels.append((part.kept.model, part.request_id))
        part.running, part.request = False, None
        self._resize(part.kept)
        self._settle(part.kept)
        return part

    def failed(self, part: Part) -> None:
        """Its readers know. What there is of it is kept; if there is nothing, its key is as if it had never come."""
        kept = part.kept
        for reader_id in part.readers:
            del self._by_reader[reader_id]
        part.readers.clear()
        part.running, part.request = False, None
        self._resize(kept)
        if not any(one.num_made or one.running or one.readers for one in kept.parts.values()):
            self._forget(kept)
        else:
            self._settle(kept)

    def left(self, reader_id: str) -> None:
        """It reads no more: its client hung up, or its gateway is gone."""
        part = self._by_reader.pop(reader_id, None)
        if part is not None:
            del part.readers[reader_id]
            self._settle(part.kept)

    # ---- time and room ----------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Start]:
        """Ends what is over. Returns what ran under another coordinator and goes on here, read or not."""
        self.now_s, limits, starts = now_s, self.limits, list[Start]()
        ages: dict[State, float] = {"claimed": limits.claim_s, "alone": limits.alone_s, "ended": limits.kept_s}
        for (state, _), idle in list(self._idle.items()):
            while idle and now_s - (kept := next(iter(idle.values()))).since_s >= ages[state]:
                if state == "alone":
                    self._give_up(kept)
                else:
                    self._forget(kept)
            if state == "alone":
                for kept in idle.values():
                    waits = [(part, part.request) for part in kept.parts.values() if part.resumes and part.request]
                    if waits and now_s - kept.since_s >= limits.rejoin_s:
                        starts += [self._start(part, request, part.progress.held()) for part, request in waits]
        return starts

    def _give_up(self, kept: Kept) -> None:
        """Computed for nobody for too long."""
        for part in kept.parts.values():
            if part.running:
                self.cancels.append((kept.model, part.request_id))
            part.running = part.resumes = False
            part.request = None
        self._resize(kept)
        self._settle(kept)

    def _is_full(self, tenant: str) -> bool:
        own, limits = self._num_bytes[tenant], self.limits
        return own > limits.tenant_bytes or self._total_bytes > limits.all_bytes

    def _make_room(self, spared: Kept) -> None:
        """`spared` has just come or grown: it goes last."""
        while True:
            tenant = spared.tenant.name
            if not self._is_full(tenant):
                return
            if self._num_bytes[tenant] <= self.limits.tenant_bytes:
                tenant = max(self._num_bytes, key=lambda name: self._num_bytes[name])
            victim = next((one for one in self._oldest(tenant) if one is not spared), None)
            if victim is not None:
                if victim.state == "alone":
                    self._give_up(victim)
                self._forget(victim)
                continue
            read = [one for one in self if one.tenant.name == tenant and not one.dropped and one.parts]
            if not read:
                return  # only what it takes to know of them
            self._drop(max(read, key=lambda one: one.num_bytes))

    def _oldest(self, tenant: str) -> Iterator[Kept]:
        """Those that may go first."""
        order: tuple[State, ...] = ("ended", "claimed", "alone")
        for state in order:
            yield from self._idle.get((state, tenant), OrderedDict[Name, Kept]()).values()

    def _drop(self, kept: Kept) -> None:
        """It is computed for its readers, and not kept."""
        kept.dropped = True
        for part in kept.parts.values():
            part.progress.clear()
        self._note(kept)
        self._resize(kept)
        self._settle(kept)

    def restore(self, kept: Kept, now_s: float) -> None:
        """As the log of another coordinator says it is: nothing of it is computed here, and nobody reads."""
        self.now_s = now_s
        self._kept[kept.name] = kept
        self._by_request |= {part.request_id: part for part in kept.parts.values()}
        self._resize(kept)
        self._settle(kept, renews=True)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _note(self, kept: Kept) -> None:
        self.changed[kept.name] = None

    def _grow(self, kept: Kept, num_bytes: int) -> None:
        kept.num_bytes += num_bytes
        self._total_bytes += num_bytes
        self._num_bytes[kept.tenant.name] += num_bytes
        if not self._num_bytes[kept.tenant.name]:
            del self._num_bytes[kept.tenant.name]

    def _resize(self, kept: Kept) -> None:
        num_bytes = EACH_BYTES + sum(part.num_bytes for part in kept.parts.values())
        self._grow(kept, num_bytes - kept.num_bytes)
        self._note(kept)

    def _settle(self, kept: Kept, *, renews: bool = False) -> None:
        """Its state, and since when. `renews`: its time begins anew."""
        if self._kept.get(kept.name) is not kept:
            return
        state = kept.state_now
        if state != kept.state or renews:
            self._leave_queue(kept)
            kept.state, kept.since_s = state, self.now_s
            if state != "read":
                self._idle.setdefault((state, kept.tenant.name), OrderedDict())[kept.name] = kept
        if kept.dropped and state == "alone":
            self._give_up(kept)
        elif state == "ended":
            count = count_of(kept)
            if count is not None:
                self.counts.append(count)
                self._note(kept)
            if kept.dropped:
                self._forget(kept)

    def _leave_queue(self, kept: Kept) -> None:
        key = kept.state, kept.tenant.name
        if key in self._idle:
            self._idle[key].pop(kept.name, None)
            if not self._idle[key]:
                del self._idle[key]

    def _forget(self, kept: Kept) -> None:
        self._leave_queue(kept)
        for part in kept.parts.values():
            self._by_request.pop(part.request_id, None)
        self._grow(kept, -kept.num_bytes)
        del self._kept[kept.name]
        self.changed.pop(kept.name, None)
        self.removed.append(kept.name)

    def check(self) -> None:
        """The invariants, in full."""
        num_bytes: Counter[str] = Counter()
        readers: dict[str, Part] = {}
        requests: dict[str, Part] = {}
        idle = {(k.state, k.tenant.name, k.name) for k in self if k.state != "read"}
        assert idle == {(*key, name) for key, some in self._idle.items() for name in some}, "a state without its queue"
        for some in self._idle.values():
            times = [kept.since_s for kept in some.values()]
            assert times == sorted(times), "a younger answer goes before an older one"
        for name, kept in self._kept.items():
            assert name == kept.name and kept.state == kept.state_now, f"{name}: {kept.state}, and {kept.state_now}"
            assert kept.num_bytes == EACH_BYTES + sum(part.num_bytes for part in kept.parts.values()), name
            num_bytes[kept.tenant.name] += kept.num_bytes
            for part in kept.parts.values():
                requests[part.request_id] = part
                readers |= dict.fromkeys(part.readers, part)
                assert not (part.running and part.progress.done), f"{name}: computed, and done"
                assert part.counted_tokens <= part.num_made, f"{name}: more is counted than was made"
            if kept.state == "ended":
                assert all(p.prompt_counted and p.counted_tokens == p.num_made for p in kept.parts.values()), name
        assert readers == self._by_reader and requests == self._by_request, "a reader or a request without its answer"
        assert +num_bytes == self._num_bytes, "bytes are not those of the answers"
        assert num_bytes.total() == self._total_bytes
        for tenant, own in num_bytes.items():
            held = [kept for kept in self if kept.tenant.name == tenant and kept.state == "read"]
            least = sum(kept.num_bytes for kept in held if kept.dropped) + EACH_BYTES
            assert own <= max(self.limits.tenant_bytes, least), f"too much is kept for '{tenant}'"
