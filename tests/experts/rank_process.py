"""Ranks as processes: each has a whole engine of its own, and its experts answer for the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from experts.mixed import mixed_run
from tripool import LLM, SamplingParams
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.errors import RankFenced
from tripool.experts import ExpertMap
from tripool.experts.exchange import SharedView
from tripool.experts.layout import LANES, Layout, older
from tripool.experts.placement import Table
from tripool.experts.slabs import attach_slabs, create_slabs
from tripool.kernels.cpu8.exchange import NativeExchange
from tripool.kernels.cpu8.sublayers import Moe8

DEADLINE_S = 120.0
FENCED = "fenced"
_CONTEXT = multiprocessing.get_context("forkserver")

Job = tuple[list[int], SamplingParams]
"""A prompt and how to go on."""


@cache
def load(model: str) -> Engine:
    """Once per process; the fork server has loaded the bundled model before it starts ranks (`preload.py`)."""
    return load_engine(model, EngineConfig(kv_gb=0.05, threads=1))


def expert_layers(engine: Engine) -> list[Moe8]:
    layers = engine.executor.runner.model.expert_sublayers
    assert all(isinstance(layer, Moe8) for layer in layers)
    return layers


def heat(engine: Engine, bias: Sequence[float]) -> None:
    """From now on these numbers are added to the scores by which routers choose experts; in each layer, others' turn.

    A score lies between 0 and 1: with more than that, every row chooses the expert.
    """
    for number, layer in enumerate(expert_layers(engine)):
        turned = np.roll(np.array(bias, np.float32), number)
        _HEAT[number] = turned  # the layer keeps only its address
        layer.struct.bias = turned.ctypes.data


_HEAT: dict[int, np.ndarray] = {}


def answers(engine: Engine, jobs: Sequence[Job]) -> list[Any]:
    """Everything that a client could see: tokens and their log-probabilities."""
    prompts, params = [job[0] for job in jobs], [job[1] for job in jobs]
    generations = LLM(engine).generate(prompts, params)
    return [[(choice.token_ids, choice.logprobs) for choice in one.choices] for one in generations]


def _rank(control: Connection, results: Connection, model: str) -> None:
    """The main thread takes maps while another one runs steps."""
    engine = load(model)
    exchange: NativeExchange | None = None

    def run(answer: Callable[..., Any], *given: Any) -> None:
        try:
            results.send(answer(engine, *given))
        except RankFenced:
            results.send(FENCED)

    control.send("ready")
    while True:
        try:
            command, *arguments = control.recv()
        except EOFError:
            os._exit(0)
        if command == "open":
            path, rank = arguments
            exchange = NativeExchange(*attach_slabs(path), rank, expert_layers(engine))
        elif command == "close":
            exchange.close()
        elif command == "map":
            new = ExpertMap.decode(*arguments)
            for rank in new.gone:
                exchange.fence(rank, new.epoch)
            exchange.install(new.epoch, new.holders, [r not in new.gone for r in range(new.ranks)])
        elif command in ("run", "mixed"):
            Thread(target=run, args=(answers if command == "run" else mixed_run, *arguments), daemon=True).start()
        elif command == "heat":
            heat(engine, *arguments)
        told = {"silence": exchange and exchange.silence_s, "blocks": lambda: engine.scheduler.pool.num_held}
        control.send(told[command]() if command in told else command)


@cache
def _start_fork_server() -> None:
    _CONTEXT.set_forkserver_preload(["experts.preload"])
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not give its own path to the fork server
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


class RankProcess:
    def __init__(self, model: str) -> None:
        _start_fork_server()
        self._control, theirs = _CONTEXT.Pipe()
        self._results, results = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_rank, args=(theirs, results, model), daemon=True)
        self._process.start()
        theirs.close()
        results.close()

    def wait_until_ready(self) -> None:
        assert _receive(self._control) == "ready"

    def ask(self, *command: Any) -> Any:
        self._control.send(command)
        return _receive(self._control)

    def has_result(self) -> bool:
        return self._results.poll()

    def result(self) -> Any:
        return _receive(self._results)

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)


def _receive(connection: Connection) -> Any:
    assert connection.poll(DEADLINE_S), "no answer"
    return connection.recv()


@contextmanager
def processes(model: str, count: int) -> Iterator[list[RankProcess]]:
    started = [RankProcess(model) for _ in range(count)]
    try:
        for one in started:
            one.wait_until_ready()
        yield started
    finally:
        for one in started:
            one.kill()


@dataclass
class Instance:
    """Ranks with one exchange."""

    ranks: list[RankProcess]
    path: Path
    view: SharedView
    map: ExpertMap

    def install(self, new: ExpertMap) -> None:
        self.map = new
        for rank, process in enumerate(self.ranks):
            if rank not in new.gone:
                process.ask("map", new.encode())

    def lose(self, rank: int) -> None:
        self.install(self.map.without(rank))

    def enter(self, rank: int, process: RankProcess, table: Table | None = None) -> None:
        """A new process in the place of a rank that is gone; experts lie as in `table` from now on."""
        self.ranks[rank] = process
        process.ask("open", self.path, rank)
        back = self.map.returned(rank)
        self.install(back if table is None else back.replaced(table))

    def requests(self, source: int) -> int:
        """How many requests a rank has sent."""
        ranks = range(len(self.ranks))
        return sum(
            max(self.view.dispatch_bell(r, source, lane).read().sequence for r in ranks) for lane in range(LANES)
        )

    def unanswered(self) -> list[tuple[int, int, int]]:
        """(source, destination, lane) whose slabs are still in use: by requests of ranks that are not given up."""
        ranks = range(len(self.ranks))
        asked = {
            (s, d, lane): self.view.dispatch_bell(d, s, lane).read()
            for s in ranks
            for d in ranks
            for lane in range(LANES)
        }
        return [
            (source, destination, lane)
            for (source, destination, lane), bell in asked.items()
            if bell != self.view.combine_bell(source, destination, lane).read()
            and not older(bell.epoch, int(self.view.fence(source)[0]))
        ]


def layout_of(engine: Engine, ranks: int, slab_rows: int) -> Layout:
    moe = expert_layers(engine)
    first = moe[0].struct
    return Layout(
        ranks=ranks,
        layers=len(moe),
        experts=first.experts,
        top_k=first.top_k,
        hidden=first.norm.width,
        slab_rows=slab_rows,
    )


@contextmanager
def instance(
    ranks: list[RankProcess], layout: Layout, folder: Path, first: ExpertMap | None = None
) -> Iterator[Instance]:
    path = folder / "slabs"
    create_slabs(path, layout)
    for number, rank in enumerate(ranks):
        rank.ask("open", path, number)
    first = first or ExpertMap.contiguous(layout.layers, layout.experts, layout.ranks)
    made = Instance(list(ranks), path, SharedView(*attach_slabs(path)), first)
    made.install(first)
    try:
        yield made
    finally:
        path.unlink()
