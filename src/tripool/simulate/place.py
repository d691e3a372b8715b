"""A worker's place in the simulation: one run after another of the worker that serves, on a simulated process.

The simulation hands in timeline, transport, memory and engine. Everything else is the code that serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tripool.cache.client import PoolClient
from tripool.control.worker import Worker
from tripool.engine.fake import FakeTokens
from tripool.engine.fake_paged import PagedFake
from tripool.fabric import KvSender
from tripool.messages import PROTOCOL, Hello, WorkerId
from tripool.simulate.member import SimHost, SimMember
from tripool.simulate.memory import Memory, SimTransfer
from tripool.simulate.network import Network, SimTransport
from tripool.simulate.process import Baton
from tripool.simulate.scenario import WorkerSpec
from tripool.simulate.timeline import Timeline
from tripool.text.files import TextFiles

MODEL = "fake"


@dataclass(frozen=True, slots=True)
class Shared:
    """What all workers of one simulation share."""

    timeline: Timeline
    baton: Baton
    network: Network
    memory: Memory
    members: list[SimMember]
    text: TextFiles
    tokens: FakeTokens


class WorkerRun:
    """One run of a worker process."""

    def __init__(self, shared: Shared, worker_id: WorkerId, spec: WorkerSpec, ended: Callable[[], None]) -> None:
        timeline, memory = shared.timeline, shared.memory
        self.worker_id, self.slowness = worker_id, 1.0
        self.process = shared.baton.start(lambda process: self._worker.run(), ended)
        self.engine = PagedFake(
            shared.text,
            name=MODEL,
            context_tokens=spec.context_tokens,
            num_blocks=spec.config.num_blocks,
            max_running=spec.config.max_running,
            step_tokens=spec.config.step_tokens,
            step_s=spec.token_s,
            row_s=spec.token_s,
            prompt_token_s=spec.token_s,
            block_tokens=spec.config.block_tokens,
            prefix_reuse=spec.config.prefix_reuse,
            tokens=shared.tokens,
            clock=timeline.clock,
            wait=self._compute,
        )
        self._timeline = timeline
        shape = {"block_tokens": self.engine.block_tokens, "block_bytes": self.engine.block_bytes}
        kv_transfer = SimTransfer(memory, self.process, worker_id, num_slots=spec.sender_slots, **shape)
        self._host = SimHost(timeline, memory, worker_id, shared.members, self.process)
        pool = PoolClient(self._host, [member.name for member in shared.members], worker_id)
        kv_tokens = int(self.engine.num_blocks * self.engine.block_tokens * spec.overstated)
        limits = (kv_tokens, self.engine.max_running, self.engine.context_tokens, self.engine.vocab)
        hello = Hello(PROTOCOL, spec.role, worker_id, 1, MODEL, *limits)
        transport = SimTransport(shared.network, timeline, worker_id, self.process)
        self._worker = Worker(self.engine, hello, transport, kv_transfer, pool, clock=timeline.clock)
        self.slots = kv_transfer.slots

    @property
    def blocks_held(self) -> int:
        return self._worker.role.heartbeat().blocks_held

    @property
    def holds_nothing(self) -> bool:
        role = self._worker.role
        return self.process.doing == "poll" and not (role.busy or role.moving or self.blocks_held)

    def count(self, seen: Counter[str]) -> None:
        seen["preempted"] += self.engine.scheduler.num_preemptions

    def check(self) -> None:
        """Between two turns of the worker's loop and in its steps: in between it is in the middle of a change."""
        if self.process.doing not in ("poll", "step"):
            return
        scheduler = self.engine.scheduler
        scheduler.check()
        if isinstance(self._worker.kv, KvSender):
            self._worker.kv.check()
        held = [*scheduler.holders(), *scheduler.prefill.waiting, *scheduler.arriving, *scheduler.detached]
        placed = self._worker.role.placed
        assert {seq.request.id for seq in held} == placed, "a worker and its engine disagree on what is there"

    def kill(self) -> None:
        self.process.kill()
        self._host.hang_up()

    def _compute(self, step_s: float) -> None:
        self.process.wait(self._timeline.now_s + step_s * self.slowness, "step")


@dataclass(slots=True, eq=False)
class Place:
    """Where a worker runs, one run after another."""

    name: str
    spec: WorkerSpec
    epoch: int = 0
    run: WorkerRun | None = None
    ending: bool = False
    """The supervisor has decided to end this run."""

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.name, self.epoch)
