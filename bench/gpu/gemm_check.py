"""What `gemm.py` checks before it times: operands, exact results, and kernels that could wait for ever.

    python bench/gpu/gemm_check.py wide|early|stream

Those run in a process of their own, which is ended when it does not answer; the benchmark then goes on without them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import timing  # noqa: F401  (puts `src/` on the import path)
import torch

from tripool.kernels.triton.grouped_gemm import grouped_gemm, make_plan
from tripool.kernels.triton.int8_gemm import arrivals, int8_gemm
from tripool.kernels.triton.tilings import Narrow, Resident, Stream, Tiling, Wide

ANSWER_WITHIN_S = 90


class Wrong(AssertionError):
    """A product that is not the exact one."""


@dataclass(frozen=True)
class Operands:
    x: torch.Tensor
    x_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor

    @classmethod
    def draw(cls, m: int, n: int, k: int, experts: int = 0) -> Operands:
        outer = (experts, n) if experts else (n,)
        x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
        w = torch.randint(-127, 128, (*outer, k), dtype=torch.int8, device="cuda")
        return cls(x, torch.rand(m, device="cuda") * 1e-3, w, torch.rand(*outer, device="cuda") * 1e-3)

    def run(self, **more) -> torch.Tensor:
        return int8_gemm(self.x, self.x_scale, self.w, self.w_scale, **more)

    def torch_int8(self) -> torch.Tensor:
        total = torch._int_mm(self.x, self.w.T)
        return (total * self.x_scale[:, None] * self.w_scale[None, :]).to(torch.bfloat16)

    def expected(self) -> torch.Tensor:
        """By torch's own integers; its call wants more than 16 rows, and is at ease with a multiple of 32."""
        pad = torch.nn.functional.pad(self.x, (0, 0, 0, -len(self.x) % 32))
        total = torch._int_mm(pad, self.w.T)[: len(self.x)].float()
        return (total * self.x_scale[:, None] * self.w_scale[None, :]).to(torch.bfloat16)

    def fp8_row_wise(self) -> Callable[[], object]:
        a, b = self.x.to(torch.float8_e4m3fn), self.w.to(torch.float8_e4m3fn).T
        scales = self.x_scale[:, None].contiguous(), self.w_scale[None, :].contiguous()
        return lambda: torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)


def check(ours: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    wrong = ~torch.isclose(ours.float(), expected.float(), rtol=2**-7, atol=0)
    if wrong.any():
        raise Wrong(f"{what}: {int(wrong.sum())} of {wrong.numel()} differ")


def check_experts(out: torch.Tensor, one: Operands, starts: list[int], counts: list[int], what: object) -> None:
    for e, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = slice(start, start + count)
        if count:
            alone = Operands(one.x[mine], one.x_scale[mine], one.w[e], one.w_scale[e])
            check(out[mine], alone.expected(), (what, e))


def grouped_check(counts: list[int], n: int, k: int, tiling: Tiling) -> None:
    rows, starts = sum(counts), [sum(counts[:e]) for e in range(len(counts))]
    one = Operands.draw(rows, n, k, len(counts))
    where = [torch.tensor(v, dtype=torch.int32, device="cuda") for v in (starts, counts)]
    out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    grouped_gemm(one.x, one.x_scale, one.w, one.w_scale, make_plan(*where, rows, tiling), out=out)
    check_experts(out, one, starts, counts, tiling)


def dense_check(m: int, n: int, k: int, tiling: Tiling, arrived: torch.Tensor | None = None) -> None:
    one = Operands.draw(m, n, k)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    total = (one.x.double() @ one.w.double().T).float()
    exact = (total * one.x_scale[:, None] * one.w_scale).to(torch.bfloat16)
    check(one.run(out=out, arrived=arrived, tiling=tiling), exact, (tiling, m, n, k))


def check_wide() -> None:
    """The wide kernel, dense and by expert, at ugly sizes."""
    for tiling in (Wide(), Wide(256, 128), Wide(128, 64, num_warps=4, per_sm=2)):
        for m, n, k in ((1, 8, 16), (257, 264, 272), (1000, 2112, 7168), (4001, 520, 512)):
            dense_check(m, n, k, tiling)
        grouped_check([130, 0, 257, 64], 528, 272, tiling)
        grouped_check([0, 0, 1], 528, 272, tiling)
        print(f"ok {tiling}", flush=True)


def check_stream() -> None:
    """Shared tiles at ugly sizes, twice with the same counters, and products that begin before their rows are there."""
    arrived = arrivals("cuda")
    for tiling in (
        Stream(16), Stream(32, 128, 128, 5, per_sm=2), Stream(128, 128, 128, 3, whole=True), Stream(128, 64, 128, 8),
        Stream(256, 128, 128, 4, 8, whole=True), Stream(16, 64, 256, 7, programs=66),
    ):  # fmt: skip
        for m, n, k in ((1, 8, 16), (16, 2112, 7168), (31, 72, 4112), (200, 520, 1040), (256, 7168, 2048)):
            for _ in range(2):
                dense_check(m, n, k, tiling, arrived)
                assert not arrived.any(), (tiling, m, n, k)
        print(f"ok {tiling}", flush=True)
    for tiling in (Resident(16, 2, 5, 2), Resident(32, 3, 4, 2)):
        for m, n in ((1, 8), (16, 2112), (15, 72)):
            dense_check(m, n, 3584, tiling, arrived)
            assert not arrived.any(), (tiling, m, n)
        print(f"ok {tiling}", flush=True)
    streams = Stream(16), Stream(16, 64, 256, 5, whole=True, before=3), Stream(16, 64, 256, 10, early=1)
    check_early((*streams, Resident(16, 2, 2, 2), Resident(16, 3, 1, 2, early=1)))


def check_early(
    tilings: Sequence[Tiling] = (Narrow(16, early=1), Narrow(16, early=2), Narrow(16, splits=3, early=2)),
) -> None:
    """Each product reads what the one before it wrote, in a replayed graph, from inputs that change between replays."""
    arrived = arrivals("cuda")
    for tiling in tilings:
        ones = [Operands.draw(16, 1024, 2048) for _ in range(6)]
        outs = [torch.empty(16, 1024, dtype=torch.bfloat16, device="cuda") for _ in ones]

        def chain(t: Tiling, into: list[torch.Tensor], ones=ones) -> None:
            x = ones[0].x
            for one, out in zip(ones, into, strict=True):
                int8_gemm(x, one.x_scale, one.w, one.w_scale, out=out, arrived=arrived, tiling=t)
                x = out.view(torch.int8)

        chain(tiling, outs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(tiling, outs)
        for _ in range(20):
            ones[0].x.random_(-127, 128)
            expected = [torch.empty_like(out) for out in outs]
            chain(Narrow(16), expected)
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            for ours, exact in zip(outs, expected, strict=True):
                assert torch.equal(ours.view(torch.int16), exact.view(torch.int16)), tiling
        print(f"ok {tiling}", flush=True)


def works(what: str) -> bool:
    command = [sys.executable, str(Path(__file__).resolve()), what]
    try:
        done = subprocess.run(command, timeout=ANSWER_WITHIN_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired as stuck:
        print(f"{what}: no answer within {ANSWER_WITHIN_S} s; said {stuck.stdout!r}", flush=True)
        return False
    print(done.stdout, done.stderr[-3000:] if done.returncode else "", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    {"wide": check_wide, "early": check_early, "stream": check_stream}[sys.argv[1]]()
