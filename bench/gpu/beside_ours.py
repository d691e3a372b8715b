"""Our side of `vllm_beside.py`: the engine that serves, one step at a time, with random weights.

    python3 bench/gpu/beside_ours.py SHAPE KIND [--batches 1,8,64,256] [--mixed RATE] [--profile FILE] [--json FILE]

KIND: bf16, fp8 or int8. `--mixed RATE`: vLLM's closed-loop rate in requests per second, whose shares are the loads.
`--profile FILE`: kernels, idle time of the device and host time of decode steps (see `beside_profile.py`).
`--small`: narrow shapes, on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timing  # noqa: F401 (puts the package on the import path)
import torch
from beside_load import (
    ANSWER_TOKENS,
    DRAIN_S,
    LOADS,
    PROFILED,
    PROMPT_TOKENS,
    Answers,
    Arrival,
    Report,
    Sizes,
    Stamps,
    batch_row,
    endless,
    poisson,
)
from beside_profile import profile_rows
from beside_shapes import SHAPES, draw, settings_of
from fp8_folder import blocks_of

from tripool.config import EngineConfig
from tripool.core import BLOCK_TOKENS, Request, SamplingParams
from tripool.engine.device import DeviceSpec
from tripool.engine.engine import Engine
from tripool.engine.overlapped import OverlappedEngine
from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.invariant_linear import Invariant
from tripool.kernels.cuda.quantized_linear import QuantizedOps
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.ref import fp8
from tripool.kernels.weights import E4M3, INT8
from tripool.models import Model
from tripool.models.load import arch_of
from tripool.models.loader import Loader
from tripool.text.files import TextFiles

STORED = {"fp8": E4M3, "int8": INT8}
KV_BYTES = 56 * 2**30
"""Most memory for KV blocks."""
BATCH_STEP_TOKENS, MIXED_STEP_TOKENS = 16384, 4096
"""For batches vLLM's own default on this device. Under mixed load it takes 8,192; half of that keeps steps with prompts
below 50 ms, and costs little of the time to first token."""
NO_TEXT = TextFiles(tokenizer_json="")


class Drawn:
    """A source (see `models.loader`) that draws each tensor by a seed of its name.

    With `quantized`, projections are as if they had been stored in those 8 bits: int8 by row, e4m3 by 128 x 128.
    """

    def __init__(self, device: torch.device, quantized: QuantizedOps | None) -> None:
        self.device, self._quantized = str(device), quantized
        self._generator = torch.Generator(device)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return "eh_proj" not in name  # no MTP layer

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        self._shapes[name] = shape

    def read(self, name: str, out: torch.Tensor) -> None:
        draw(name, out, self._generator.manual_seed(zlib.crc32(name.encode())))
        scales = self._scales(name, out)
        if self._quantized is not None and scales is not None:
            factors = scales[:, None] if scales.dim() == 1 else fp8.by_column(scales, out.shape[1])
            out.copy_(self._quantized.pack(out.float() / factors).float() * factors)

    def scales(self, name: str, kind: str) -> torch.Tensor | None:
        if "_proj" not in name:
            return None
        weight = torch.empty(self._shapes[name], dtype=torch.bfloat16, device=self.device)
        draw(name, weight, self._generator.manual_seed(zlib.crc32(name.encode())))
        return self._scales(name, weight)

    def _scales(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        if self._quantized is None or "_proj" not in name:
            return None
        if self._quantized.stored == INT8:
            return weight.float().abs().amax(1) / 127.0
        return blocks_of(weight.float())[1].repeat_interleave(fp8.GROUP, 0)[: len(weight)]


@torch.inference_mode()
def make_model(settings: dict[str, Any], kind: str, device_spec: DeviceSpec) -> Model:
    device, exact = device_spec.device, device_spec.exact
    fused, quantized = device.type == "cuda" or exact, None
    if kind in STORED:
        quantized = quantized_ops_of(STORED[kind], fused=fused, device=device, invariant=exact)
    invariant = Invariant.on(device) if exact else None
    table = cuda_table(device_spec.dtype, fused=fused, quantized=quantized, invariant=invariant)
    loader = Loader(Drawn(device, quantized), table, device_spec.dtype, OnDevice(device))
    return Model(arch_of(settings, "made up"), loader)


class OurSide:
    """Engines over one model, one at a time."""

    def __init__(self, settings: dict[str, Any], kind: str, *, small: bool) -> None:
        self.small, self.vocab = small, int(settings["vocab_size"])
        device = torch.device("cpu" if small else "cuda")
        dtype = torch.float32 if small and kind == "bf16" else torch.bfloat16
        self.device_spec = DeviceSpec(device, dtype, use_8_bit_products=kind in STORED)
        self.model = make_model(settings, kind, self.device_spec)

    def engine(
        self,
        sequences: int,
        tokens_each: int,
        step_tokens: int,
        *,
        text: TextFiles = NO_TEXT,
        prefix_reuse: bool = False,
    ) -> Engine:
        """With KV memory for this many sequences, within `KV_BYTES`."""
        arch = self.model.arch
        wanted = sequences * (-(-(tokens_each + 3) // BLOCK_TOKENS) + 1) + 8
        block_bytes = arch.block_bytes(mtp=False, itemsize=self.device_spec.dtype.itemsize)
        num_blocks = min(wanted, KV_BYTES // block_bytes)
        config = EngineConfig(
            kv_gb=(num_blocks + 0.5) * block_bytes / 2**30,
            max_running=sequences,
            step_tokens=step_tokens,
            prefix_reuse=prefix_reuse,
            mtp=False,
            device="cpu" if self.small else "cuda",
        )
        engine = OverlappedEngine("random", self.model, text, config, self.device_spec)
        assert engine.num_blocks >= num_blocks
        return engine


def request_of(name: str, prompt: list[int], num_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return Request(id=name, prompt_ids=tuple(prompt), params=params, seed=0)


def answers_of(engine: Engine, prompts: list[list[int]], count: int) -> Answers:
    for i, prompt in enumerate(prompts):
        engine.add(request_of(str(i), prompt, count))
    answers: Answers = [[] for _ in prompts]
    while engine.busy:
        for event in engine.step():
            answers[int(event.request_id)].append(event.token_id)
    assert not engine.take_failed()
    return answers


def closed_loop(engine: Engine, requests: Iterator[Arrival], sizes: Sizes) -> dict[str, Any]:
    """A new request for each one that ends."""
    stamps, complete, added, began_s = Stamps(), list[str](), list[str](), time.perf_counter()
    while time.perf_counter() - began_s < sizes.closed_s:
        for arrival in itertools.islice(requests, sizes.in_flight - (len(added) - len(complete))):
            engine.add(request_of(arrival.id, arrival.prompt, arrival.num_tokens))
            added.append(arrival.id)
        complete += _stamp_step(engine, stamps, began_s)
    cancel_all(engine, added)
    return stamps.closed_row(complete, sizes)


def open_loop(engine: Engine, arrivals: list[Arrival], sizes: Sizes) -> Stamps:
    """Add each request when it arrives, between steps."""
    stamps, waiting, began_s = Stamps(), arrivals[::-1], time.perf_counter()
    while waiting or engine.busy:
        now_s = time.perf_counter() - began_s
        if now_s > sizes.load_s + DRAIN_S:
            break
        while waiting and waiting[-1].at_s <= now_s:
            arrival = waiting.pop()
            engine.add(request_of(arrival.id, arrival.prompt, arrival.num_tokens))
        if engine.busy:
            _stamp_step(engine, stamps, began_s)
        elif waiting:
            time.sleep(max(0.0, began_s + waiting[-1].at_s - time.perf_counter()))
    cancel_all(engine, [arrival.id for arrival in arrivals])
    return stamps


def _stamp_step(engine: Engine, stamps: Stamps, began_s: float) -> list[str]:
    """One step. The requests that ended in it."""
    events = engine.step()
    now_s = time.perf_counter() - began_s
    for event in events:
        stamps.tokens(event.request_id, now_s)
    assert not engine.take_failed()
    return [event.request_id for event in events if event.finish_reason is not None]


def cancel_all(engine: Engine, names: list[str]) -> None:
    for name in names:
        engine.cancel(name)
    while engine.busy:
        engine.step()


def mixed_rows(side: OurSide, peer_rate: float, sizes: Sizes, step_tokens: int, report: Report) -> None:
    engine = side.engine(sizes.in_flight, sizes.context_tokens, step_tokens)
    engine.warm()
    closed_loop(engine, endless(side.vocab, sizes, 0), replace(sizes, closed_s=sizes.warm_s))
    report.add(closed_loop(engine, endless(side.vocab, sizes, 1), sizes))
    for seed, load in enumerate(LOADS, 2):
        arrivals = poisson(side.vocab, sizes, load * peer_rate, seed)
        gc.collect()
        gc.freeze()  # a collection need not pass through the prompts, which no server would hold
        report.add(open_loop(engine, arrivals, sizes).open_row(arrivals, load, load * peer_rate))


def batch_rows(side: OurSide, batches: list[int], most: int, step_tokens: int, report: Report) -> None:
    for sequences in batches:
        engine = side.engine(sequences, PROMPT_TOKENS + ANSWER_TOKENS, step_tokens)
        report.add(batch_row(partial(answers_of, engine), side.vocab, sequences, small=side.small, most=most))
        del engine
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", choices=("bf16", *STORED))
    parser.add_argument("--batches", type=numbers, default=[])
    parser.add_argument("--mixed", type=float, metavar="RATE")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("--profile-batches", type=numbers, default=list(PROFILED))
    parser.add_argument("--step-tokens", type=int, help=f"{BATCH_STEP_TOKENS}, or {MIXED_STEP_TOKENS} when mixed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.small:
        torch.set_num_threads(1)  # more only wait for each other over matrices this narrow
    began_s = time.perf_counter()
    side = OurSide(settings_of(asked.shape, small=asked.small), asked.kind, small=asked.small)
    report = Report(asked.json, side="ours", shape=asked.shape, kind=asked.kind)
    print(f"{side.model.num_bytes / 1e9:.1f} GB of weights in {time.perf_counter() - began_s:.1f} s", flush=True)
    batch_tokens = asked.step_tokens or BATCH_STEP_TOKENS
    batch_rows(side, asked.batches, 2 if asked.quick else 5, batch_tokens, report)
    if asked.profile:
        batches = sorted({min(count, 4) for count in asked.profile_batches}) if asked.small else asked.profile_batches
        profile_rows(side, batches, batch_tokens, asked.profile, report)
    if asked.mixed:
        sizes = Sizes.of(quick=asked.quick, small=asked.small)
        mixed_rows(side, asked.mixed, sizes, asked.step_tokens or MIXED_STEP_TOKENS, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
