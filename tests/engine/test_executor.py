"""The fused executor against the plain one, on the exact path: the same tokens, drafts and KV with fewer calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tripool.core import Request
from tripool.engine.engine import Engine
from tripool.engine.executor import Executor, FusedExecutor, PlainExecutor
from tripool.engine.runner import Runner
from tripool.engine.sampler import Guard, Sampler
from tripool.kernels import CPU, CPU8
from tripool.models import Model

from .mtp_traffic import BLOCK_GB, CROWDED, ROOMY, Bundled, ask, bundled, check_published, listen, mixed_request, run


@pytest.fixture(scope="module")
def tiny() -> Iterator[Bundled]:
    with bundled(CPU8) as model:
        yield model


def plain_executor(model: Model, num_blocks: int, *, mtp: bool, guard: Guard) -> Executor:
    runner, sampler = Runner(model, num_blocks=num_blocks, mtp=mtp), Sampler(model.arch.vocab)
    return PlainExecutor(runner, sampler, mtp=mtp, guard=guard)


@pytest.fixture
def plain_engine(tiny: Bundled, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def build(**config: Any) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("tripool.engine.engine.cpu_executor", plain_executor)
            return tiny.engine(**config)

    return build


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """Results of a runner's method from now on."""

    def count(name: str) -> list[Any]:
        results: list[Any] = []
        method = getattr(Runner, name)

        def counting(self: Runner, *arguments: Any) -> Any:
            results.append(method(self, *arguments))
            return results[-1]

        monkeypatch.setattr(Runner, name, counting)
        return results

    return count


def test_the_kernel_table_decides_which_executor_serves(tiny: Bundled) -> None:
    assert type(tiny.engine().executor) is FusedExecutor
    with bundled(CPU) as float32:
        assert type(float32.engine().executor) is PlainExecutor


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("config", [CROWDED, ROOMY], ids=["crowded", "roomy"])
def test_mixed_batches(tiny: Bundled, plain_engine: Callable[..., Engine], config: dict[str, float], mtp: bool) -> None:
    """Every kind of sampling, grammars included, with prompts and decodes in one batch."""
    requests = [mixed_request(number, tiny, longest=20) for number in range(500, 526)]

    def all_of_it(engine: Engine) -> tuple[object, ...]:
        told = run(engine, requests, listen(engine))
        return told.answers(), told.drafts, engine.scheduler.num_drafted, engine.scheduler.num_accepted

    fused = all_of_it(tiny.engine(**config, mtp=mtp))
    assert all_of_it(plain_engine(**config, mtp=mtp)) == fused
    assert bool(fused[1]) == mtp


def test_drafts_of_a_batch_in_one_call(
    tiny: Bundled, plain_engine: Callable[..., Engine], counted: Callable[[str], list[Any]]
) -> None:
    """A batch of several temperatures, mixed with prompts: the same draft for every sequence at every step."""
    requests = [ask(tiny, number, temperature=0.35 * (number % 3), max_tokens=30) for number in range(7)]

    def drafts(engine: Engine) -> dict[tuple[str, int, int], int]:
        return run(engine, requests, listen(engine)).drafts

    apart = drafts(plain_engine(**ROOMY))
    found = counted("draft_tokens")
    assert drafts(tiny.engine(**ROOMY)) == apart
    assert sum(map(len, filter(None, found))) > 0.8 * len(apart) > 50


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_step_and_draft_of_a_single_sequence_in_one_call(
    tiny: Bundled, plain_engine: Callable[..., Engine], counted: Callable[[str], list[Any]], temperature: float
) -> None:
    """The same text, drafts and KV as by separate calls; across blocks, and to every kind of end."""
    numbers, longest = range(4), 90
    asked: list[Request] = [
        ask(tiny, n, repeat=7 * n, temperature=temperature, max_tokens=longest - n) for n in numbers
    ]

    def all_of_it(engine: Engine) -> tuple[list[object], list[list[float]]]:
        found: list[object] = []
        engine.executor.runner.kv.fill_(float("nan"))
        for request in asked:
            told = run(engine, [request], listen(engine))
            found.append((told.tokens(), told.drafts, engine.scheduler.num_drafted, engine.scheduler.num_accepted))
        check_published(engine)
        return found, engine.executor.runner.kv[-1].nan_to_num(7.0).sum(1).tolist()

    apart, apart_kv = all_of_it(plain_engine(kv_gb=40 * BLOCK_GB))
    calls = counted("step_and_guess")
    together, together_kv = all_of_it(tiny.engine(kv_gb=40 * BLOCK_GB))
    assert together == apart
    assert len(calls) > 0.4 * len(asked) * longest
    # The slot after the last token of an answer belongs to nobody: in one call it is filled before the end is known.
    assert sum(a != b for a, b in zip(together_kv, apart_kv, strict=True)) <= len(asked)
