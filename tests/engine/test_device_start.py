"""On a GPU: weights that are packed there, graphs that share their memory, and KV that leaves room for every step."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch

from tripool.cache.weight_cache import WeightCache
from tripool.checkpoints import open_checkpoint
from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams
from tripool.engine.device import DeviceSpec, load_warm_on
from tripool.engine.graph_capture import GraphCapture, borrowed
from tripool.engine.load import load_engine
from tripool.errors import DeviceOutOfMemory
from tripool.sequence import Work

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _device_to_itself() -> None:
    """An engine that is gone holds its memory until it is collected."""
    gc.collect()
    torch.cuda.empty_cache()


def test_a_checkpoint_read_on_the_device_has_the_values_of_one_read_on_the_host() -> None:
    with open_checkpoint("tiny") as checkpoint:
        for name, info in checkpoint.infos().items():
            there, here = (torch.empty(info.shape, dtype=torch.bfloat16, device=where) for where in (CUDA, "cpu"))
            checkpoint.read(name, there)
            checkpoint.read(name, here)
            assert torch.equal(there.cpu(), here), name


def test_an_image_holds_what_was_packed_on_the_device(tmp_path: Path) -> None:
    spec, cache = DeviceSpec(CUDA, torch.bfloat16, use_8_bit_products=True), WeightCache(tmp_path, 2**30)
    said = []
    for weight_cache in (None, cache, cache):
        loaded = load_warm_on(spec, "tiny", weight_cache)
        runner = spec.runner(loaded.network, 3, mtp=False)
        hidden = runner.hidden([Work(list(range(3, 80)), 0, [0, 1], False)])
        said.append((runner.logits(hidden).cpu(), loaded.from_memory))
    assert [warm for _, warm in said] == [False, False, True]
    assert torch.equal(said[0][0], said[1][0]) and torch.equal(said[0][0], said[2][0])


def test_results_of_many_graphs_take_the_memory_of_one() -> None:
    capture, size = GraphCapture(CUDA), 2**24
    source = torch.ones(size, device=CUDA)

    def times(factor: float) -> torch.Tensor:
        return (source * factor).add_(1.0)

    replays = []
    for factor in range(8):
        with capture.beside():
            times(factor)
        with capture.graph() as graph:
            out = times(factor)
        replays.append((graph.replay, borrowed(out)))
        del out
        if factor == 0:
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved()
    for factor in (7, 0, 3, 3, 6):
        replay, result = replays[factor]
        replay()
        assert result.shape == (size,) and bool((result == factor + 1).all())
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - reserved < 2 * source.nbytes


@pytest.mark.parametrize("mtp", [False, True])
def test_kv_takes_the_device_and_every_step_finds_its_memory(mtp: bool) -> None:
    free, total = torch.cuda.mem_get_info()
    engine = load_engine("tiny", EngineConfig(device="cuda", mtp=mtp, max_running=16))
    assert engine.kv_bytes > 0.9 * free - total // 50 and torch.cuda.mem_get_info()[0] > 0
    for i in range(40):
        prompt = tuple(5 + (i + 3 * j) % 900 for j in range(engine.context_tokens - 8 - i))
        params = SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True)
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params, seed=i))
    counts = dict.fromkeys(map(str, range(40)), 0)
    while engine.busy:
        for event in engine.step():
            counts[event.request_id] += 1
    assert not engine.take_failed() and set(counts.values()) == {8}
    del engine
    torch.cuda.empty_cache()


def test_too_little_memory_is_refused_before_serving() -> None:
    load = partial(load_engine, "tiny")
    with pytest.raises(DeviceOutOfMemory, match="KV memory"):
        load(EngineConfig(device="cuda", kv_gb=4000.0))
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 2**29, dtype=torch.uint8, device=CUDA)
    with pytest.raises(DeviceOutOfMemory, match="free"):
        load(EngineConfig(device="cuda"))
    del hog
    torch.cuda.empty_cache()
