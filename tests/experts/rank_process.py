"""Ranks as processes: each has a whole engine of its own, and its experts answer for the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
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

from tripool import LLM, SamplingParams
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.errors import RankFenced
from tripool.experts.exchange import SharedView
from tripool.experts.layout import LANES, Layout
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


def answers(engine: Engine, jobs: Sequence[Job]) -> list[Any]:
    """Everything that a client could see: tokens and their log-probabilities."""
    prompts, params = [job[0] for job in jobs], [job[1] for job in jobs]
    generations = LLM(engine).generate(prompts, params)
    return [[(choice.token_ids, choice.logprobs) for choice in one.choices] for one in generations]


def _rank(control: Connection, results: Connection, model: str) -> None:
    """The main thread takes maps while another one runs steps."""
    engine = load(model)
    exchange: NativeExchange | None = None

    def run(jobs: Sequence[Job]) -> None:
        try:
            results.send(answers(engine, jobs))
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
            epoch, table, alive = arguments
            for rank in (rank for rank, is_alive in enumerate(alive) if not is_alive):
                exchange.fence(rank, epoch)
            exchange.install(epoch, table, alive)
        elif command == "run":
            Thread(target=run, args=arguments, daemon=True).start()
        control.send(exchange.silence_s() if command == "silence" else command)


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
    """Ranks with one exchange. `table`: [layers, experts]."""

    ranks: list[RankProcess]
    path: Path
    view: SharedView
    table: np.ndarray
    epoch: int = 1

    def install(self, lost: Sequence[int] = ()) -> None:
        alive = [rank not in lost for rank in range(len(self.ranks))]
        others = [rank for rank, is_alive in enumerate(alive) if is_alive]
        self.table = np.array(
            [[r if alive[r] else others[e % len(others)] for e, r in enumerate(t)] for t in self.table]
        )
        for rank in others:
            self.ranks[rank].ask("map", self.epoch, self.table, alive)

    def lose(self, rank: int) -> None:
        self.epoch += 1
        self.install([rank])

    def enter(self, rank: int, process: RankProcess) -> None:
        """A new process in the place of a rank that is gone. Experts are dealt out anew."""
        self.ranks[rank] = process
        process.ask("open", self.path, rank)
        self.epoch += 1
        layers, experts = self.table.shape
        self.table = np.tile((np.arange(experts) + self.epoch) % len(self.ranks), (layers, 1))
        self.install()

    def requests(self, source: int) -> int:
        """How many requests a rank has sent."""
        ranks = range(len(self.ranks))
        return sum(
            max(self.view.dispatch_bell(r, source, lane).read().sequence for r in ranks) for lane in range(LANES)
        )


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
def instance(ranks: list[RankProcess], layout: Layout, folder: Path) -> Iterator[Instance]:
    """Experts dealt out one by one."""
    path = folder / "slabs"
    create_slabs(path, layout)
    table = np.tile(np.arange(layout.experts) % layout.ranks, (layout.layers, 1))
    for number, rank in enumerate(ranks):
        rank.ask("open", path, number)
    made = Instance(list(ranks), path, SharedView(*attach_slabs(path)), table)
    made.install()
    try:
        yield made
    finally:
        path.unlink()
