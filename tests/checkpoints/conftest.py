"""Files of every kind a checkpoint can be made of, and a look at this process's memory."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog; 12 dogs, 345 foxes, 6789 hens.",
    "def add(a, b):\n    return a + b  # it's plain\n\n\tif x == 10:\n        y = [1, 22, 333]",
    "Grüße aus Köln, naïve café, 日本語のテキスト, 中文文本, русский текст.",
]

TINY_CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture
def resident() -> Callable[[], int]:
    return resident_bytes


@pytest.fixture
def mapped() -> Callable[[Path], bool]:
    return is_mapped


def raw_safetensors(header: Mapping[str, Any] | bytes, data: bytes = b"", *, claimed: int | None = None) -> bytes:
    """The bytes of a file with this header, right or wrong."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if claimed is None else claimed) + encoded + data


@pytest.fixture
def raw() -> Callable[..., bytes]:
    return raw_safetensors


def train_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>", "<|pad｜>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def train() -> Callable[[pre_tokenizers.PreTokenizer], Tokenizer]:
    return train_byte_level


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture
def folder(tmp_path: Path, byte_level: Tokenizer) -> Path:
    """A whole small Hugging Face folder in one file, which a test may then break."""
    path = tmp_path / "model"
    path.mkdir()
    weight = np.arange(12, dtype=np.float32).tobytes()
    header = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [48, 64]},
    }
    (path / "model.safetensors").write_bytes(raw_safetensors(header, weight + weight[:16]))
    (path / "config.json").write_text(json.dumps(TINY_CONFIG))
    (path / "tokenizer.json").write_text(byte_level.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|begin|>"}))
    return path


Tensors = Mapping[str, tuple[np.ndarray, str]]


def write_gguf_file(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    """With llama.cpp's own writer; a tensor comes with the name of the type it is stored as."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (values, kind_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[kind_name]
        if kind_name in ("F32", "F16"):
            writer.add_tensor(name, values.astype(np.float32 if kind_name == "F32" else np.float16))
        else:
            writer.add_tensor(name, quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture(scope="session")
def write_gguf() -> Callable[[Path, str, Mapping[str, Any], Tensors], Path]:
    return write_gguf_file


def small_llama(kind: str = "F32") -> tuple[dict[str, Any], dict[str, tuple[np.ndarray, str]]]:
    """Metadata and tensors of one layer: 4 heads, 2 key heads, heads of 16."""
    metadata = {
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 20000.0,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 40,
    }
    shapes = {
        "token_embd": (40, 64),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    random = np.random.default_rng(3)
    tensors = {f"{name}.weight": (random.normal(size=shape), kind) for name, shape in shapes.items()}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors[f"{name}.weight"] = (random.normal(size=64), "F32")
    return metadata, tensors


@pytest.fixture
def llama_parts() -> Callable[..., tuple[dict[str, Any], dict[str, tuple[np.ndarray, str]]]]:
    return small_llama


def vocabulary_metadata(tokenizer: Tokenizer, *, pre: str, **more: Any) -> dict[str, Any]:
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": ids["<|begin|>"],
        "tokenizer.ggml.eos_token_id": ids["<|end|>"],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.fixture(scope="session")
def vocabulary() -> Callable[..., dict[str, Any]]:
    return vocabulary_metadata


@pytest.fixture
def gguf_file(tmp_path: Path, byte_level: Tokenizer) -> Path:
    metadata, tensors = small_llama()
    metadata |= vocabulary_metadata(byte_level, pre="gpt-2")
    return write_gguf_file(tmp_path / "small.gguf", "llama", metadata, tensors)


@pytest.fixture
def read_all() -> Callable[[Any], dict[str, torch.Tensor]]:
    def read(checkpoint: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, info in checkpoint.infos().items():
            tensors[name] = torch.full(info.shape, float("nan"), dtype=dtype)
            checkpoint.read(name, tensors[name])
        return tensors

    return read
