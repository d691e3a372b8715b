"""One rank of DeepSeek-V3 at full size on one GPU: 61 layers and the MTP layer in 8 bits, each with weights of its own.

    python3 bench/gpu/rank_slice.py [--quick] [--part decode|prefill|both] [--json FILE] [--commit ID] [--toy]

Measured: everything this rank computes, attention over its own requests and its experts over the rows that a balanced
or a skewed router would send it. Not measured: dispatch and combine, which come from published tables (see
`slice_exchange.py`) and are added (serial), or run beside two half batches that have 112 of the 132 multiprocessors
(overlapped; the other 20 are held by `resident.py`). A decode iteration gives 1.7 tokens per request (2 query tokens,
0.7 accepted). Rows say which operator takes how long and what its floor is. `--toy`: the same walk in miniature on a
CPU, under Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

TOY = "--toy" in sys.argv
if TOY:
    os.environ["TRITON_INTERPRET"] = "1"

import timing  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from slice_exchange import TOKENS_PUBLISHED, Duty, duty, exchange_us  # noqa: E402
from slice_layers import Decode, Layer, Op, Operators, Prefill, Shape, Weights8, make_layer  # noqa: E402
from slice_rows import INT8_TOPS, decode_rows, print_operators  # noqa: E402

EXCHANGE_SMS, LEFT_SMS = 20, 112
SKEW = 0.3
PUBLISHED_PREFILL = 6688.0
DECODE_ROWS = [  # ranks, batch, KV, skewed
    (128, 128, 4096, False), (128, 96, 4096, False), (128, 64, 4096, False), (128, 48, 4096, False),
    (128, 24, 4096, False), (128, 8, 4096, False), (128, 128, 1024, False), (128, 112, 2048, False),
    (128, 64, 8192, False), (128, 128, 8192, False), (128, 128, 4096, True), (128, 96, 4096, True),
    (320, 128, 4096, False), (320, 96, 4096, False), (320, 24, 4096, False), (320, 8, 4096, False),
    (320, 128, 4096, True),
]  # fmt: skip
QUICK_ROWS = [(128, 128, 4096, False), (128, 8, 4096, False), (320, 128, 4096, False)]
KV_POOL_BYTES = 24 << 30


class Slice:
    """The rank's weights, and one iteration over given operators."""

    def __init__(self, s: Shape, device: str) -> None:
        self.s, self.device = s, device
        self.layers = [make_layer(s, device, dense=i < s.dense_layers) for i in range(s.layers)]
        self.mtp = make_layer(s, device, dense=False)
        self.join = Weights8.random(s.hidden, 2 * s.hidden, device=device)
        self.head = Weights8.random(s.vocab, s.hidden, device=device)
        self.gain = torch.ones(s.hidden, dtype=torch.bfloat16, device=device)
        pool_blocks = 64 if TOY else KV_POOL_BYTES // (64 * s.latent * 2)
        self.pool = torch.zeros(pool_blocks, 64, s.latent, dtype=torch.bfloat16, device=device)
        if TOY:
            self.pool.normal_()
        else:
            for part in self.pool.split(1 << 16):
                part.normal_()

    @property
    def all_layers(self) -> list[Layer]:
        return [*self.layers, self.mtp]

    def deal(self, blocks: int) -> None:
        """Each layer's KV somewhere else, as far as the pool goes: no layer finds another's in the L2."""
        places = max(1, len(self.pool) // blocks)
        for i, layer in enumerate(self.all_layers):
            layer.kv, layer.kv_first = self.pool, (i % places) * blocks

    def iteration(self, parts: Sequence[Operators]) -> None:
        """All parts (one batch, or two halves of it) through layer after layer, then tokens and drafts."""
        both = [(part, part.ops(dense=True), part.ops(dense=False)) for part in parts]
        for layer in self.layers:
            for _, dense, sparse in both:
                for op in dense if layer.dense else sparse:
                    op.run(layer)
        for part, _, sparse in both:
            self.speak(part)
            if isinstance(part, Decode):
                self.draft(part, sparse)

    def speak(self, part: Operators) -> None:
        """The network's choice after each query row (after the last of each prompt, when prefilling)."""
        rows = part.ws.x if isinstance(part, Decode) else part.ws.x[-part.prompts :]  # type: ignore[attr-defined]
        part.ws.final = part.k.norm(rows.contiguous(), self.gain, 1e-6)
        part.ws.token = part._gemm(part.ws.final, self.head).argmax(-1)

    def draft(self, part: Decode, sparse: Sequence[Op]) -> None:
        """Whether the draft came true, and the next one: joined inputs, one more layer, the head again."""
        chosen = part.ws.token.view(part.requests, part.queries)
        part.ws.hit = chosen[:, 0] == chosen[:, -1]
        normed = F.rms_norm(part.ws.x, (self.s.hidden,), self.gain, 1e-6)
        joined = part.k.quantise(torch.cat((normed, normed), dim=1))
        part.ws.delta = part._gemm(joined, self.join)
        for op in sparse:
            op.run(self.mtp)
        self.speak(part)


def measured_ms(run: Callable[[], object], device: str, *, graph: bool, repetitions: int, hold: Any = None) -> float:
    """Median of `repetitions`, as one graph where that is asked for; with `hold` seated while they run.

    Nothing in the timed part waits for the whole device: it would wait for who holds the multiprocessors.
    """
    if device == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    run()  # compiles kernels and fills the allocator
    torch.cuda.synchronize()
    again = captured(run) if graph else run
    seqs = []
    with hold.seated() if hold is not None else nullcontext():
        for _ in range(repetitions + graph):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            again()
            stop.record()
            stop.synchronize()
            seqs.append(start.elapsed_time(stop))
    return statistics.median(seqs[graph:])


def captured(run: Callable[[], object]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def floor_us(op: Op, ceilings: timing.Ceilings) -> float:
    """Products of bytes at twice the measured bf16 rate, as the data sheet has it."""
    busy = op.int8_ops / (2 * ceilings.bf16_per_s) + op.bf16_ops / ceilings.bf16_per_s
    return max(op.num_bytes / ceilings.bytes_per_s, busy) * 1e6


def breakdown(
    rank: Slice, part: Operators, ceilings: timing.Ceilings, *, graph: bool, most_layers: int
) -> list[dict[str, Any]]:
    """Each operator over all layers that have it: microseconds per layer, floor, and what all layers cost together."""
    told = []
    for dense in (False, True):
        layers = [layer for layer in rank.all_layers if layer.dense == dense]
        for op in part.ops(dense=dense):
            if (dense and "dense" not in op.name) or not op.num_bytes:
                continue

            def run(op: Op = op, layers: list[Layer] = layers[:most_layers]) -> None:
                for layer in layers:
                    op.run(layer)

            us = measured_ms(run, rank.device, graph=graph, repetitions=5) * 1e3 / len(layers[:most_layers])
            times = len(layers) if dense or op.name in SPARSE_ONLY else len(rank.all_layers)
            floor = floor_us(op, ceilings)
            told.append(
                {
                    "op": op.name,
                    "us": us,
                    "floor_us": floor,
                    "times": times,
                    "over_floor_ms": (us - floor) * times / 1e3,
                }
            )
    return told


SPARSE_ONLY = ("gate, choose", "shared expert", "experts of this rank", "add")


def floor_ms(rank: Slice, part: Operators, ceilings: timing.Ceilings) -> float:
    dense, sparse = part.ops(dense=True), part.ops(dense=False)
    return sum(floor_us(op, ceilings) for layer in rank.all_layers for op in (dense if layer.dense else sparse)) / 1e3


def decode_row(
    rank: Slice, ranks: int, batch: int, kv: int, skewed: bool, hold: Any, ceilings: timing.Ceilings, *, detail: bool
) -> dict[str, Any]:
    """One batch as it is; then two halves beside the exchange."""
    rng, device = random.Random(7), rank.device

    def part(requests: int) -> tuple[Decode, Duty]:
        work = duty(ranks, 2 * requests, SKEW if skewed else 0.0, rng)
        rows = [min(r, 9) for r in work.rows] if TOY else work.rows
        return Decode(rank.s, requests, 2, kv, rows, own_shared=work.own_shared, device=device), work

    whole, work = part(batch)
    rank.deal(whole.num_blocks)
    compute = measured_ms(lambda part=whole: rank.iteration([part]), device, graph=True, repetitions=8)
    told: dict[str, Any] = {
        "ranks": ranks, "batch": batch, "kv": kv, "router": "skewed" if skewed else "balanced",
        "rows_per_expert": list(work.rows), "compute_ms": compute, "floor_ms": floor_ms(rank, whole, ceilings),
    }  # fmt: skip
    if detail:
        told["operators"] = breakdown(rank, whole, ceilings, graph=True, most_layers=1 if TOY else 99)
    del whole
    told["overlapped_compute_ms"] = None
    if hold is not None and batch > 1:
        sublayers = [part(batch - batch // 2)[0], part(batch // 2)[0]]
        sublayers[1].first_block = sublayers[0].num_blocks
        for half in sublayers:
            half.units = LEFT_SMS
        run = lambda: rank.iteration(sublayers)  # noqa: E731
        told["overlapped_compute_ms"] = measured_ms(run, device, graph=True, repetitions=5, hold=hold)
        del sublayers
    moe_layers = rank.s.layers - rank.s.dense_layers + 1
    for table in ("deepep", "cloudmatrix"):
        at_once = exchange_us(table, ranks, 2 * batch) * moe_layers / 1e3
        halved = exchange_us(table, ranks, batch) * 2 * moe_layers / 1e3
        bound = exchange_us(table, ranks, 2 * batch, least_tokens=TOKENS_PUBLISHED) * moe_layers / 1e3
        told |= {f"{table}_serial_ms": compute + at_once, f"{table}_serial_bound_ms": compute + bound}
        beside = told["overlapped_compute_ms"]
        # The first dispatch and the last combine have nothing to hide behind.
        told[f"{table}_overlapped_ms"] = None if beside is None else max(beside, halved) + halved / (2 * moe_layers)
    gc.collect()
    return told


def prefill_rows(rank: Slice, hold: Any, ceilings: timing.Ceilings, *, quick: bool) -> list[timing.Row]:
    prompts, length = (2, 6) if TOY else (4, 4096)
    tokens, rows = prompts * length, []
    for skewed in (False,) if quick else (False, True):
        work = duty(32, tokens, SKEW if skewed else 0.0, random.Random(7))
        held = [min(r, 9) for r in work.rows] if TOY else work.rows
        part = Prefill(rank.s, prompts, length, held, own_shared=True, device=rank.device)
        rank.deal(-(-tokens // 64))
        run = lambda part=part: rank.iteration([part])  # noqa: E731
        tried = {} if TOY else choose_attention(rank, part)
        ms = measured_ms(run, rank.device, graph=False, repetitions=2)
        details: dict[str, Any] = {
            "rows_per_expert": list(work.rows), "compute_ms": ms, "floor_ms": floor_ms(rank, part, ceilings),
            "attention_ms": tried, "rate_per_tflops": tokens / ms * 1e3 / INT8_TOPS,
        }  # fmt: skip
        if hold is not None:
            part.units = LEFT_SMS
            beside = measured_ms(run, rank.device, graph=False, repetitions=1, hold=hold)
            part.units = 0
            details |= {"compute_ms_on_112": beside, "tok_s_on_112": tokens / beside * 1e3}
        if not skewed:
            details["operators"] = breakdown(rank, part, ceilings, graph=False, most_layers=1 if TOY else 4)
        note = f"{details['rate_per_tflops']:.2f} tok/s per TFLOPS; published 4.45; floor {details['floor_ms']:.0f} ms"
        if hold is not None:
            note += f"; on 112 SMs {details['tok_s_on_112']:,.0f} tok/s"
        name = f"prefill EP32, {prompts} × {length} tokens, {'skewed' if skewed else 'balanced'}: compute"
        rate = tokens / ms * 1e3
        bar = None if skewed else 1.0
        rows.append(
            timing.Row(
                name=name,
                ours=rate,
                peer=PUBLISHED_PREFILL if skewed else 7400.0,
                unit="tok/s",
                target=bar,
                note=note,
                details=details,
            )
        )
        del part
        gc.collect()
    return rows


def choose_attention(rank: Slice, part: Prefill) -> dict[str, float | str]:
    """Which of torch's fused kernels is fastest here, with values padded to the keys' width or as they are."""
    layer = rank.layers[-1]
    found: dict[str, float | str] = {}
    best = float("inf")
    for pad in (True, False):
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            trial = Prefill(rank.s, part.prompts, part.prompt_tokens, [1], own_shared=True, device=rank.device)
            trial.pad_values, trial.backend = pad, backend
            ops = {op.name: op for op in trial.ops(dense=False)}
            names = list(ops)
            for name in names[: names.index("keys and values in place")]:
                ops[name].run(layer)
            pair = [ops["keys and values in place"], ops["causal attention"]]
            key = f"{backend}{' padded' if pad else ''}"
            try:
                ms = measured_ms(
                    lambda pair=pair: [op.run(layer) for op in pair], rank.device, graph=False, repetitions=3
                )
            except RuntimeError as refusal:  # this kernel does not take these widths
                found[key] = str(refusal).splitlines()[0][:120]
                continue
            found[key] = ms
            if ms < best:
                best, part.pad_values, part.backend = ms, pad, backend
    return found


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("--toy", action="store_true", help="miniature on a CPU, under the interpreter")
    parser.add_argument("--part", choices=("decode", "prefill", "both"), default="both")
    asked = parser.parse_args()
    device, hold = ("cpu", None) if TOY else ("cuda", None)
    torch.manual_seed(7)
    if TOY:
        from toy import patch_interpreter

        patch_interpreter()
        ceilings, origin = timing.Ceilings(4.2e12, 760e12), timing.Origin("a toy on a CPU", "none")
    else:
        from resident import Resident, Unavailable

        ceilings, origin = timing.measure_ceilings(), timing.gpu_origin(asked.commit)
        print(
            f"ceilings: {ceilings.bytes_per_s / 1e12:.2f} TB/s, {ceilings.bf16_per_s / 1e12:.0f} TFLOP/s bf16",
            flush=True,
        )
        try:
            hold = Resident(EXCHANGE_SMS)
        except Unavailable as reason:
            print(f"no overlapped rows: {reason}", flush=True)
    rows: list[timing.Row] = []
    with torch.inference_mode():
        began = time.monotonic()
        rank = Slice(Shape.toy() if TOY else Shape(), device)
        if not TOY:
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() / 2**30
            print(f"weights and KV in {time.monotonic() - began:.1f} s, {held:.0f} GiB", flush=True)
        if asked.part in ("decode", "both"):
            told = []
            wanted = [(128, 2, 70, False), (320, 3, 66, True)] if TOY else QUICK_ROWS if asked.quick else DECODE_ROWS
            for i, row in enumerate(wanted):
                told.append(decode_row(rank, *row, hold, ceilings, detail=i == 0))
                beside = told[-1]["overlapped_compute_ms"]
                print(
                    f"decode {row}: {told[-1]['compute_ms']:.2f} ms, floor {told[-1]['floor_ms']:.2f}, halves on 112: "
                    f"{'–' if beside is None else f'{beside:.2f}'}; {time.monotonic() - began:.0f} s", flush=True,
                )  # fmt: skip
            print_operators(f"decode {wanted[0]}", told[0]["operators"])
            rows += decode_rows(told)
        if asked.part in ("prefill", "both"):
            found = prefill_rows(rank, hold, ceilings, quick=asked.quick or TOY)
            print_operators("prefill", found[0].details["operators"])
            rows += found
    timing.print_rows(rows, origin)
    if asked.json:
        timing.write_json(rows, origin, asked.json)
    return int(any(row.ok is False for row in rows if row.target is not None))


if __name__ == "__main__":
    sys.exit(main())
