from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from tripool.checkpoints.gguf.header import read_header
from tripool.checkpoints.gguf.tensors import PLAIN, QUANTISED, GgufTensor, HalvesFromPairs, JoinedKeyValue, Rows
from tripool.checkpoints.mapped import MappedFile

WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32", "TQ1_0", "TQ2_0")


def stored(path, write_gguf, **tensors) -> dict[str, GgufTensor]:
    write_gguf(path, "llama", {}, tensors)
    file = MappedFile(path)
    return {name: GgufTensor(file, entry) for name, entry in read_header(file).tensors.items()}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def oracle(path, name: str) -> np.ndarray:
    """The gguf package's reader and dequantiser, over the whole tensor at once."""
    found = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    shape = tuple(reversed(found.shape.tolist()))
    return np.array(dequantize(found.data, found.tensor_type)).reshape(shape)


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_every_writable_type(tmp_path, write_gguf, monkeypatch, kind, dtype):
    monkeypatch.setattr("tripool.checkpoints.mapped.PIECE_BYTES", 20_000)  # several pieces
    path = tmp_path / "a.gguf"
    tensor = stored(path, write_gguf, w=(random(37, 512), kind))["w"]
    fused = torch.full((40, 600), 5.0, dtype=dtype)
    Rows(tensor, (37, 512)).read(fused[1:38, 7:519])
    assert torch.equal(fused[1:38, 7:519], torch.from_numpy(oracle(path, "w")).to(dtype))
    assert (fused[:, :7] == 5).all()


@pytest.mark.parametrize("kind", sorted(QUANTISED))
def test_every_readable_type_is_the_packages_own(tmp_path, kind):
    """Types that the package cannot write: any bytes are a valid block, only scales must be finite."""
    number = gguf.GGMLQuantizationType[kind]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[number]
    packed = np.random.default_rng(1).integers(0, 60, size=(6, 2 * block_bytes), dtype=np.uint8)
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = MappedFile(path)
    out = torch.empty(6, 2 * block_values)
    Rows(GgufTensor(file, read_header(file).tensors["w"]), tuple(out.shape)).read(out)
    assert out.isfinite().all()
    assert torch.equal(out, torch.from_numpy(dequantize(packed, number)))


def test_plain_types_are_plain():
    assert {kind.name for kind in PLAIN} == {"F32", "F16", "BF16"}


def test_one_expert_of_a_stack(tmp_path, write_gguf):
    path = tmp_path / "a.gguf"
    tensor = stored(path, write_gguf, w=(random(5, 6, 32), "Q8_0"))["w"]
    whole = torch.from_numpy(oracle(path, "w"))
    for expert in range(5):
        out = torch.empty(6, 32)
        Rows(tensor, (6, 32), first_row=6 * expert).read(out)
        assert torch.equal(out, whole[expert])


def pair(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter does: row i and row i + half of each head become neighbours."""
    paired = np.empty_like(weight)
    head = len(weight) // num_heads
    for h in range(num_heads):
        for i in range(head // 2):
            paired[h * head + 2 * i] = weight[h * head + i]
            paired[h * head + 2 * i + 1] = weight[h * head + i + head // 2]
    return paired


@pytest.mark.parametrize(("num_heads", "head"), [(1, 2), (3, 8), (9, 64)])
def test_rope_rows_come_back_in_halves(tmp_path, write_gguf, monkeypatch, num_heads, head):
    monkeypatch.setattr("tripool.checkpoints.mapped.PIECE_BYTES", 20_000)
    weight, bias = random(num_heads * head, 32), random(num_heads * head)
    paired = {"w": (pair(weight, num_heads), "F32"), "b": (pair(bias, num_heads), "F32")}
    tensors = stored(tmp_path / "a.gguf", write_gguf, **paired)
    for name, expected in {"w": weight, "b": bias}.items():
        out = torch.empty(expected.shape)
        HalvesFromPairs(tensors[name], num_heads).read(out)
        assert torch.equal(out, torch.from_numpy(expected))


def test_split_keys_and_values_join(tmp_path, write_gguf):
    num_heads, num_nope, num_v, num_latent = 3, 32, 5, 64
    whole = random(num_heads * (num_nope + num_v), num_latent)
    heads = whole.reshape(num_heads, num_nope + num_v, num_latent)
    keys, values = np.ascontiguousarray(heads[:, :num_nope].swapaxes(1, 2)), np.ascontiguousarray(heads[:, num_nope:])
    tensors = stored(tmp_path / "a.gguf", write_gguf, k=(keys, "F32"), v=(values, "F32"))
    joined = JoinedKeyValue(tensors["k"], tensors["v"])
    assert joined.shape == whole.shape
    out = torch.empty(whole.shape)
    joined.read(out)
    assert torch.equal(out, torch.from_numpy(whole))
