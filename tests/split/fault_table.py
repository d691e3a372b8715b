"""Fault × hop × stage: many live streams, one thing that goes wrong, and what the clients saw of it.

Each cell ends with all clients served, every stream as an engine alone would have said it, and nothing held anywhere.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from . import faults
from .serving import SplitServer, split_server
from .streams import Asked, Clients, Outcome, expected, make_bodies

Fault = Literal["kill -9", "SIGSTOP, SIGCONT", "cut socket", "client disconnect"]
Hop = Literal[
    "prefill", "decode", "cache", "gateway", "coordinator", "standby", "gateway and coordinator", "supervisor"
]
Stage = Literal["queued", "prefilling", "transferring", "decoding"]

FAULTS: tuple[Fault, ...] = ("kill -9", "SIGSTOP, SIGCONT", "cut socket", "client disconnect")
HOPS: tuple[Hop, ...] = (
    "prefill", "decode", "cache", "gateway", "coordinator", "standby", "gateway and coordinator", "supervisor"
)  # fmt: skip
RESUMED: tuple[Hop, ...] = ("gateway", "gateway and coordinator")
"""Where clients have idempotency keys: their streams are cut off, and go on."""
STAGES: tuple[Stage, ...] = ("queued", "prefilling", "transferring", "decoding")

MODEL = "fake:step_ms=8,step_tokens=256,running=40"
NUM_PREFILL, NUM_DECODE = 2, 2
NUM_GATEWAYS = 2
OPTIONS = ("--cache-gb", "0.01", "--gateways", str(NUM_GATEWAYS))
STREAMS_S = 120.0
TRIES = 5
"""At finding a stream in the stage that a fault is meant for."""


@dataclass(frozen=True, slots=True)
class Cell:
    fault: Fault
    hop: Hop
    stage: Stage
    streams: int
    found: int
    """Choices that were in that stage when it was last looked, just before the fault."""
    left: int
    """Clients that hung up before their answer was complete."""
    hung: int
    failed: int
    lost: int
    """Tokens that a client should have had."""
    wrong: int
    """Tokens that it should not have had, duplicates included."""
    leaked: int
    """Blocks, leases and requests still held in the end; without a supervisor: processes and folders still there."""
    capacity_s: float | None
    """From the fault until every process was there again; None where none was lost."""
    backoff_s: float | None
    """How much of that the supervisor waited on purpose, because the same place had fallen shortly before."""

    @property
    def good(self) -> bool:
        happened = self.found > 0 and (self.left > 0 or self.fault != "client disconnect")
        return happened and (self.hung, self.failed, self.lost, self.wrong, self.leaked) == (0, 0, 0, 0, 0)


@dataclass(slots=True)
class Seen:
    """What was noted around the fault."""

    found: int = 0
    capacity_s: float | None = None
    backoff_s: float | None = None
    pids: tuple[int, ...] = ()
    folder: Path = Path()


def run_cell(server: SplitServer, fault: Fault, hop: Hop, stage: Stage, num_streams: int) -> Cell:
    bodies = make_bodies(num_streams, prompt_tokens=600, answer_tokens=60, seed=hash_of(fault, hop, stage))
    leaves = fault == "client disconnect"
    for number in range(TRIES):
        keys = [f"{fault}/{hop}/{stage}/{number}/{i}" if hop in RESUMED else "" for i in range(num_streams)]
        pairs = enumerate(zip(bodies, keys, strict=True))
        asked = [Asked(body, leaves=leaves and i % 2 == 0, key=key) for i, (body, key) in pairs]
        clients, seen = asyncio.run(_run(server, asked, fault, hop, stage))
        if seen.found and (not leaves or any(outcome.left for outcome in clients.outcomes)):
            break  # else the streams were through that stage before we had a look: nothing was done to them
    leaked = _left_over(seen) if (fault, hop) == ("kill -9", "supervisor") else _held(server)
    return judge(bodies, clients.outcomes, (fault, hop, stage), seen, leaked)


def hash_of(*names: str) -> int:
    return sum(ord(letter) * i for i, letter in enumerate("".join(names), 1))


async def _run(server: SplitServer, asked: list[Asked], fault: Fault, hop: Hop, stage: Stage) -> tuple[Clients, Seen]:
    clients, seen = Clients(server.url, asked), Seen()
    running = asyncio.ensure_future(clients.run())
    fresh = httpx.Limits(max_keepalive_connections=0)  # a gateway that is stopped accepts no new ones
    async with httpx.AsyncClient(base_url=server.url, timeout=STREAMS_S, limits=fresh) as http:
        # Without its supervisor a server refuses what comes later: all streams must be there before.
        whole = (fault, hop) == ("kill -9", "supervisor")
        pools, seen.found = await _until_stage(http, stage, running, clients if whole else None)
        if not seen.found:
            return clients, seen
        before = {(worker["worker"], worker["epoch"]) for worker in pools["workers"]}
        seen.folder = Path(pools["join"].removeprefix("ipc://")).parent
        seen.pids = tuple(server.children())
        pid, num_lines = _target(server, pools, hop), len(server.log)
        began_s = time.monotonic()
        await _inject(server, clients, fault, hop, pid, pools)
        if (fault in ("kill -9", "SIGSTOP, SIGCONT") and hop in ("prefill", "decode")) or (
            (fault, hop) == ("cut socket", "supervisor")
        ):
            await _until_replaced(http, before)
            seen.capacity_s = time.monotonic() - began_s
        if fault in ("kill -9", "SIGSTOP, SIGCONT") and hop in ("coordinator", "gateway", "gateway and coordinator"):
            if hop != "gateway":
                await _until_taken_over(http, pools["coordinator_pid"])
            if hop != "coordinator":
                await _until_gateways(http, server, pid)
            seen.capacity_s = time.monotonic() - began_s
        if fault == "SIGSTOP, SIGCONT":
            faults.wake(pid)
        if (fault, hop) == ("kill -9", "cache"):
            await _until_cache_is_replaced(http, server, pid)
            seen.capacity_s = time.monotonic() - began_s
        waits = [
            float(said[1]) for line in server.log[num_lines:] if (said := re.search(r" again_in_s=([\d.]+)", line))
        ]
        seen.backoff_s = max(waits) if waits and seen.capacity_s is not None else None
    await asyncio.wait({running}, timeout=STREAMS_S)
    if not running.done():
        running.cancel()
        await asyncio.wait({running})
    return clients, seen


async def _until_stage(
    http: httpx.AsyncClient, stage: Stage, running: asyncio.Future[list[Outcome]], all_of: Clients | None
) -> tuple[dict[str, Any], int]:
    """Until some stream is where the fault shall find it, and `all_of` these clients are being served or have been;
    how many there are, none once all have ended."""
    names = ("packed", "transferring") if stage == "transferring" else (stage,)
    while True:
        pools = (await http.get("/v1/pools")).raise_for_status().json()
        found = sum(pools["stages"].get(name, 0) for name in names)
        if found and (all_of is None or pools["requests"] + all_of.num_served == len(all_of.outcomes)):
            return pools, found
        if running.done():
            return pools, 0
        await asyncio.sleep(0.001)


async def _until_replaced(http: httpx.AsyncClient, before: set[tuple[str, int]]) -> None:
    deadline_s = time.monotonic() + STREAMS_S
    while True:
        pools = (await http.get("/v1/pools")).raise_for_status().json()
        worker_ids = {(worker["worker"], worker["epoch"]) for worker in pools["workers"]}
        if len(worker_ids) == len(before) and worker_ids != before:
            return
        assert time.monotonic() < deadline_s, (before, worker_ids)
        await asyncio.sleep(0.01)


async def _until_taken_over(http: httpx.AsyncClient, pid: int) -> None:
    """Another coordinator leads, and has all workers."""
    deadline_s = time.monotonic() + STREAMS_S
    while True:
        pools = (await http.get("/v1/pools")).raise_for_status().json()
        if pools["coordinator_pid"] != pid and len(pools["workers"]) == NUM_PREFILL + NUM_DECODE:
            return
        assert time.monotonic() < deadline_s, pools
        await asyncio.sleep(0.01)


async def _until_gateways(http: httpx.AsyncClient, server: SplitServer, pid: int) -> None:
    """Others in the place of this one."""
    deadline_s = time.monotonic() + STREAMS_S
    while True:
        pools = (await http.get("/v1/pools")).raise_for_status().json()
        if pid not in server.all("gateway") and len(pools["gateways"]) == NUM_GATEWAYS:
            return
        assert time.monotonic() < deadline_s, pools
        await asyncio.sleep(0.01)


async def _until_cache_is_replaced(http: httpx.AsyncClient, server: SplitServer, pid: int) -> None:
    """Another process in the dead one's place, and the gateway hears it."""
    deadline_s = time.monotonic() + STREAMS_S
    while True:
        away = [member["away"] for member in (await http.get("/v1/pools")).raise_for_status().json()["cache"]]
        if server.find("cache-0") not in (None, pid) and not any(away):
            return
        assert time.monotonic() < deadline_s, away
        await asyncio.sleep(0.01)


def _target(server: SplitServer, pools: dict[str, Any], hop: Hop) -> int:
    """The one with the most to lose."""
    if hop == "supervisor":
        return server.process.pid
    if hop == "cache":
        return server.child("cache-0")
    if hop in RESUMED:
        return max(server.all("gateway"), key=lambda pid: len(list(Path(f"/proc/{pid}/fd").iterdir())))
    leader: int = pools["coordinator_pid"]
    if hop == "coordinator":
        return leader
    if hop == "standby":
        return next(pid for pid in server.all("coordinator") if pid != leader)
    pid: int = max((w for w in pools["workers"] if w["role"] == hop), key=lambda w: w["placed_tokens"])["pid"]
    return pid


async def _inject(
    server: SplitServer, clients: Clients, fault: Fault, hop: Hop, pid: int, pools: dict[str, Any]
) -> None:
    both = [pid, pools["coordinator_pid"]] if hop == "gateway and coordinator" else [pid]
    if fault == "kill -9":
        for one in both:
            faults.kill(one)
    elif fault == "SIGSTOP, SIGCONT":
        for one in both:
            faults.stop(one)
        if hop in ("supervisor", "cache", "standby"):
            await asyncio.sleep(1.0)  # nobody need find out: it is not on a token's way
    elif fault == "cut socket":
        if hop == "supervisor":
            faults.cut_supervisor_channel(_target(server, pools, "decode"))
        elif hop == "cache":
            worker = _target(server, pools, "prefill")
            assert faults.cut(worker, lambda peer: "/cache-" in peer) > 0
        elif hop in ("coordinator", "standby"):
            ends = server.all("gateway") if hop == "coordinator" else [pid]
            assert sum(faults.cut(end, lambda peer: peer.endswith("/gateways.sock")) for end in ends) > 0
        elif hop in RESUMED:
            assert faults.cut_clients(pid) > 0
            if hop == "gateway and coordinator":
                assert faults.cut(pid, lambda peer: peer.endswith("/gateways.sock")) > 0
        else:
            faults.cut_from_coordinator(pid)
    else:
        clients.leave.set()


def judge(
    bodies: list[dict[str, Any]], outcomes: list[Outcome], where: tuple[Fault, Hop, Stage], seen: Seen, leaked: int
) -> Cell:
    hung = failed = lost = wrong = 0
    for body, outcome in zip(bodies, outcomes, strict=True):
        right = expected(body)
        for choice, tokens in right.items():
            got = outcome.tokens.get(choice, [])
            alike = next((i for i, (a, b) in enumerate(zip(tokens, got, strict=False)) if a != b), None)
            alike = min(len(tokens), len(got)) if alike is None else alike
            wrong += len(got) - alike
            lost += 0 if outcome.left else len(tokens) - alike
        failed += outcome.error is not None
        hung += not outcome.left and outcome.error is None and outcome.finish.keys() != right.keys()
    left = sum(outcome.left for outcome in outcomes)
    counts = (len(bodies), seen.found, left, hung, failed, lost, wrong, leaked)
    return Cell(*where, *counts, seen.capacity_s, seen.backoff_s)


def _left_over(seen: Seen) -> int:
    """Processes that outlive their run, and its folder: what is gone holds nothing."""
    deadline_s = time.monotonic() + STREAMS_S
    while True:
        left = sum(Path(f"/proc/{pid}").exists() for pid in seen.pids) + seen.folder.exists()
        if left == 0 or time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)


def _held(server: SplitServer) -> int:
    """After a moment in which everything should have been given back."""
    deadline_s = time.monotonic() + STREAMS_S
    while True:
        pools = server.pools()
        held = pools["requests"] + sum(w["placed"] + w["running"] + w["blocks_held"] for w in pools["workers"])
        held += NUM_PREFILL + NUM_DECODE - len(pools["workers"]) + (pools["standbys"] != 1)
        held += NUM_GATEWAYS - len(pools["gateways"])
        held += sum(member.get("leases", 1) + member.get("reserved", 1) for member in pools["cache"])
        if held == 0 or time.monotonic() > deadline_s:
            return int(held)
        time.sleep(0.02)


def run_table(num_streams: int, cells: Iterable[tuple[Fault, Hop, Stage]]) -> list[Cell]:
    """One server for all cells; a new one after each that takes its supervisor."""
    done: list[Cell] = []
    left = list(cells)
    while left:
        with split_server(MODEL, prefill=NUM_PREFILL, decode=NUM_DECODE, options=OPTIONS) as server:
            while left:
                fault, hop, stage = left.pop(0)
                done.append(run_cell(server, fault, hop, stage, num_streams))
                if (fault, hop) == ("kill -9", "supervisor"):
                    break
    return done


def render(cells: list[Cell]) -> str:
    columns = ["fault", "hop", "stage", "streams", "in stage", "left", "hung", "failed", "lost", "wrong", "held"]
    columns += ["capacity", "of it back-off"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for cell in cells:
        counts = (cell.streams, cell.found, cell.left, cell.hung, cell.failed, cell.lost, cell.wrong, cell.leaked)
        times = ("–" if value is None else f"{value:.1f} s" for value in (cell.capacity_s, cell.backoff_s))
        lines.append(f"| {' | '.join([cell.fault, cell.hop, cell.stage, *map(str, counts), *times])} |")
    return "\n".join(lines)
