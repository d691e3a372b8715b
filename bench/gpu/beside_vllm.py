"""vLLM's side of `vllm_beside.py`, in its own process: `LLM.generate` for batches, `AsyncLLM` for the mixed load.

    python3 bench/gpu/beside_vllm.py SHAPE KIND [--batches 1,8,64,256] [--mixed] [--json FILE]

KIND: bf16, or fp8, which vLLM rounds the weights to as it loads them. vLLM's defaults hold, except for prefix caching
(off), the longest context and the number of sequences. Weights come from the plugin at the end of this file, which
`vllm_beside.py` makes known to vLLM's processes: vLLM's own dummy weights are within 1e-3 of zero.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from beside_load import DRAIN_S, LOADS, Answers, Arrival, Report, Sizes, Stamps, batch_row, endless, poisson
from beside_shapes import SHAPES, draw, settings_of, write_folder

LOAD_FORMAT = "tripool_weights"
BATCH_CONTEXT = 2048


def engine_options(settings: dict[str, Any], kind: str, max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    folder = write_folder(Path(tempfile.mkdtemp()) / "model", settings)
    return {
        "model": str(folder), "skip_tokenizer_init": True, "load_format": LOAD_FORMAT, "dtype": "bfloat16",
        "quantization": None if kind == "bf16" else kind, "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs, "enable_prefix_caching": False, "gpu_memory_utilization": 0.85, "seed": 0,
        "disable_log_stats": True,
    }  # fmt: skip


def batch_rows(settings: dict[str, Any], kind: str, batches: list[int], most: int, report: Report) -> None:
    from vllm import LLM, SamplingParams

    began_s = time.perf_counter()
    llm = LLM(**engine_options(settings, kind, max(batches), BATCH_CONTEXT))
    print(f"ready after {time.perf_counter() - began_s:.1f} s", flush=True)

    def answer(prompts: list[list[int]], count: int) -> Answers:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    for sequences in batches:
        report.add(batch_row(answer, settings["vocab_size"], sequences, small=False, most=most))


class Load:
    """Requests of the mixed load through `AsyncLLM`, each one's tokens stamped as they come."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._began_s = engine, 0.0
        self.stamps, self.complete = Stamps(), list[str]()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def _answer(self, arrival: Arrival) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=arrival.num_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        async for output in self._engine.generate(tokens_input(arrival.prompt), params, arrival.id):
            count = len(output.outputs[0].token_ids)
            if count:
                self.stamps.tokens(arrival.id, self._now_s(), count)
        self.complete.append(arrival.id)

    async def closed(self, requests: Iterator[Arrival], sizes: Sizes) -> dict[str, Any]:
        """A new request for each one that ends."""

        async def one_after_another() -> None:
            while self._now_s() < sizes.closed_s:
                await self._answer(next(requests))

        self._began_s = time.perf_counter()
        await self._until([one_after_another() for _ in range(sizes.in_flight)], sizes.closed_s)
        return self.stamps.closed_row(self.complete, sizes)

    async def open(self, arrivals: list[Arrival], sizes: Sizes, load: float, rate: float) -> dict[str, Any]:
        """Each request at its time, whatever became of those before."""

        async def at_its_time(arrival: Arrival) -> None:
            await asyncio.sleep(max(0.0, arrival.at_s - self._now_s()))
            await self._answer(arrival)

        self._began_s = time.perf_counter()
        await self._until([at_its_time(arrival) for arrival in arrivals], sizes.load_s + DRAIN_S)
        return self.stamps.open_row(arrivals, load, rate)

    async def _until(self, work: list[Any], deadline_s: float) -> None:
        """Run them until all end or the time is over. A request that is cancelled is aborted in the engine."""
        tasks = [asyncio.create_task(one) for one in work]
        done, pending = await asyncio.wait(tasks, timeout=deadline_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()  # raises what went wrong


async def mixed_rows(settings: dict[str, Any], kind: str, sizes: Sizes, report: Report) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    vocab, began_s = settings["vocab_size"], time.perf_counter()
    options = engine_options(settings, kind, sizes.in_flight, sizes.context_tokens + 64)
    # The context gives the defaults of a server: 8,192 tokens in a step on this device.
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options), usage_context=UsageContext.OPENAI_API_SERVER)
    print(f"ready after {time.perf_counter() - began_s:.1f} s", flush=True)
    try:
        await Load(engine).closed(endless(vocab, sizes, 0), replace(sizes, closed_s=sizes.warm_s))
        closed = await Load(engine).closed(endless(vocab, sizes, 1), sizes)
        report.add(closed)
        for seed, load in enumerate(LOADS, 2):
            rate = load * closed["rate"]
            report.add(await Load(engine).open(poisson(vocab, sizes, rate, seed), sizes, load, rate))
    finally:
        engine.shutdown()


def register() -> None:
    """Plugin of vLLM, called in each of its processes: a load format that draws weights as our side does."""
    import torch
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    def fill(name: str, tensor: torch.Tensor) -> None:
        # Scales of a KV cache keep their defaults.
        if tensor.numel() > 1 and tensor.is_floating_point() and not tensor.is_meta:
            draw(name, tensor)

    @register_model_loader(LOAD_FORMAT)
    class DrawnWeights(DummyModelLoader):  # type: ignore[misc, unused-ignore]
        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            torch.manual_seed(7)
            for prefix, layer in model.named_modules():
                if get_layerwise_info(layer).can_load():
                    self._load_and_round(prefix, layer)
                else:
                    for name, weight in layer.named_parameters(recurse=False):
                        fill(f"{prefix}.{name}", weight.data)

        def _load_and_round(self, prefix: str, layer: torch.nn.Module) -> None:
            """A layer that vLLM rounds to 8 bits as it loads: it exists once it is filled."""
            info = get_layerwise_info(layer)
            materialize_layer(layer, info)
            for name, weight in get_layer_tensors(layer).items():
                fill(f"{prefix}.{name}", weight.data)
                weight.weight_loader = _get_original_loader(weight)
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)
            info.reset()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", choices=("bf16", "fp8"))
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")])
    work.add_argument("--mixed", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    settings = settings_of(asked.shape)
    report = Report(asked.json, side="vllm", shape=asked.shape, kind=asked.kind)
    if asked.batches:
        batch_rows(settings, asked.kind, asked.batches, 2 if asked.quick else 5, report)
    else:
        import uvloop  # the event loop of vLLM's own server

        uvloop.run(mixed_rows(settings, asked.kind, Sizes.of(quick=asked.quick, small=False), report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
