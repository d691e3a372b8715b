from __future__ import annotations

import os
import struct
from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.checkpoints import GgufCheckpoint
from tripool.checkpoints.gguf.header import read_header, shortest_float32
from tripool.checkpoints.mapped import MappedFile
from tripool.errors import CheckpointCorrupt, CheckpointError, CheckpointTruncated, TensorShape


def test_reads_what_the_gguf_package_reads(gguf_file):
    """Its reader is the oracle: same metadata, same tensors at the same places."""
    header = read_header(MappedFile(gguf_file))
    reader = gguf.GGUFReader(gguf_file)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert header.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert len(header.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.kind == tensor.tensor_type
        assert (entry.start, entry.stop - entry.start) == (tensor.data_offset, tensor.n_bytes)


def test_every_type_of_value(tmp_path):
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**31, "int32": -(2**30)}
    numbers |= {"uint64": 2**60, "int64": -(2**60), "float32": 0.1, "float64": 0.1, "bool": True, "string": "naïve"}
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.strings", ["a", "", "ü"])
    writer.add_array("x.floats", [0.5, 0.25])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(MappedFile(path)).metadata
    assert {key.removeprefix("x."): value for key, value in metadata.items() if key.startswith("x.")} == numbers | {
        "strings": ["a", "", "ü"],
        "floats": [0.5, 0.25],
    }


def test_floats_read_as_they_were_meant():
    for meant in (1e-5, 1e-6, 0.1, 0.0707, 10000.0, 500000.0):
        stored = struct.unpack("<f", struct.pack("<f", meant))[0]
        assert shortest_float32(stored) == meant


def raw_header(values: bytes = b"", num_values: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + values + tensors


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (
            raw_header(string("a") + struct.pack("<IB", 0, 1) + string("a") + struct.pack("<IB", 0, 1), 2),
            CheckpointCorrupt,
            "twice",
        ),
        (raw_header(string("a") + struct.pack("<I", 99), 1), CheckpointCorrupt, "unknown type 99"),
        (raw_header(string("a") + struct.pack("<IIQ", 9, 9, 1), 1), CheckpointCorrupt, "array of unknown type 9"),
        (raw_header(string("a") + struct.pack("<IIQ", 9, 4, 2**62), 1), CheckpointTruncated, "inside its header"),
        (raw_header(struct.pack("<Q", 2) + b"\xff\xfe", 1), CheckpointCorrupt, "UTF-8"),
        (raw_header(num_values=2**63), CheckpointTruncated, "inside its header"),
        (raw_header(string("general.alignment") + struct.pack("<II", 4, 0), 1), CheckpointCorrupt, "alignment"),
        (raw_header(tensors=tensor("t", [], 0, 0), num_tensors=1), CheckpointCorrupt, "0 dimensions"),
        (raw_header(tensors=tensor("t", [1] * 9, 0, 0), num_tensors=1), CheckpointCorrupt, "9 dimensions"),
        (raw_header(tensors=tensor("t", [33], 8, 0), num_tensors=1), CheckpointCorrupt, "Q8_0 blocks"),
        (raw_header(tensors=tensor("t", [2**60, 2**60], 0, 0), num_tensors=1), CheckpointTruncated, "ends at byte"),
        (raw_header(tensors=tensor("t", [32, 0, 2**40], 0, 0), num_tensors=1), CheckpointCorrupt, "is empty"),
        (
            raw_header(tensors=tensor("t", [4], 0, 0) + tensor("t", [4], 0, 32), num_tensors=2),
            CheckpointCorrupt,
            "twice",
        ),
        (
            raw_header(tensors=tensor("t", [4], 0, 0) + tensor("u", [4], 0, 8), num_tensors=2),
            CheckpointCorrupt,
            "overlaps",
        ),
    ],
)
def test_a_wrong_header_is_refused(tmp_path, content, error, says):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content + (bytes(256) if "ends" not in says and "inside" not in says else b""))
    with pytest.raises(error, match=says) as caught:
        read_header(MappedFile(path))
    assert caught.value.file == str(path)
    assert caught.value.hint


@pytest.mark.parametrize("kind", [0, 8])
def test_a_long_list_in_a_file_that_takes_no_room_is_not_made(tmp_path, kind):
    path = tmp_path / "sparse.gguf"
    path.write_bytes(raw_header(string("a") + struct.pack("<IIQ", 9, kind, 2**25), 1))
    os.truncate(path, 2**26)
    with pytest.raises(CheckpointError, match="lists of more than"):
        read_header(MappedFile(path))


def test_a_stack_of_countless_experts_is_not_made(tmp_path):
    path = tmp_path / "sparse.gguf"
    named = string("general.architecture") + struct.pack("<I", 8) + string("deepseek2")
    number = struct.pack("<I", 4)
    keys = {
        "embedding_length": 32, "feed_forward_length": 32, "block_count": 1, "attention.head_count": 1,
        "context_length": 64, "rope.dimension_count": 4, "attention.key_length": 8, "attention.value_length": 8,
        "attention.kv_lora_rank": 8, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8,
        "attention.layer_norm_rms_epsilon": 1,
    }  # fmt: skip
    values = named + b"".join(string(f"deepseek2.{key}") + number + struct.pack("<I", v) for key, v in keys.items())
    tensors = tensor("token_embd.weight", [32, 2], 0, 0) + tensor("blk.0.ffn_up_exps.weight", [32, 1, 2**17], 0, 256)
    path.write_bytes(raw_header(values, 1 + len(keys), tensors, 2))
    os.truncate(path, 2**25)
    with pytest.raises(TensorShape, match="experts"):
        GgufCheckpoint(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_anywhere_is_a_typed_error_or_harmless(fuzz_source, tmp_path_factory, data):
    whole = bytearray(fuzz_source)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    path = tmp_path_factory.mktemp("fuzz") / "a.gguf"
    path.write_bytes(whole)
    with suppress(CheckpointError), GgufCheckpoint(path) as checkpoint:  # anything else is a failure of this test
        for name, info in checkpoint.infos().items():
            checkpoint.read(name, torch.empty(info.shape))
        assert checkpoint.text.tokenizer_json


@pytest.fixture(scope="module")
def fuzz_source(tmp_path_factory, write_gguf) -> bytes:
    """Almost nothing but header, so that damage hits it."""
    prefix = "llama."
    metadata = {
        f"{prefix}{key}": 2 for key in ("embedding_length", "feed_forward_length", "block_count", "context_length")
    }
    metadata |= {f"{prefix}attention.head_count": 1, f"{prefix}attention.layer_norm_rms_epsilon": 1e-5}
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    tensors = {
        "token_embd.weight": (np.ones((3, 2)), "F32"),
        "blk.0.attn_q.weight": (np.ones((2, 2)), "F16"),
        "rope_freqs.weight": (np.ones(1), "F32"),
    }
    metadata[f"{prefix}attention.key_length"] = 2
    return write_gguf(tmp_path_factory.mktemp("source") / "a.gguf", "llama", metadata, tensors).read_bytes()
