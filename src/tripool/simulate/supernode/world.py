"""A whole deployment in virtual time: the admission control, coordinator, workers and cache index that serve. Pure.

Engines and links take the time that the planner's cost model says. Requests come from a trace, faults from a list. The
same trace, deployment and faults give the same bytes, whether quiet decode steps are skipped or taken one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tripool.bench.trace import TraceRequest
from tripool.core import Request, SamplingParams, Slo, TokenEvent
from tripool.errors import TripoolError
from tripool.messages import AnyMessage, Tokens, Welcome, WorkerId
from tripool.router import Coordinator, Emit, Fail, Output, Send, ToSupervisor
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Arrival, Capacity, Decision
from tripool.simulate.supernode.instances import DecodeInstance, PrefillInstance
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.links import Link, Slices, carry
from tripool.simulate.supernode.modelled_engine import TokenRun
from tripool.simulate.supernode.pool import CachePool, chain_keys
from tripool.simulate.supernode.request_table import DONE, FAILED, REFUSED, Open, RequestTable
from tripool.simulate.supernode.timeline import ARRIVAL, TICK, Timeline, to_fs
from tripool.tenants import Tenant

_TICK_FS = to_fs(0.05)
_EXPIRE_TICKS = 20
_GATEWAY = -1
_ZEROS = (0,) * 2**18


class World:
    def __init__(
        self,
        layout: Layout,
        requests: Iterable[TraceRequest],
        *,
        fast_forwards: bool = True,
        slice_s: float = 30.0,
        most_blocks: int | None = None,
    ) -> None:
        """`most_blocks`: of all prompts together, where that is known; a cache member need not be larger."""
        self.layout, self.fast_forwards = layout, fast_forwards
        self.timeline, self.slices, self.table = Timeline(), Slices(slice_s), RequestTable()
        self.coordinator = Coordinator(layout.router, gateway_epoch=1, traces=False)
        self.admission = AdmissionController(layout.admission)
        self.pool = CachePool(layout.num_members, min(layout.member_slots, most_blocks or layout.member_slots))
        self.open: dict[str, Open] = {}
        self.on_token: Callable[[str], None] | None = None
        self.on_end: Callable[[str], None] | None = None
        self.on_suspect: Callable[[WorkerId], None] | None = None
        """Callbacks: a request got a token; it ended without its last; a worker is silent."""
        self._waiting: dict[str, Request] = {}
        self._tenants: dict[str, tuple[Tenant, Slo]] = {}
        self._params: dict[int, SamplingParams] = {}
        self._requests = iter(requests)
        self._num_asked = 0
        self._all_came = False
        self.names_blocks = False
        """Whether the trace says which prompts share a prefix."""
        self._hop_fs, self._transfer_fs = to_fs(layout.links.hop_s), to_fs(layout.links.transfer_s)
        self._num_ticks = 0
        self.epochs: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        """Of every worker, by name: prefill instances first."""
        self.prefills: list[PrefillInstance | None] = []
        self.decodes: list[DecodeInstance] = []
        self.in_links: dict[int, Link] = {}
        self._build()

    def _build(self) -> None:
        prefill, decode = self.layout.prefill, self.layout.decode
        for number in range(prefill.instances):
            self.numbers[f"prefill-{number}"] = number
            self.prefills.append(None)
            self.start_prefill(number)
        for instance in range(decode.instances):
            first = prefill.instances + instance * decode.workers
            names = [f"decode-{instance}.{index}" for index in range(decode.workers)]
            for index, name in enumerate(names):
                self.numbers[name] = first + index
                self.in_links[first + index] = Link(self.layout.links.transfer_bytes_per_s)
            self.decodes.append(DecodeInstance(self, [self.new_worker_id(name) for name in names], first))
        self._next_ask()
        self.timeline.over = self._all_came
        self.timeline.at(_TICK_FS, TICK, _GATEWAY, self._tick)

    def new_worker_id(self, worker: str) -> WorkerId:
        self.epochs[worker] = self.epochs.get(worker, 0) + 1
        return WorkerId(worker, self.epochs[worker])

    def start_prefill(self, number: int) -> None:
        worker_id = self.new_worker_id(f"prefill-{number}")
        self.prefills[number] = PrefillInstance(self, worker_id, number, self.pool, self._keys_of)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Until every request has come and ended."""
        more = True
        while more:
            more = self.timeline.run(1000)
            if progress is not None:
                progress(len(self.table))

    # ---- clients ----------------------------------------------------------------------------------------------------

    def _next_ask(self) -> None:
        ask = next(self._requests, None)
        if ask is None:
            self._all_came = True
        else:
            self.timeline.at(to_fs(ask.arrival_s), ARRIVAL, _GATEWAY, self._arrive, ask)

    def _arrive(self, ask: TraceRequest) -> None:
        serial = self._num_asked
        self._num_asked += 1
        self._next_ask()
        if ask.block_ids:
            self.names_blocks = True
        tenant, slo = self._tenant(ask.tenant)
        keys = chain_keys(ask, serial, self.layout.prefill.config.block_tokens, tenant.namespace)
        name = str(serial)
        self.open[name] = Open(self.timeline.now_s, ask.input_tokens, ask.output_tokens, ask.tenant, keys)
        params = self._params.get(ask.output_tokens)
        if params is None:
            params = self._params[ask.output_tokens] = SamplingParams(max_tokens=ask.output_tokens, ignore_eos=True)
        prompt = _ZEROS[: ask.input_tokens] if ask.input_tokens <= len(_ZEROS) else (0,) * ask.input_tokens
        self._waiting[name] = Request(
            id=name, prompt_ids=prompt, params=params, seed=serial, namespace=tenant.namespace, slo=slo
        )
        arrival = Arrival(id=name, prompt_tokens=ask.input_tokens, tenant=tenant, slo=slo)
        self._decide(self.admission.arrive(arrival, self.timeline.now_s))

    def _tenant(self, name: str) -> tuple[Tenant, Slo]:
        found = self._tenants.get(name)
        if found is None:
            tpot_ms = self.layout.tpot_s * 1e3 if self.layout.promised else None
            slo = Slo(tpot_ms=tpot_ms, tenant=name)
            found = self._tenants[name] = Tenant(name=name, namespace=name), slo
        return found

    def _keys_of(self, request: Request) -> Sequence[bytes]:
        found = self.open.get(str(request.seed))  # workers rename requests, attempt by attempt; the seed stays
        return found.keys if found is not None else ()

    def _decide(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            request = self._waiting.pop(decision.id)
            if isinstance(decision, Admit):
                self._do(self.coordinator.submit(request, self.timeline.now_s))
            else:
                self._close(decision.id, REFUSED, decision.error)

    def _close(self, request_id: str, outcome: int, error: TripoolError | None = None) -> None:
        if self.on_end is not None and outcome != DONE:
            self.on_end(request_id)
        self.table.close(self.open.pop(request_id), outcome, self.timeline.now_s, error)
        self.timeline.over = self._all_came and not self.open

    # ---- the gateway ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_s = self.timeline.now_s
        self._do(self.coordinator.tick(now_s))
        self._decide(self.admission.tick(now_s, Capacity(max(1, self.coordinator.view.num_ready("prefill")))))
        self._num_ticks += 1
        if self._num_ticks % _EXPIRE_TICKS == 0:
            self.pool.expire(now_s)
        self.timeline.at(self.timeline.now_fs + _TICK_FS, TICK, _GATEWAY, self._tick)

    def _do(self, outputs: list[Output]) -> None:
        timeline = self.timeline
        for output in outputs:
            match output:
                case Send():
                    if not isinstance(output.message, Welcome):
                        number = self.numbers[output.worker_id.name]
                        there_fs = timeline.now_fs + self._hop_fs
                        timeline.at(there_fs, ARRIVAL, number, self._deliver, number, output.worker_id, output.message)
                case Emit():
                    self._token(output.event)
                case Fail():
                    self._decide(self.admission.cancelled(output.request_id, timeline.now_s))
                    refused = output.error.code == "overloaded"
                    self._close(output.request_id, REFUSED if refused else FAILED, output.error)
                case ToSupervisor():
                    assert self.on_suspect is not None, f"{output.message.worker_id} is silent without a fault"
                    self.on_suspect(output.message.worker_id)

    def _token(self, event: TokenEvent) -> None:
        request, now_s = self.open[event.request_id], self.timeline.now_s
        if self.on_token is not None:
            self.on_token(event.request_id)
        if request.first_s is None:
            request.first_s, request.cached_tokens = now_s, event.num_cached_tokens
            fetched = event.stages.fetched_tokens if event.stages is not None else 0
            request.fetched_tokens = min(fetched, event.num_cached_tokens)
            uncached = request.input_tokens - event.num_cached_tokens
            self._decide(self.admission.first_token(event.request_id, uncached, now_s))
        if event.finish_reason is not None:
            self._decide(self.admission.finished(event.request_id, event.index + 1, now_s))
            self._close(event.request_id, DONE)

    def receive(self, message: AnyMessage) -> None:
        """From a worker or the supervisor."""
        self._do(self.coordinator.receive(message, self.timeline.now_s))

    # ---- what workers ask for (Site) --------------------------------------------------------------------------------

    def tell(self, number: int, messages: Sequence[AnyMessage]) -> None:
        self.timeline.at(self.timeline.now_fs + self._hop_fs, ARRIVAL, number, self._hear, messages)

    def _hear(self, messages: Sequence[AnyMessage]) -> None:
        now_s = self.timeline.now_s
        for message in messages:
            if isinstance(message, Tokens):
                runs = [
                    (stamped, stamped.event.earlier if isinstance(stamped.event, TokenRun) else ())
                    for stamped in message.events
                ]
                self._do(self.coordinator.advance(message.worker_id, runs, now_s))
            else:
                self._do(self.coordinator.receive(message, now_s))

    def trusts(self, worker_id: WorkerId) -> bool:
        number = self.numbers[worker_id.name]
        keeper = self.prefills[number]
        return keeper is not None and keeper.worker_id == worker_id and not keeper.dead

    def transfer(self, source: WorkerId, number: int, num_bytes: int) -> int:
        keeper, link = self.prefills[self.numbers[source.name]], self.in_links[number]
        links = (link,) if keeper is None else (link, keeper.send_link)
        now_fs = self.timeline.now_fs
        self.slices.count("transfer", num_bytes, now_fs)
        return carry(links, num_bytes, now_fs, self._transfer_fs)

    def _deliver(self, number: int, worker_id: WorkerId, message: AnyMessage) -> None:
        """To this run of the worker and no other."""
        if number < len(self.prefills):
            keeper = self.prefills[number]
            if keeper is not None and keeper.worker_id == worker_id and not keeper.dead:
                keeper.receive(message)
            return
        instance, index = divmod(number - len(self.prefills), self.layout.decode.workers)
        rank = self.decodes[instance].ranks[index]
        if rank is not None and rank.worker_id == worker_id:
            self.decodes[instance].receive(index, message)
