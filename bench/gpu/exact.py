"""The exact mode on a card: the same tokens in any company, and what that costs.

    python3 bench/gpu/exact.py [--quick] [--json FILE] [--commit ID] [--only kernels tokens times] [--small]

kernels: bits of rows through single kernels (`exact_kernels.py`). tokens: mixed requests, greedy and sampled, through
the engine that serves: each alone, then all together, shuffled, in chunks of several step budgets, preempted, with
prefix hits and with drafts; the share of requests whose tokens are those of the request alone, to the last. Shapes of
V2-Lite, Llama-3-8B and Qwen3-30B-A3B with few layers and random weights, and the bundled model. times: a decode step
and a prefill of the whole V2-Lite, exact against default.

`--small`: narrow models on a CPU under Triton's interpreter: proves that the script runs, and shows no time of a card.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import timing
import torch

SMALL = "--small" in sys.argv
if SMALL:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(timing.REPO / "tests"))
    import oracle.triton_device  # noqa: F401 (the interpreter's products of bfloat16)

from beside_ours import make_model  # noqa: E402
from beside_shapes import TITLES, settings_of  # noqa: E402
from timing import Row  # noqa: E402

from tripool.checkpoints import open_checkpoint  # noqa: E402
from tripool.config import EngineConfig  # noqa: E402
from tripool.core import BLOCK_TOKENS, Request, SamplingParams  # noqa: E402
from tripool.engine.device import DeviceSpec, table_of  # noqa: E402
from tripool.engine.device_executor import DeviceExecutor  # noqa: E402
from tripool.engine.engine import Engine  # noqa: E402
from tripool.engine.overlapped import OverlappedEngine  # noqa: E402
from tripool.engine.sampler import Guard  # noqa: E402
from tripool.kernels.cuda.table import OnDevice  # noqa: E402
from tripool.models import Model, load_model  # noqa: E402
from tripool.text.files import TextFiles  # noqa: E402

DEVICE = torch.device("cpu" if SMALL else "cuda")
KINDS = {"lite": ("bf16", "fp8", "int8"), "llama": ("bf16",), "qwen": ("bf16",)}
LAYERS = 2 if SMALL else 3
PROMPTS, ANSWERS = ((62, 63), (4, 6)) if SMALL else ((5, 500), (8, 96))
SHARED = 66 if SMALL else 130
"""Tokens with which every fourth prompt begins."""
PROMPT_TOKENS = 8 if SMALL else 256
"""Of a request whose steps are timed."""
TIMED_STEPS = 2 if SMALL else 24


class Answers(dict[str, list[int]]):
    num_cached = 0
    """Prompt tokens that were found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Kept(DeviceSpec):
    """A device whose executors, with and without drafts, engines use one after the other: they share captured steps
    and KV memory."""

    num_blocks: int = 0
    executors: dict[bool, DeviceExecutor] = field(default_factory=dict)

    def executor(self, model: Model, num_blocks: int, *, mtp: bool, guard: Guard) -> DeviceExecutor:
        assert num_blocks <= self.num_blocks
        if mtp not in self.executors:
            self.executors[mtp] = DeviceSpec.executor(self, model, self.num_blocks, mtp=mtp, guard=guard)
        executor = self.executors[mtp]
        executor._guard = guard
        return executor


def requests_of(vocab: int, count: int, seed: int) -> list[Request]:
    """Mixed lengths, greedy and sampled in turn, some with a common beginning."""
    rng, requests = random.Random(seed), list[Request]()
    common = rng.choices(range(vocab), k=SHARED)
    for i in range(count):
        prompt = rng.choices(range(vocab), k=_between(rng, PROMPTS))
        if i % 4 == 3:
            prompt = common + prompt[: max(1, PROMPTS[1] - SHARED)]
        params = SamplingParams(temperature=0.8 * (i % 2), max_tokens=_between(rng, ANSWERS), ignore_eos=True)
        requests.append(Request(id=str(i), prompt_ids=tuple(prompt), params=params, seed=100 + i))
    return requests


def _between(rng: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return round(low * (high / low) ** rng.random())


def answered(engine: Engine, requests: Sequence[Request], *, joining: int = 0) -> Answers:
    """All at once, or `joining` more after each step."""
    answers = Answers({request.id: [] for request in requests})
    waiting = list(requests)[::-1]
    while waiting or engine.busy:
        for _ in range(min(joining or len(waiting), len(waiting))):
            engine.add(waiting.pop())
        for event in engine.step():
            answers[event.request_id].append(event.token_id)
            answers.num_cached += event.num_cached_tokens if event.finish_reason else 0
    assert not engine.take_failed()
    return answers


def kv_gb(model: Model, blocks: int, *, mtp: bool) -> float:
    return (blocks + 0.5) * model.arch.block_bytes(mtp=mtp, itemsize=torch.bfloat16.itemsize) / 2**30


class Side:
    """One model, and engines over it that share captured steps."""

    def __init__(self, title: str, model: Model, requests: Sequence[Request]) -> None:
        self.title, self.model, self.requests = title, model, requests
        self._each = max(len(r.prompt_ids) + (r.params.max_tokens or 0) for r in requests) // BLOCK_TOKENS + 2
        self._kept = Kept(DEVICE, torch.bfloat16, exact=True, num_blocks=self._each * len(requests))

    def engine(
        self, *, step_tokens: int = 512, running: int = 64, blocks: int = 0, reuse: bool = False, mtp: bool = False,
        kind: type[Engine] = OverlappedEngine,
    ) -> Engine:  # fmt: skip
        config = EngineConfig(
            kv_gb=kv_gb(self.model, blocks or self._kept.num_blocks, mtp=mtp), max_running=running,
            step_tokens=step_tokens, prefix_reuse=reuse, mtp=mtp,
        )  # fmt: skip
        return kind("exact", self.model, TextFiles(tokenizer_json=""), config, self._kept)

    def rows(self) -> Iterator[Row]:
        requests, began_s = self.requests, time.perf_counter()
        one_by_one = self.engine()
        alone = Answers()
        for request in requests:
            alone |= answered(one_by_one, [request])
        distinct = len({tuple(tokens) for tokens in alone.values()})
        yield self._row("together", alone, answered(self.engine(), requests), f"{distinct} different answers")
        shuffled = random.Random(1).sample(list(requests), len(requests))
        yield self._row("shuffled", alone, answered(self.engine(), shuffled, joining=3))
        for step_tokens, running in ((1, 4), (100, 20), (8192, 64)):
            engine = self.engine(step_tokens=step_tokens, running=running)
            yield self._row(f"chunked, {engine.step_tokens} tokens a step", alone, answered(engine, requests))
        few = self.engine(blocks=self._each + 3)
        found = answered(few, requests)
        yield self._row("preempted", alone, found, "preemptions", few.scheduler.num_preemptions)
        reusing = self.engine(reuse=True)
        answered(reusing, requests)
        again = answered(reusing, requests)
        yield self._row("prefix hits", alone, again, "cached tokens", again.num_cached)
        if self.model.mtp is not None:
            drafting = self.engine(mtp=True, kind=Engine)
            found = answered(drafting, shuffled, joining=5)
            yield self._row("with drafts", alone, found, "drafts accepted", drafting.scheduler.num_accepted)
            found = answered(self.engine(mtp=True), shuffled, joining=5)
            yield self._row("drafts where they pay", alone, found)
            few = self.engine(blocks=self._each + 3, mtp=True, kind=Engine)
            found = answered(few, requests)
            yield self._row("drafts, preempted", alone, found, "preemptions", few.scheduler.num_preemptions)
        print(f"{self.title}: {time.perf_counter() - began_s:.0f} s", flush=True)

    def _row(self, how: str, alone: Answers, found: Answers, note: str = "", count: int | None = None) -> Row:
        """`count`: how often that happened which the row is about. Never: the row shows nothing, and fails."""
        same = 0 if count == 0 else sum(found[name] == tokens for name, tokens in alone.items())
        return Row(
            name=f"{self.title}, {how}: tokens as alone", ours=same / len(alone), peer=1.0, unit="of requests",
            target=1.0, note=note if count is None else f"{count:,} {note}",
        )  # fmt: skip


def token_rows(count: int, only: Sequence[str]) -> Iterator[Row]:
    for shape, kinds in KINDS.items():
        for kind in kinds:
            settings = settings_of(shape, small=SMALL) | {"num_hidden_layers": LAYERS}
            if only and f"{shape}-{kind}" not in only:
                continue
            spec = DeviceSpec(DEVICE, torch.bfloat16, use_8_bit_products=kind != "bf16", exact=True)
            model = make_model(settings, kind, spec)
            yield from Side(f"{TITLES[shape]} {kind}", model, requests_of(model.arch.vocab, count, 3)).rows()
            del model
            free()
    for use_8_bit_products in (True, False):
        kind = "int8" if use_8_bit_products else "bf16"
        if (only and f"tiny-{kind}" not in only) or (SMALL and not only):  # under the interpreter it takes minutes
            continue
        spec = DeviceSpec(DEVICE, torch.bfloat16, use_8_bit_products=use_8_bit_products, exact=True)
        with open_checkpoint("tiny") as checkpoint, torch.inference_mode():
            model = load_model(checkpoint, spec.dtype, kernels=table_of(spec, checkpoint), store=OnDevice(DEVICE))
        yield from Side(f"bundled {kind}", model, requests_of(model.arch.vocab, count, 4)).rows()
        del model
        free()


def time_rows(batches: Sequence[int], prefill_tokens: int) -> Iterator[Row]:
    """Seconds of a step, exact against default, on the same weights one after the other."""
    for kind, bar in (("int8", 1.25), ("bf16", 1.5)):
        taken: dict[bool, dict[str, float]] = {}
        for exact in (False, True):
            began_s = time.perf_counter()
            spec = DeviceSpec(
                DEVICE, torch.bfloat16, use_8_bit_products=kind != "bf16", exact=exact and not SMALL
            )  # fmt: skip
            settings = settings_of("lite", small=SMALL)
            model = make_model(settings, kind, spec)
            taken[exact] = {f"decode step of {count}": decode_s(model, spec, count) for count in batches}
            taken[exact][f"prefill of {prefill_tokens}"] = prefill_s(model, spec, prefill_tokens)
            taken[exact]["first token of 256 alone"] = prefill_s(model, spec, 256)
            del model
            free()
            print(f"{kind}, {'exact' if exact else 'default'}: {time.perf_counter() - began_s:.0f} s", flush=True)
        for work, default_s in taken[False].items():
            exact_s = taken[True][work]
            yield Row(
                name=f"V2-Lite {kind}, {work}: exact against default", ours=exact_s * 1e3, peer=default_s * 1e3,
                unit="ms", target=None if SMALL else bar if "decode" in work else 1.5, lower_is_better=True,
            )  # fmt: skip


def timed_engine(model: Model, spec: DeviceSpec, count: int, tokens: int, step_tokens: int) -> Engine:
    blocks = count * (tokens // BLOCK_TOKENS + 2) + 8
    config = EngineConfig(
        kv_gb=kv_gb(model, blocks, mtp=False), max_running=count, step_tokens=step_tokens, prefix_reuse=False, mtp=False
    )
    return OverlappedEngine("timed", model, TextFiles(tokenizer_json=""), config, spec)


def decode_s(model: Model, spec: DeviceSpec, count: int) -> float:
    """Of one step, over some steps after every request has its first token; the first round captures."""
    engine = timed_engine(model, spec, count, PROMPT_TOKENS + TIMED_STEPS + 8, 16384)
    rng = random.Random(count)
    for _ in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=TIMED_STEPS + 8, ignore_eos=True)
        for i in range(count):
            prompt = tuple(rng.choices(range(model.arch.vocab), k=PROMPT_TOKENS))
            engine.add(Request(id=str(i), prompt_ids=prompt, params=params, seed=0))
        started: set[str] = set()
        while len(started) < count:
            started |= {event.request_id for event in engine.step()}
        engine.step()
        took_s = _seconds(lambda: [engine.step() for _ in range(TIMED_STEPS)]) / TIMED_STEPS
        while engine.busy:
            engine.step()
    assert not engine.take_failed()
    return took_s


def prefill_s(model: Model, spec: DeviceSpec, num_tokens: int) -> float:
    """Until the first token of prompts with this many tokens together, in one step; median of five."""
    each = min(num_tokens, 4 * PROMPT_TOKENS)
    engine = timed_engine(model, spec, num_tokens // each, each + 1, num_tokens + 64)
    rng, taken = random.Random(1), []

    def first_tokens() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for i in range(num_tokens // each):
            prompt = tuple(rng.choices(range(model.arch.vocab), k=each))
            engine.add(Request(id=str(i), prompt_ids=prompt, params=params, seed=0))
        while engine.busy:
            engine.step()

    for _ in range(1 if SMALL else 7):
        taken.append(_seconds(first_tokens))
    return statistics.median(taken[-5:])


def _seconds(work: Callable[[], object]) -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def all_rows(only: Sequence[str], *, quick: bool) -> Iterator[Row]:
    from exact_kernels import kernel_rows

    models = [name for name in only if "-" in name]
    if not only or "kernels" in only:
        yield from kernel_rows(str(DEVICE), small=SMALL)
    if not only or "tokens" in only or models:
        yield from token_rows(5 if SMALL else 16 if quick else 64, models)
    if not only or "times" in only:
        batches = (1, 2) if SMALL else (64,) if quick else (1, 64, 256)
        yield from time_rows(batches, 64 if SMALL else 4096)


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="kernels, tokens, times, or models such as lite-int8")
    parser.add_argument("--small", action="store_true", help="narrow models on a CPU")
    asked = parser.parse_args()
    origin = timing.Origin("a CPU, interpreted", "none") if SMALL else timing.gpu_origin(asked.commit)
    began_s, rows = time.perf_counter(), list[Row]()
    torch.set_num_threads(1 if SMALL else torch.get_num_threads())
    for row in all_rows(asked.only, quick=asked.quick):
        rows.append(row)
        mark = {True: "ok ", False: "NO ", None: "·  "}[row.ok]
        print(f"{mark}{row}  {row.note}", flush=True)
        if asked.json:
            timing.write_json(rows, origin, asked.json)
    print(f"{time.perf_counter() - began_s:.0f} s")
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
