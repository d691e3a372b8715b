"""From the model cache as from files: the same bits, one copy for all processes, and files again when it is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers

from checkpoints.conftest import small_llama, train_byte_level, vocabulary_metadata, write_gguf_file
from oracle.case import make_case, rope
from oracle.cases import CASES
from oracle.driving import chunked
from oracle.folders import save_case
from oracle.fp8 import to_fp8
from tripool.cache.weight_cache import WeightCache
from tripool.checkpoints import open_checkpoint
from tripool.engine.device import DeviceSpec, load_warm_on
from tripool.engine.runner import Runner
from tripool.kernels import CPU, CPU8, REFERENCE
from tripool.models import Model
from tripool.models.warm import image_key, load_warm
from tripool.quant import Techniques, quantize
from tripool.sequence import Work

QUOTA = 2**30
MLA = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
RANKS = (("deepseek_v2", None), ("deepseek_v3", 32))
DEVICE_CASES = [
    make_case(
        "tied", "qwen3", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}, rope=rope(),
        vocab=208, width=96, head_dim=16, tie_word_embeddings=True,
    ),
    *(make_case(name, name, MLA, {"q_lora_rank": rank}, rope=rope(), vocab=208, width=96) for name, rank in RANKS),
]  # fmt: skip
TABLES = pytest.mark.parametrize("table", [CPU, CPU8], ids=lambda table: table.name)


@pytest.fixture
def weight_cache(tmp_path) -> WeightCache:
    return WeightCache(tmp_path / "models", QUOTA)


@torch.inference_mode()
def answers(model: Model) -> list[torch.Tensor]:
    """What a prompt and some decoded tokens give, in both forms."""
    tokens = [(7 * i + 3) % model.arch.vocab for i in range(90)]
    runner = Runner(model, num_blocks=4)
    prompt = chunked(runner, tokens[:80], [2, 0], 33, decode=False)
    more = chunked(runner, tokens[:90], [1, 3], 1, decode=True)
    return [prompt, more]


def same(one: Model, other: Model) -> bool:
    return all(torch.equal(a, b) for a, b in zip(answers(one), answers(other), strict=True))


@TABLES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_bits_from_an_image_as_from_files(pair_of, weight_cache, case, table):
    folder = str(pair_of(case).folder)
    plain, filled, warm = (load_warm(folder, table, cache) for cache in (None, weight_cache, weight_cache))
    assert (filled.from_memory, warm.from_memory) == (False, True)
    assert (warm.name, warm.text) == (plain.name, plain.text)
    assert plain.network.num_bytes == filled.network.num_bytes == warm.network.num_bytes
    assert same(plain.network, filled.network)
    assert same(plain.network, warm.network)


@TABLES
def test_the_bundled_model(weight_cache, table):
    plain, filled, warm = (load_warm("tiny", table, cache) for cache in (None, weight_cache, weight_cache))
    assert warm.from_memory and warm.network.mtp is not None
    assert same(plain.network, warm.network) and same(plain.network, filled.network)


@TABLES
def test_a_gguf_file(tmp_path, weight_cache, table):
    metadata, tensors = small_llama("Q8_0")
    tokenizer = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    metadata |= vocabulary_metadata(tokenizer, pre="gpt-2")
    path = str(write_gguf_file(tmp_path / "small.gguf", "llama", metadata, tensors))
    plain, _, warm = (load_warm(path, table, cache) for cache in (None, weight_cache, weight_cache))
    assert warm.from_memory and same(plain.network, warm.network)


@pytest.mark.parametrize("kind", ["floats", "int8", "fp8"])
@pytest.mark.parametrize("case", DEVICE_CASES, ids=lambda case: case.name)
def test_packed_for_a_device(tmp_path, weight_cache, case, kind):
    """Also what is decided by a checkpoint's scales, which an image has no more: which parts are in 8 bits."""
    folder = save_case(case, tmp_path / "floats")
    if kind == "fp8":
        to_fp8(folder, tmp_path / "plain")
    elif kind == "int8":
        with open_checkpoint(folder) as checkpoint:
            folder = tmp_path / "int8"
            quantize(checkpoint, folder, techniques=Techniques(keep=0), windows=[list(range(5, 60))])
    spec = DeviceSpec(torch.device("cpu"), torch.bfloat16, use_8_bit_products=True)
    plain, filled, warm = (load_warm_on(spec, str(folder), cache) for cache in (None, weight_cache, weight_cache))
    assert (filled.from_memory, warm.from_memory) == (False, True)
    assert plain.network.num_bytes == filled.network.num_bytes == warm.network.num_bytes
    said = [on_device(spec, loaded.network, mtp=case.mtp) for loaded in (plain, filled, warm)]
    assert all(torch.equal(*pair) for one in said[1:] for pair in zip(one, said[0], strict=True))


def on_device(spec: DeviceSpec, model: Model, *, mtp: bool) -> list[torch.Tensor]:
    runner, tokens = spec.runner(model, 3, mtp=mtp), list(range(3, 80))
    hidden = runner.hidden([Work(tokens, 0, [0, 1], False)])
    parts = [runner.logits(hidden), runner.logits(runner.hidden([Work([5], len(tokens), [0, 1], True)]))]
    return [*parts, runner.draft_logits([Work(tokens, 1, [0, 1], False)], hidden, range(9))] if mtp else parts


def test_an_image_for_a_device_that_is_damaged_is_written_again(weight_cache, tmp_path):
    spec = DeviceSpec(torch.device("cpu"), torch.bfloat16, use_8_bit_products=True)
    load_warm_on(spec, "tiny", weight_cache)
    (path,) = (tmp_path / "models").glob("*.image")
    damage(path)
    again, warm = load_warm_on(spec, "tiny", weight_cache), load_warm_on(spec, "tiny", weight_cache)
    assert (again.from_memory, warm.from_memory) == (False, True)
    assert (weight_cache.counters.damaged, weight_cache.counters.written) == (1, 2)
    said = [on_device(spec, loaded.network, mtp=True) for loaded in (again, warm)]
    assert all(torch.equal(*pair) for pair in zip(*said, strict=True))


def test_it_outlives_whatever_it_came_from(weight_cache):
    """C has nothing but addresses: the memory behind them stays for as long as the network does."""
    load_warm("tiny", CPU8, weight_cache)
    warm = load_warm("tiny", CPU8, weight_cache).network
    (key,) = weight_cache.sizes()
    assert not weight_cache.remove(key)
    (next(iter(Path(weight_cache.folder).glob("*.image")))).unlink()
    assert same(warm, load_warm("tiny", CPU8, None).network)


def damage(path: Path) -> None:
    """One bit in its middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_files_again_when_the_image_is_damaged(weight_cache, tmp_path):
    load_warm("tiny", CPU8, weight_cache)
    (path,) = (tmp_path / "models").glob("*.image")
    damage(path)
    again, warm = load_warm("tiny", CPU8, weight_cache), load_warm("tiny", CPU8, weight_cache)
    assert (again.from_memory, warm.from_memory) == (False, True)
    assert (weight_cache.counters.damaged, weight_cache.counters.written) == (1, 2)
    assert same(again.network, warm.network)


def test_an_image_that_fits_the_key_and_not_the_network_is_replaced(weight_cache):
    """As after a change of code that nobody noticed."""
    key = image_key("tiny", CPU8)
    with weight_cache.exclusive(key):
        writer = weight_cache.writer(key)
        writer.place("another", "uint8", (1,), memoryview(b"x"))
        weight_cache.publish(key, writer, b"\xc1")
    assert not load_warm("tiny", CPU8, weight_cache).from_memory
    assert weight_cache.counters.damaged == 1
    assert load_warm("tiny", CPU8, weight_cache).from_memory


def test_other_files_another_table_are_other_images(pair_of, weight_cache, tmp_path):
    folder = pair_of(CASES[0]).folder
    keys = {image_key(str(folder), CPU), image_key(str(folder), CPU8), image_key("tiny", CPU8)}
    (folder / "config.json").touch()
    keys.add(image_key(str(folder), CPU))
    assert len(keys) == 4
    assert image_key(str(tmp_path / "nothing"), CPU) is None


def test_what_does_not_fit_is_loaded_all_the_same(tmp_path):
    small = WeightCache(tmp_path, 2**20)
    loaded = load_warm("tiny", CPU8, small)
    assert small.counters.refused == 1 and small.sizes() == {}
    assert same(loaded.network, load_warm("tiny", CPU8, None).network)


def test_a_table_that_packs_nothing_needs_no_cache(weight_cache, pair_of):
    assert not load_warm(str(pair_of(CASES[0]).folder), REFERENCE, weight_cache).from_memory
    assert weight_cache.sizes() == {}


LOAD_AND_HOLD = """
import json, sys, torch
from pathlib import Path
from tripool.cache.weight_cache import WeightCache
from tripool.kernels import CPU8
from tripool.models.warm import load_warm
images = WeightCache(Path(sys.argv[1]), 2**30)
loaded = load_warm("tiny", CPU8, images)
kept = [t for t in __import__("gc").get_objects() if isinstance(t, torch.Tensor)]
_ = sum(int(t.view(torch.uint8).sum()) if t.is_contiguous() and t.dtype != torch.complex64 else 0 for t in kept)
said = {"memory": loaded.from_memory, "written": images.counters.written, "bytes": loaded.network.num_bytes}
print(json.dumps(said), flush=True)
sys.stdin.readline()
"""


@pytest.mark.prove
def test_two_workers_at_once_write_one_image_and_share_it(tmp_path):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD_AND_HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        said = [json.loads(worker.stdout.readline()) for worker in workers]
        mapped = [_mapped_bytes(worker.pid, ".image") for worker in workers]
    finally:
        for worker in workers:
            worker.communicate(b"\n", timeout=60)
    assert sorted((one["memory"], one["written"]) for one in said) == [(False, 1), (True, 0)]
    weights = said[0]["bytes"]
    for own, private in mapped:
        assert 0.45 * weights < own < 0.6 * weights, "each pays for half"
        assert private == 0
    assert len(list(tmp_path.glob("*.image"))) == 1


def _mapped_bytes(pid: int, suffix: str) -> tuple[int, int]:
    """A process's share (Pss) of files that end so, and what it has copied of them for itself."""
    share = dirty = 0
    counts = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            counts = fields[-1].endswith((suffix, ".unfinished"))
        elif counts and fields[0] == "Pss:":
            share += 1024 * int(fields[1])
        elif counts and fields[0] == "Anonymous:":
            dirty += 1024 * int(fields[1])
    return share, dirty
