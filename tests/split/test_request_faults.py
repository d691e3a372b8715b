"""A fault inside a worker ends the request it concerns with 500, at once and for good; its worker goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tripool.core import Request, SamplingParams
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import RequestFailed
from tripool.messages import StartDecode, StartPrefill
from tripool.router import Send
from tripool.sequence import Seq

from .in_process import Fleet

TEXT = fake_text()
BAD = 13
"""A seed."""


class Poisoned(PagedFake):
    """Whatever it is asked for a request of that seed fails, in one of its functions."""

    def __init__(self, what: str = "") -> None:
        super().__init__(TEXT, max_running=8)
        self._what = what
        self._bad: list[Seq] = []

    def _touch(self, what: str, request: Request) -> None:
        if what == self._what and request.seed == BAD:
            raise RuntimeError("a secret")

    def add(self, request: Request, answered: Any = None) -> None:
        super().add(request, answered)
        self._touch("add", request)

    def attach(self, request: Request, *args: Any, **more: Any) -> Seq | None:
        seq = super().attach(request, *args, **more)
        self._touch("attach", request)
        if request.seed == BAD and seq is not None:
            self._bad.append(seq)
        return seq

    def detach(self, request_id: str, choice: int) -> Seq:
        seq = super().detach(request_id, choice)
        if seq.request.seed == BAD:
            self._bad.append(seq)
        return seq

    def export_block(self, block: int, into: memoryview) -> None:
        assert self._what != "export" or all(block not in seq.table for seq in self._bad), "a secret"
        super().export_block(block, into)

    def import_block(self, block: int, data: memoryview) -> None:
        assert self._what != "import" or all(block not in seq.table for seq in self._bad), "a secret"
        super().import_block(block, data)

    def _sample(self, task: Any) -> Any:
        self._touch("sample", task.seq.request)
        return super()._sample(task)


def ask(name: str, seed: int, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=n)
    # Prompts of their own: a block that is shared is nobody's alone.
    return Request(id=name, prompt_ids=(seed,) * 80, params=params, seed=seed, end_ids=TEXT.end_ids)


@pytest.mark.parametrize(
    ("role", "what"),
    [
        ("prefill", "add"), ("prefill", "sample"), ("prefill", "export"),
        ("decode", "attach"), ("decode", "import"), ("decode", "sample"),
    ],
)  # fmt: skip
def test_a_fault_in_a_worker_fails_that_request_alone(tmp_path: Path, caplog, role: str, what: str) -> None:
    prefill, decode = Poisoned(what if role == "prefill" else ""), Poisoned(what if role == "decode" else "")
    fleet = Fleet(tmp_path, [prefill], [decode])
    placed = []
    carry_out = fleet._carry_out

    def watch(outputs: list[Any]) -> None:
        sends = [o.message for o in outputs if isinstance(o, Send)]
        placed.extend(m for m in sends if isinstance(m, StartPrefill | StartDecode) and m.request.seed == BAD)
        carry_out(outputs)

    fleet._carry_out = watch  # type: ignore[method-assign]
    fleet.run([ask("a", 1), ask("bad", BAD, n=2), ask("b", 2)])
    (error,) = fleet.failed.values()
    assert isinstance(error, RequestFailed) and (error.status, error.code) == (500, "internal_error")
    assert "bad" in error.message and "secret" not in str(error)
    assert [len(fleet.events[name, 0]) for name in ("a", "b")] == [12, 12]
    assert sum(isinstance(message, StartPrefill) for message in placed) == 1, "it was placed again"
    fleet.run([ask("later", 3)])
    assert len(fleet.events["later", 0]) == 12
    for engine in (prefill, decode):
        engine.scheduler.check()
        assert engine.num_held_blocks == 0
    assert any(record.exc_info and "bad" in record.message for record in caplog.records)
    fleet.close()
