"""Random lives of a coordinator's sessions: gateways and coordinators come and go, clients repeat their keys, and every
reader gets every token once."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tripool.core import Request, SamplingParams, TokenEvent
from tripool.errors import Overloaded, TripoolError
from tripool.router.gateway_session import GatewaySession, Resumption, Submission
from tripool.router.held import Held, HeldChoice, Taken
from tripool.router.kept import KeptAnswers
from tripool.router.kept_log import news, restore
from tripool.router.kept_types import Count, KeptLimits, Keyed
from tripool.router.replica import Record, Replica
from tripool.router.sessions import Failure, ForGateway, Sessions
from tripool.tenants import Tenant

LIMITS = KeptLimits(
    claim_s=3.0, alone_s=4.0, kept_s=8.0, rejoin_s=1.0, tenant_bytes=9000, all_bytes=20_000, answer_tokens=24
)
FOR_EVER = KeptLimits(
    claim_s=1e9, alone_s=1e9, kept_s=1e9, rejoin_s=1.0, tenant_bytes=2**30, all_bytes=2**30, answer_tokens=10**6
)
TENANTS = [Tenant(name=name, namespace=name) for name in "abc"]


def token_of(answer: str, place: int, choice: int, index: int) -> int:
    return random.Random(f"{answer}/{place}/{choice}/{index}").randrange(1000)


@dataclass
class Asked:
    """What a client asks for."""

    tenant: Tenant
    keyed: Keyed | None
    answer: str
    n: int
    lengths: tuple[int, ...]
    """Of each prompt's choices."""
    stop_at: int | None


class Service:
    """Computes one token when asked to. Stands for a `ModelService` with its workers."""

    def __init__(self, num_made: Counter[tuple[str, int]]) -> None:
        self.open: dict[str, tuple[Request, list[int]]] = {}
        self.num_made = num_made

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.open

    def submit(self, requests: Sequence[Request], tenant: Tenant, now_s: float) -> list[Any]:
        for request in requests:
            self.resume(request, tenant, Held((HeldChoice(()),) * request.params.n), now_s)
        return []

    def resume(self, request: Request, tenant: Tenant, held: Held, now_s: float) -> list[Any]:
        if request.id not in self.open:
            answer, place = request.namespace, request.public_tokens
            for i, choice in enumerate(held.choices):
                for index, token_id in enumerate(choice.tokens):
                    assert token_id == token_of(answer, place, i, index), "it goes on from what was never said"
            lengths = [len(choice.tokens) for choice in held.choices]
            assert any(length < request.seed for length in lengths), "what is done is computed again"
            self.open[request.id] = request, lengths
        return []

    def cancel(self, request_id: str, now_s: float) -> list[Any]:
        self.open.pop(request_id, None)
        return []

    def step(self, request_id: str, rng: random.Random) -> TokenEvent:
        request, lengths = self.open[request_id]
        choice = rng.choice([i for i, length in enumerate(lengths) if length < request.seed])
        index = lengths[choice]
        lengths[choice] += 1
        if all(length == request.seed for length in lengths):
            del self.open[request_id]
        answer, place = request.namespace, request.public_tokens
        self.num_made[answer, place] += 1
        finish = "length" if index + 1 == request.seed else None
        return TokenEvent(request_id, choice, index, token_of(answer, place, choice, index), finish)


@dataclass(eq=False)
class Client:
    asked: Asked
    number: int
    got: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    done: int = 0
    """Choices that ended."""
    error: TripoolError | None = None
    cut_off: bool = False

    @property
    def over(self) -> bool:
        return self.done == self.asked.n * len(self.asked.lengths) or self.error is not None or self.cut_off


class Gateway:
    def __init__(self, number: int, now_s: float) -> None:
        self.number, self.num_lines = number, 0
        self.session: GatewaySession[Client] = GatewaySession(now_s)
        self.inbox: deque[Any] = deque()
        self.outbox: deque[Any] = deque()

    @property
    def line(self) -> bytes:
        return b"%d.%d" % (self.number, self.num_lines)


class Life:
    def __init__(self, seed: int, *, limits: KeptLimits = LIMITS, takeovers: bool = True) -> None:
        self.rng, self.now_s, self.limits, self.takeovers = random.Random(seed), 0.0, limits, takeovers
        self.seen: Counter[str] = Counter()
        self.num_ids = self.epoch = 0
        self.replica = Replica()
        self.num_made: Counter[tuple[str, int]] = Counter()
        """Tokens by answer and prompt."""
        self.counts: dict[str, Count] = {}
        self.asked: dict[tuple[str, str], Asked] = {}
        self.clients: list[Client] = []
        self.gateways: list[Gateway] = []
        self.lead(Replica())
        for _ in range(2):
            self.new_gateway()

    # ---- processes --------------------------------------------------------------------------------------------------

    def lead(self, replica: Replica) -> None:
        self.epoch += 1
        self.service = Service(self.num_made)
        self.sessions = Sessions({"m": self.service}, KeptAnswers(self.limits))  # type: ignore[dict-item]
        restore(self.sessions.kept, replica.state.kept, self.now_s)
        self.sessions.counts = {count.id: (count, None) for count in replica.state.counts}
        self.lines: dict[bytes, Gateway] = {}

    def take_over(self) -> None:
        """What the log had not said is lost."""
        self.seen["takeovers"] += 1
        replica, self.replica = self.replica, Replica()
        self.lead(replica)
        self.replica.apply(self.record(everything=True))
        for gateway in self.gateways:
            gateway.session.disconnected()
            gateway.inbox.clear()
            gateway.outbox.clear()

    def record(self, *, everything: bool = False) -> Record:
        kept = news(self.sessions.kept, everything=everything)
        counts, counted, removed = self.sessions.count_news(everything=everything)
        return Record(kept=kept, removed=removed, counts=counts, counted=counted)

    def new_gateway(self) -> None:
        self.num_ids += 1
        self.gateways.append(Gateway(self.num_ids, self.now_s))

    def connect(self, gateway: Gateway) -> None:
        gateway.num_lines += 1
        gateway.inbox.clear()
        gateway.outbox.clear()
        self.lines[gateway.line] = gateway
        self.sessions.joined(gateway.line)
        welcomed = gateway.session.welcomed(self.epoch)
        assert welcomed is not None
        gateway.outbox.extend(welcomed)

    def cut(self, gateway: Gateway) -> None:
        """Both ends notice, the coordinator first."""
        if gateway.line in self.sessions:
            del self.lines[gateway.line]
            self.sessions.gone(gateway.line, self.now_s)
        gateway.session.disconnected()
        gateway.inbox.clear()
        gateway.outbox.clear()

    def kill(self, gateway: Gateway) -> None:
        self.seen["gateways killed"] += 1
        self.cut(gateway)
        self.gateways.remove(gateway)
        for one in gateway.session.open.values():
            one.reader.cut_off = True
        self.new_gateway()

    # ---- clients ----------------------------------------------------------------------------------------------------

    def ask(self, gateway: Gateway) -> None:
        rng = self.rng
        if rng.random() < 0.6 and self.asked:
            asked = rng.choice(list(self.asked.values()))
            self.seen["repeats"] += 1
        else:
            key = f"k{rng.randrange(10**6)}"
            tenant, stops = rng.choice(TENANTS), rng.random() < 0.2
            n = 1 if stops else rng.choice([1, 1, 2])
            lengths = tuple(rng.randint(1, 8) for _ in range(1 if stops else rng.choice([1, 1, 2])))
            keyed = Keyed(key, f"{tenant.name}.{key}", int(self.now_s)) if rng.random() < 0.8 else None
            asked = Asked(
                tenant, keyed, f"{tenant.name}.{key}", n, lengths, rng.randint(1, lengths[0]) if stops else None
            )
            if keyed is not None:
                self.asked[tenant.name, key] = asked
        client = Client(asked, len(self.clients))
        self.clients.append(client)
        self.num_ids += 1
        # What the answer is travels in fields that nobody here reads otherwise.
        requests = tuple(
            Request(
                id=f"r{self.num_ids}-{place}", prompt_ids=(1,) * rng.choice([3, 3, 300]), seed=length,
                params=SamplingParams(n=asked.n), namespace=asked.answer, public_tokens=place,
            )
            for place, length in enumerate(asked.lengths)
        )  # fmt: skip
        if asked.keyed is not None and gateway.session.welcome and rng.random() < 0.8:
            try:
                self.sessions.kept.claim(asked.keyed, asked.tenant, self.now_s)
            except TripoolError as error:
                client.error = error
                self.seen[error.code] += 1
                return
        submission = Submission("m", requests, asked.tenant, asked.keyed)
        if gateway.session.submit(submission, client, self.now_s):
            gateway.outbox.append(submission)

    def hang_up(self, gateway: Gateway) -> None:
        if gateway.session.open:
            client = self.rng.choice(list(gateway.session.open.values())).reader
            client.cut_off = True
            self.close(gateway, client)

    def close(self, gateway: Gateway, client: Client) -> None:
        for request_id, one in list(gateway.session.open.items()):
            if one.reader is client:
                gateway.session.close(request_id)
                gateway.outbox.append(("cancel", request_id))

    # ---- messages ---------------------------------------------------------------------------------------------------

    def to_coordinator(self, gateway: Gateway) -> None:
        if not gateway.outbox or gateway.line not in self.sessions:
            return
        message, line = gateway.outbox.popleft(), gateway.line
        match message:
            case Submission():
                known = self.sessions.kept.get((message.tenant.name, message.keyed.name)) if message.keyed else None
                self.seen["joined while it is read"] += known is not None and known.state == "read"
                self.seen["joined when it is done"] += known is not None and known.state == "ended"
                self.seen["joined when it is alone"] += known is not None and known.state == "alone"
                self.sessions.submit(line, message.model, message.requests, message.tenant, self.now_s, message.keyed)
            case Resumption():
                head = (message.model, message.request, message.tenant, message.held, self.now_s)
                self.sessions.resume(line, *head, message.keyed, message.place)
                self.seen["resumed"] += 1
            case ("cancel", request_id):
                self.sessions.cancel(line, request_id, self.now_s)
            case ("stopped", request_id, lengths):
                self.sessions.stopped(line, request_id, lengths, self.now_s)
            case ("counted", count_id):
                self.sessions.counted(count_id)

    def flush(self) -> None:
        unsent, self.sessions.unsent = self.sessions.unsent, []
        for session in unsent:
            items, session.out = session.out, []
            if session.line in self.lines:
                self.lines[session.line].inbox.extend(items)

    def to_gateway(self, gateway: Gateway) -> None:
        if not gateway.inbox:
            return
        item: ForGateway = gateway.inbox.popleft()
        if isinstance(item, Failure):
            one = gateway.session.close(item.request_id)
            if one is not None:
                one.reader.error = item.error
                self.close(gateway, one.reader)
                self.seen[item.error.code] += 1
                assert item.error.code in ("overloaded", "answer_not_kept"), item.error
            return
        if isinstance(item, Count):
            self.count(item)
            gateway.outbox.append(("counted", item.id))
            return
        taken, one = gateway.session.take(item)
        assert taken in (Taken.NEW, Taken.KNOWN), "a token is missing, or is another one"
        if taken is Taken.NEW and one is not None:
            client = one.reader
            got = client.got.setdefault((one.place, item.choice), [])
            assert item.index == len(got) and not client.over, "a token is lost, or comes twice"
            assert item.token_id == token_of(client.asked.answer, one.place, item.choice, item.index)
            got.append(item.token_id)
            client.done += item.finish_reason is not None
            if item.finish_reason is not None:
                assert len(got) in (client.asked.lengths[one.place], client.asked.stop_at), "it ends too soon"
            stop_at = client.asked.stop_at
            if len(got) == stop_at and client.asked.keyed is not None and item.finish_reason is None:
                client.done += 1
                gateway.session.close(item.request_id)
                gateway.outbox.append(("stopped", item.request_id, (stop_at,)))

    def count(self, count: Count) -> None:
        known = self.counts.setdefault(count.id, count)
        self.seen["counted again"] += known is not count

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        gateway = rng.choice(self.gateways)
        what = rng.random()
        if what < 0.10:
            self.ask(gateway)
        elif what < 0.13:
            self.hang_up(gateway)
        elif what < 0.14:
            self.kill(gateway)
        elif what < 0.15:
            self.cut(gateway)
        elif what < 0.155 and self.takeovers:
            self.take_over()
        elif what < 0.16 and self.service.open:
            request_id = rng.choice(list(self.service.open))
            self.service.cancel(request_id, self.now_s)
            self.sessions.fail(request_id, Overloaded("full"))
        elif what < 0.20:
            self.now_s += rng.choice([0.1, 0.1, 1.0, 3.0])
            self.sessions.tick(self.now_s)
        elif what < 0.25:
            self.replica.apply(self.record())
        elif what < 0.50:
            self.to_coordinator(gateway)
        elif what < 0.75:
            self.to_gateway(gateway)
        elif self.service.open:
            self.sessions.emit(self.service.step(rng.choice(list(self.service.open)), rng))
            self.sessions.settle(self.now_s)
        for one in self.gateways:
            if not one.session.welcome and rng.random() < 0.3:
                self.connect(one)
        self.flush()
        self.sessions.check()

    def settle(self) -> None:
        """Nothing more goes wrong: every client gets its end."""
        for _ in range(10_000):
            for gateway in self.gateways:
                if not gateway.session.welcome:
                    self.connect(gateway)
                while gateway.outbox:
                    self.to_coordinator(gateway)
                self.flush()
                while gateway.inbox:
                    self.to_gateway(gateway)
            for request_id in list(self.service.open):
                if request_id in self.service.open:
                    self.sessions.emit(self.service.step(request_id, self.rng))
                    self.sessions.settle(self.now_s)
            self.now_s += 0.25
            self.sessions.tick(self.now_s)
            self.flush()
            self.sessions.check()
            busy = any(one.inbox or one.outbox or one.session.open for one in self.gateways)
            kept = 0 if self.limits is FOR_EVER else len(self.sessions.kept)
            if not (busy or self.service.open or self.sessions.counts or kept):
                return
        raise AssertionError("it never comes to rest")


def live(seed: int, steps: int = 400, *, limits: KeptLimits = LIMITS, takeovers: bool = True) -> Life:
    life = Life(seed, limits=limits, takeovers=takeovers)
    for _ in range(steps):
        life.step()
    life.settle()
    assert all(client.over for client in life.clients), "a client waits for ever"
    return life
