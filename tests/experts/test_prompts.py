"""Prompts that ranks compute together: every token, log-probability and byte of KV is that of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from threading import Event, Thread
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch

from experts.mixed import Answers, mixed_run
from experts.rank_process import _CONTEXT, DEADLINE_S, _receive, _start_fork_server, load
from oracle.deepseek_cases import V2, V3
from oracle.folders import save_case
from oracle.gqa_cases import QWEN3_MOE
from tripool import LLM, SamplingParams
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.experts.prompt_layout import PromptLayout
from tripool.experts.prompt_split import Claimer, PromptView
from tripool.experts.slabs import attach_prompts, create_slabs
from tripool.kernels.cpu8.library import set_threads
from tripool.kernels.cpu8.prompts import NativePrompts

Prompts = Sequence[list[int]]


@cache
def load_owner(model: str) -> Engine:
    """Without reuse of prefixes: every prompt is computed."""
    return load_engine(model, EngineConfig(kv_gb=0.05, threads=1, prefix_reuse=False))


def _help(control: Connection, model: str, path: Path, rank: int) -> None:
    helper = NativePrompts(*attach_prompts(path), rank, load(model).executor.runner.model.stack)
    control.send("ready")
    control.poll(DEADLINE_S)
    helper.close()


class Helper:
    def __init__(self, model: str, path: Path, rank: int) -> None:
        _start_fork_server()
        self.control, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_help, args=(theirs, model, path, rank), daemon=True)
        self.process.start()
        theirs.close()
        assert _receive(self.control) == "ready"

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


class Group:
    """Rank 0 is the test's own process; the others help it."""

    def __init__(self, model: str, ranks: int, path: Path, *, started: bool = True) -> None:
        self.model, self.path, self.engine = model, path, load_owner(model)
        arch = self.engine.executor.runner.model.arch
        widths = {"query_width": arch.query_width, "kv_width": arch.kv_width, "attended_width": arch.attended_width}
        layout = PromptLayout(ranks=ranks, rows=512, context=arch.context_tokens, hidden=arch.hidden, **widths)
        create_slabs(path, layout)
        self.view = PromptView(*attach_prompts(path))
        self.helpers = [Helper(model, path, rank) for rank in range(1, ranks)] if started else []

    def units(self, rank: int) -> int:
        """How many units a rank has computed for this one in the newest phases."""
        return int((self.view.done(rank, 0) > 0).sum())

    @property
    def phase(self) -> int:
        return int(self.view.owner(0)["state"][0]) & 0xFFFFFFFF

    @contextmanager
    def shared(self) -> Iterator[None]:
        prompts = NativePrompts(*attach_prompts(self.path), 0, self.engine.executor.runner.model.stack)
        try:
            yield
        finally:
            prompts.close()

    def close(self) -> None:
        for helper in self.helpers:
            helper.kill()
        self.path.unlink()


@contextmanager
def group(model: str, ranks: int, folder: Path, *, started: bool = True) -> Iterator[Group]:
    made = Group(model, ranks, folder / "prompts", started=started)
    try:
        yield made
    finally:
        made.close()


def run(engine: Engine, prompts: Prompts) -> tuple[list[Any], torch.Tensor]:
    """Tokens, log-probabilities and all KV, that of the MTP layer too: it follows the last step before the next one is
    scheduled, so without `draft` it would be missing here and be written into the next run's zeros."""
    engine.executor.runner.kv.zero_()
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True, logprobs=2)
    generations = LLM(engine).generate(prompts, params)
    tokens = [[(choice.token_ids, choice.logprobs) for choice in one.choices] for one in generations]
    engine.draft()
    return tokens, engine.executor.runner.kv.clone()


def prompts_of(seed: int, vocab: int, *lengths: int) -> Prompts:
    random = Random(seed)
    return [[random.randrange(6, vocab) for _ in range(length)] for length in lengths]


def assert_same(engine: Engine, ranks: Group, prompts: Prompts) -> None:
    tokens, kv = run(engine, prompts)
    with ranks.shared():
        shared_tokens, shared_kv = run(engine, prompts)
    assert shared_tokens == tokens
    assert kv.count_nonzero() and np.array_equal(sorted_blocks(kv), sorted_blocks(shared_kv))


def sorted_blocks(kv: torch.Tensor) -> np.ndarray:
    """Which blocks a sequence gets depends on what ran before."""
    blocks = kv.unflatten(1, (-1, 64)).transpose(0, 1).flatten(1).numpy()
    used = blocks[blocks.any(axis=1)]
    return used[np.lexsort(used.T[:3])]


def test_one_process_gives_the_same_kv_twice() -> None:
    """What the other tests compare with. Of these prompts, the second run's last blocks are those of the first."""
    engine, prompts = load_owner("tiny"), prompts_of(202, 8000, 400, 100)
    (tokens, kv), (again, kv_again) = run(engine, prompts), run(engine, prompts)
    assert tokens == again and np.array_equal(sorted_blocks(kv), sorted_blocks(kv_again))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_give_the_tokens_and_the_kv_of_one_process(ranks: int, tmp_path: Path) -> None:
    """One long prompt, several uneven ones in one step, and steps that are too short to be shared."""
    engine = load_owner("tiny")
    with group("tiny", ranks, tmp_path) as made:
        for number, lengths in enumerate(((600,), (300, 5, 70, 130, 1), (40,))):
            assert_same(engine, made, prompts_of(number, 8000, *lengths))
        deadline = monotonic() + DEADLINE_S
        while not all(made.units(rank) for rank in range(1, ranks)):
            assert monotonic() < deadline, "a helper never helps"
            assert_same(engine, made, prompts_of(5, 8000, 500))


def test_several_threads(tmp_path: Path) -> None:
    set_threads(2)
    try:
        with group("tiny", 2, tmp_path) as made:
            assert_same(load_owner("tiny"), made, prompts_of(1, 8000, 600, 90))
    finally:
        set_threads(1)


@pytest.mark.parametrize("case", [V3[0], V2[0], QWEN3_MOE[0]], ids=lambda case: case.name)
def test_other_families(case, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    save_case(case, tmp_path / "model")
    engine = load_owner(model)
    with group(model, 2, tmp_path) as made:
        limit = engine.context_tokens - 8
        assert_same(engine, made, prompts_of(1, case.settings["vocab_size"], min(300, limit), min(90, limit)))
        assert made.phase > 2 * engine.executor.runner.model.arch.layers, "the step was shared"


def test_a_rank_that_claims_and_never_finishes(tmp_path: Path) -> None:
    """The owner computes its units itself."""
    engine, stop = load_owner("tiny"), Event()
    with group("tiny", 2, tmp_path, started=False) as made:
        claimer, claimed = Claimer(made.view, 1, 0), []

        def claim() -> None:
            while not stop.is_set():
                claimed.extend(filter(None, [claimer.claim()]))

        thread = Thread(target=claim)
        thread.start()
        try:
            deadline = monotonic() + DEADLINE_S
            while not claimed:
                assert monotonic() < deadline
                assert_same(engine, made, prompts_of(2, 8000, 300))
        finally:
            stop.set()
            thread.join(DEADLINE_S)
        assert {unit.index for unit in claimed} <= set(range(17))


def harass(folder: Path, seed: int, rounds: int) -> None:
    """A helper is killed, or stopped for a while, at a random phase of a step."""
    engine, random = load_owner("tiny"), Random(seed)
    with group("tiny", 2, folder) as made:
        for number in range(rounds):
            prompts, moment = prompts_of(100 * seed + number, 8000, 400, 100), random.randrange(17)
            stop = number % 3 == 2
            first = made.phase

            def strike(moment: int = moment, first: int = first, stop: bool = stop) -> None:
                deadline = monotonic() + DEADLINE_S
                while made.phase < first + moment and monotonic() < deadline:
                    pass
                made.helpers[0].signal(signal.SIGSTOP if stop else signal.SIGKILL)

            thread = Thread(target=strike)
            thread.start()
            assert_same(engine, made, prompts)
            thread.join(DEADLINE_S)
            if stop:
                made.helpers[0].signal(signal.SIGCONT)
                assert_same(engine, made, prompts)
            else:
                made.helpers[0].kill()
                made.helpers[0] = Helper("tiny", made.path, 1)


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", [None, V3[0], V2[0], QWEN3_MOE[0]], ids=lambda case: case.name if case else "tiny")
def test_three_hundred_mixed_requests(case, ranks: int, tmp_path: Path) -> None:
    """Of many prompts only a part is new; without room they come in pieces, beside others' tokens. Ten at a time: steps
    with prompts alone are shared, and once sequences run they are in every step."""
    model = "tiny" if case is None else str(save_case(case, tmp_path / "model"))
    engine = load_owner(model)

    def answers(crowded: bool) -> list[Answers]:
        waves = [range(first, first + 10) for first in range(0, 300, 10)]
        return [mixed_run(engine, wave, 12, crowded, piece_tokens=40 * ranks)[0] for wave in waves]

    with group(model, ranks, tmp_path) as made:
        for crowded in (False, True):
            expected, phase = answers(crowded), made.phase
            with made.shared():
                assert answers(crowded) == expected
            assert made.phase > phase + 100, "steps were shared"


@pytest.mark.prove
def test_killed_and_stopped_helpers_change_nothing(tmp_path: Path) -> None:
    harass(tmp_path, 0, 3)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_killed_and_stopped_helpers_change_nothing(seed: int, tmp_path: Path) -> None:
    harass(tmp_path, seed, 60)
