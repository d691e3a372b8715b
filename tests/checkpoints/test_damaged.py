"""Every way a checkpoint can be broken: a typed error that names file, tensor and remedy, and memory given back."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tripool.checkpoints import open_checkpoint
from tripool.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMissing,
    CheckpointTruncated,
    TensorMissing,
    TensorShape,
    WrongArchitecture,
    WrongDtype,
)

REPEATS = 30
ALLOWED_GROWTH_BYTES = 8 * 2**20
EMBEDDING = "model.embed_tokens.weight"
FOLDER_SHAPE, GGUF_SHAPE = (3, 4), (40, 64)


@dataclass(frozen=True)
class Damage:
    """`apply` breaks a good checkpoint and says which file the error must name."""

    name: str
    error: type[CheckpointError]
    apply: Callable[[Path], Path]
    tensor: str | None = None


def header(path: Path, change: Callable[[dict], object]) -> Path:
    """Rewrite the safetensors header in place, keeping the data."""
    file = path / "model.safetensors"
    whole = file.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    entries = json.loads(whole[8 : 8 + size])
    change(entries)
    encoded = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + whole[8 + size :])
    return file


def config(path: Path, **values: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return file


def remove(path: Path) -> Path:
    path.unlink()
    return path


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def cut(path: Path, num_bytes: int) -> Path:
    os.truncate(path, path.stat().st_size - num_bytes)
    return path


def patch(path: Path, offset: int, content: bytes) -> Path:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
    return path


def shard(path: Path, *, keep: bool = True, name: str = EMBEDDING) -> Path:
    """Turn the one file into a shard with an index."""
    file = path / "model.safetensors"
    target = path / "model-00001-of-00001.safetensors"
    file.rename(target)
    weight_map = {name: target.name, "model.norm.weight": target.name}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target if keep else remove(target)


def only_pickle(path: Path) -> Path:
    remove(path / "model.safetensors")
    return write(path / "pytorch_model.bin", b"\x80\x04")


def gone(path: Path) -> Path:
    path.rename(path.parent / "elsewhere")
    return path


def outside(path: Path) -> Path:
    shard(path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "../model.safetensors"}}))
    return index


def misnamed(path: Path, name: str) -> Path:
    shard(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: name}}))
    return path


FOLDERS = [
    Damage("a shard's name has a zero byte", CheckpointError, lambda p: misnamed(p, "model\0.safetensors")),
    Damage("a shard's name is half a character", CheckpointError, lambda p: misnamed(p, "model\ud800.safetensors")),
    Damage("no folder", CheckpointMissing, gone),
    Damage("no config", CheckpointMissing, lambda p: remove(p / "config.json")),
    Damage("config is not JSON", CheckpointCorrupt, lambda p: write(p / "config.json", b'{"model_type": ')),
    Damage("config is a list", CheckpointCorrupt, lambda p: write(p / "config.json", b"[]")),
    Damage("no weights", CheckpointMissing, lambda p: remove(p / "model.safetensors")),
    Damage("only a pickle", WrongDtype, only_pickle),
    Damage("shard is missing", CheckpointMissing, lambda p: shard(p, keep=False)),
    Damage("shard is cut", CheckpointTruncated, lambda p: cut(shard(p), 9), "model.norm.weight"),
    Damage(
        "index is broken", CheckpointCorrupt, lambda p: write(shard(p).with_name("model.safetensors.index.json"), b"{}")
    ),
    Damage("index leaves its folder", CheckpointError, outside),
    Damage(
        "index names what its shard lacks", TensorMissing, lambda p: shard(p, name="lm_head.weight"), "lm_head.weight"
    ),
    Damage("empty weights", CheckpointTruncated, lambda p: write(p / "model.safetensors", b"")),
    Damage("cut inside the length", CheckpointTruncated, lambda p: write(p / "model.safetensors", b"\x10\0\0")),
    Damage("header beyond the file", CheckpointTruncated, lambda p: patch(p / "model.safetensors", 0, b"\xff\xff\xff")),
    Damage("header is not JSON", CheckpointCorrupt, lambda p: patch(p / "model.safetensors", 8, b"!")),
    Damage(
        "offsets outside the file",
        CheckpointTruncated,
        lambda p: header(p, lambda h: h[EMBEDDING].update(data_offsets=[10**9, 10**9 + 48])),
        EMBEDDING,
    ),
    Damage(
        "offsets overlap",
        CheckpointCorrupt,
        lambda p: header(p, lambda h: h["model.norm.weight"].update(data_offsets=[40, 56])),
        "model.norm.weight",
    ),
    Damage(
        "shape does not fit its bytes",
        CheckpointCorrupt,
        lambda p: header(p, lambda h: h[EMBEDDING].update(shape=[4, 4])),
        EMBEDDING,
    ),
    Damage(
        "shape is not the config's",
        TensorShape,
        lambda p: header(p, lambda h: h[EMBEDDING].update(shape=[4, 3])),
        EMBEDDING,
    ),
    Damage("unknown type", WrongDtype, lambda p: header(p, lambda h: h[EMBEDDING].update(dtype="Q3_K")), EMBEDDING),
    Damage("unknown quantisation", WrongDtype, lambda p: config(p, quantization_config={"quant_method": "gptq"})),
    Damage("no tokenizer", CheckpointMissing, lambda p: remove(p / "tokenizer.json")),
]


def rename_in_file(path: Path, old: bytes, new: bytes) -> Path:
    assert len(old) == len(new)
    whole = path.read_bytes()
    assert old in whole
    return write(path, whole.replace(old, new))


def type_of_norm(path: Path, number: int) -> Path:
    """The type follows name, rank (4 bytes) and one dimension (8 bytes)."""
    name = b"output_norm.weight"
    return patch(path, path.read_bytes().index(name) + len(name) + 12, struct.pack("<I", number))


GGUFS = [
    Damage("bad magic", CheckpointCorrupt, lambda p: patch(p, 0, b"GGML")),
    Damage("cut inside the magic", CheckpointTruncated, lambda p: write(p, b"GG")),
    Damage("empty", CheckpointTruncated, lambda p: write(p, b"")),
    Damage("old version", WrongDtype, lambda p: patch(p, 4, b"\x01")),
    Damage("big-endian", WrongDtype, lambda p: patch(p, 4, b"\0\0\0\x03")),
    Damage("cut inside the header", CheckpointTruncated, lambda p: write(p, p.read_bytes()[:500])),
    Damage("cut inside the data", CheckpointTruncated, lambda p: cut(p, 2000), "blk.0.ffn_down.weight"),
    Damage("a string beyond the file", CheckpointTruncated, lambda p: patch(p, 24, b"\xff" * 7)),
    Damage("wrong architecture", WrongArchitecture, lambda p: rename_in_file(p, b"llama", b"mamba")),
    Damage(
        "a tensor nobody knows",
        WrongArchitecture,
        lambda p: rename_in_file(p, b"blk.0.ffn_norm.weight", b"blk.0.ffn_wild.weight"),
        "blk.0.ffn_wild.weight",
    ),
    Damage(
        "no embeddings",
        TensorMissing,
        lambda p: rename_in_file(p, b"token_embd.w", b"tokem_embd.w"),
        "token_embd.weight",
    ),
    Damage(
        "metadata is missing",
        CheckpointCorrupt,
        lambda p: rename_in_file(p, b"embedding_length", b"embedding_strength"[:16]),
    ),
    Damage("unknown type", WrongDtype, lambda p: type_of_norm(p, 999), "output_norm.weight"),
    Damage("unreadable type", WrongDtype, lambda p: type_of_norm(p, 26), "output_norm.weight"),
    Damage("no tokenizer", CheckpointMissing, lambda p: rename_in_file(p, b"ggml.tokens", b"ggml.takens")),
]


def use(path: Path, shape: tuple[int, ...]) -> None:
    """What a loader does: open, ask for the text, read."""
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.text.tokenizer_json
        checkpoint.read(EMBEDDING, torch.empty(shape))


def check(damage: Damage, path: Path, shape: tuple[int, ...], resident, mapped) -> None:
    use(path, shape)  # it is good before it is broken
    named = damage.apply(path)

    def fail() -> None:
        with pytest.raises(damage.error) as caught:
            use(path, shape)
        assert type(caught.value) is damage.error
        assert caught.value.file == str(named)
        assert str(named) in str(caught.value)
        assert caught.value.tensor == damage.tensor
        assert caught.value.hint
        del caught  # its traceback holds this frame: a cycle that would keep everything until a collection

    fail()
    before = resident()
    for _ in range(REPEATS):
        fail()
    assert resident() - before < ALLOWED_GROWTH_BYTES
    assert not mapped(path)


@pytest.mark.parametrize("damage", FOLDERS, ids=lambda d: d.name)
def test_damaged_folder(damage, folder, resident, mapped):
    check(damage, folder, FOLDER_SHAPE, resident, mapped)


@pytest.mark.parametrize("damage", GGUFS, ids=lambda d: d.name)
def test_damaged_gguf(damage, gguf_file, resident, mapped):
    check(damage, gguf_file, GGUF_SHAPE, resident, mapped)


def test_a_large_damaged_folder_gives_its_memory_back(folder, raw, resident, mapped):
    """80 MB of weights, all touched before the last tensor turns out to have the wrong shape."""
    sizes = {f"t{i}": [1024, 1024] for i in range(20)}
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [i * 2**22, (i + 1) * 2**22]}
        for i, (name, shape) in enumerate(sizes.items())
    }
    file = folder / "model.safetensors"
    file.write_bytes(raw(entries, np.ones(20 * 2**20, dtype=np.float32).tobytes()))

    out = torch.empty(1024, 1024)  # one for all: the allocator may keep what many had, and that is not ours to test

    def load() -> None:
        with open_checkpoint(folder) as checkpoint:
            for name in sizes:
                checkpoint.read(name, out if name != "t19" else out[1:])

    def fail() -> None:
        with pytest.raises(TensorShape):
            load()

    fail()
    before = resident()
    for _ in range(20):
        fail()
    assert resident() - before < ALLOWED_GROWTH_BYTES
    assert not mapped(file)
