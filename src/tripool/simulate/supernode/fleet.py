"""The workers of a planned deployment on modelled engines, the links between them, and the cache pool. Pure.

Engines and links take the time that the planner's cost model says.
"""

from __future__ import annotations

from collections.abc import Sequence

from tripool.core import Request
from tripool.messages import AnyMessage, Reaped, Tokens, ToWorker, Welcome, WorkerId
from tripool.router import Coordinator
from tripool.router.admission_types import Capacity
from tripool.simulate.supernode.instances import DecodeInstance, PrefillInstance
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.links import Link, Slices, carry
from tripool.simulate.supernode.modelled_engine import TokenRun
from tripool.simulate.supernode.pool import CachePool
from tripool.simulate.timeline import ARRIVAL, FAULT, TICK, Timeline, to_fs
from tripool.simulate.world import World

_EXPIRE_FS = to_fs(1.0)
_POOL = -1
_SUPERVISOR = 2**31
"""Owners of events, before and after all workers."""
_REAP_S = 0.05
"""From a process's end until its supervisor says so."""
_ASK_S = 0.2
"""The same, where somebody has to look first."""


class ModelledFleet:
    world: World[Coordinator]

    def __init__(self, layout: Layout, timeline: Timeline, slice_s: float, member_slots: int) -> None:
        self.layout, self.timeline, self.slices = layout, timeline, Slices(slice_s)
        self.pool = CachePool(layout.num_members, member_slots)
        self._hop_fs, self._transfer_fs = to_fs(layout.links.hop_s), to_fs(layout.links.transfer_s)
        self._epochs: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        """Of every worker, by name: prefill instances first."""
        self._dead: set[WorkerId] = set()
        self.prefills: list[PrefillInstance | None] = []
        self.decodes: list[DecodeInstance] = []
        self.in_links: dict[int, Link] = {}

    def new_router(self, gateway_epoch: int) -> Coordinator:
        return Coordinator(self.layout.router, epoch=gateway_epoch, traces=False)

    def capacity(self, router: Coordinator) -> Capacity:
        return Capacity(max(1, router.view.num_ready("prefill")))

    def start(self, world: World[Coordinator]) -> None:
        self.world = world
        prefill, decode = self.layout.prefill, self.layout.decode
        for number in range(prefill.instances):
            self._numbers[f"prefill-{number}"] = number
            self.prefills.append(None)
            self.start_prefill(number)
        for instance in range(decode.instances):
            first = prefill.instances + instance * decode.workers
            names = [f"decode-{instance}.{index}" for index in range(decode.workers)]
            for index, name in enumerate(names):
                self._numbers[name] = first + index
                self.in_links[first + index] = Link(self.layout.links.transfer_bytes_per_s)
            self.decodes.append(DecodeInstance(self, [self._new_worker_id(name) for name in names], first))
        self.timeline.at(_EXPIRE_FS, TICK, _POOL, self._expire)

    def _expire(self) -> None:
        self.pool.expire(self.timeline.now_s)
        self.timeline.at(self.timeline.now_fs + _EXPIRE_FS, TICK, _POOL, self._expire)

    # ---- processes --------------------------------------------------------------------------------------------------

    def _new_worker_id(self, worker: str) -> WorkerId:
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return WorkerId(worker, self._epochs[worker])

    def start_prefill(self, number: int) -> None:
        worker_id = self._new_worker_id(f"prefill-{number}")
        self.prefills[number] = PrefillInstance(self, worker_id, number, self.pool, self._keys_of)

    def revive(self, instance: int, ranks: range) -> None:
        for number in ranks:
            if self.decodes[instance].ranks[number] is None:
                self.decodes[instance].revive(number, self._new_worker_id(f"decode-{instance}.{number}"))

    def _keys_of(self, request: Request) -> Sequence[bytes]:
        opened = self.world.open.get(str(request.seed))  # workers rename requests, attempt by attempt; the seed stays
        return opened.arrival.keys if opened is not None else ()

    def ended(self, worker_id: WorkerId, *, reported: bool) -> None:
        """`reported`: its supervisor is there to say so; else the gateway notices by silence."""
        self._dead.add(worker_id)
        if reported:
            self._reap_later(_REAP_S, worker_id)

    def suspected(self, worker_id: WorkerId) -> None:
        assert worker_id in self._dead, f"{worker_id} is suspected and runs"
        self._reap_later(_ASK_S, worker_id)

    def _reap_later(self, delay_s: float, worker_id: WorkerId) -> None:
        self.timeline.at(self.timeline.now_fs + to_fs(delay_s), FAULT, _SUPERVISOR, self._reap, worker_id)

    def _reap(self, worker_id: WorkerId) -> None:
        self.pool.reaped(worker_id)
        self._hear([Reaped(worker_id)])

    # ---- the network ------------------------------------------------------------------------------------------------

    def send(self, worker_id: WorkerId, message: ToWorker) -> None:
        if not isinstance(message, Welcome):
            number, there_fs = self._numbers[worker_id.name], self.timeline.now_fs + self._hop_fs
            self.timeline.at(there_fs, ARRIVAL, number, self._deliver, number, worker_id, message)

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

    def tell(self, number: int, messages: Sequence[AnyMessage]) -> None:
        self.timeline.at(self.timeline.now_fs + self._hop_fs, ARRIVAL, number, self._hear, messages)

    def _hear(self, messages: Sequence[AnyMessage]) -> None:
        world, coordinator, now_s = self.world, self.world.router, self.timeline.now_s
        assert coordinator is not None
        for message in messages:
            if isinstance(message, Tokens):
                runs = [
                    (stamped, stamped.event.earlier if isinstance(stamped.event, TokenRun) else ())
                    for stamped in message.events
                ]
                outputs = coordinator.advance(message.worker_id, runs, now_s)
            else:
                outputs = coordinator.receive(message, now_s)
            if outputs:
                world.do(outputs)

    def trusts(self, worker_id: WorkerId) -> bool:
        keeper = self.prefills[self._numbers[worker_id.name]]
        return keeper is not None and keeper.worker_id == worker_id and not keeper.dead

    def transfer(self, source: WorkerId, number: int, num_bytes: int) -> int:
        keeper, link = self.prefills[self._numbers[source.name]], self.in_links[number]
        links = (link,) if keeper is None else (link, keeper.send_link)
        now_fs = self.timeline.now_fs
        self.slices.count("transfer", num_bytes, now_fs)
        return carry(links, num_bytes, now_fs, self._transfer_fs)
