from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tripool.checkpoints.safetensors import TORCH_DTYPES, SafetensorsFile
from tripool.errors import CheckpointCorrupt, CheckpointError, CheckpointTruncated, WrongDtype

OUT = (torch.float32, torch.bfloat16, torch.float16)


def every_type() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        if dtype is torch.float8_e8m0fnu:
            continue  # powers of two only; made by hand below
        values = torch.randn(5, 7, generator=generator) * 3
        tensors[name] = (values > 0) if dtype is torch.bool else values.abs().to(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["nothing"] = torch.empty(0, 3)
    tensors["vector"] = torch.arange(11, dtype=torch.bfloat16)
    tensors["odd"] = torch.arange(3, dtype=torch.uint8)  # shifts whatever follows off its alignment
    return tensors


@pytest.mark.parametrize("out_dtype", OUT)
def test_reads_what_the_safetensors_package_wrote(tmp_path, out_dtype):
    tensors = every_type()
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert file.tensors[name].info.shape == tuple(tensor.shape)
        out = torch.empty(tensor.shape, dtype=out_dtype)
        file.tensors[name].read(out)
        assert torch.equal(out, tensor.to(out_dtype)), name
    file.close()


def test_fills_a_strided_slice_and_nothing_beside_it(tmp_path):
    tensor = torch.arange(12.0).view(3, 4)
    save_file({"w": tensor}, tmp_path / "a.safetensors")
    fused = torch.full((3, 10), -1.0)
    SafetensorsFile(tmp_path / "a.safetensors").tensors["w"].read(fused[:, 3:7])
    assert torch.equal(fused[:, 3:7], tensor)
    assert (fused[:, :3] == -1).all()
    assert (fused[:, 7:] == -1).all()


def test_unaligned_data_is_read_right(tmp_path, raw):
    """The package pads its header to 8 bytes; the format does not ask for that."""
    tensor = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    entry = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}
    for padding in range(5):
        header = json.dumps({"w": entry}).encode() + b" " * padding
        path = tmp_path / f"{padding}.safetensors"
        path.write_bytes(raw(header, tensor.numpy().tobytes()))
        out = torch.empty(4, 3)
        SafetensorsFile(path).tensors["w"].read(out)
        assert torch.equal(out, tensor)


def test_pieces_join_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tripool.checkpoints.mapped.PIECE_BYTES", 1000)
    tensor = torch.randn(101, 33, 2, generator=torch.Generator().manual_seed(0))
    save_file({"w": tensor}, tmp_path / "a.safetensors")
    out = torch.empty_like(tensor)
    SafetensorsFile(tmp_path / "a.safetensors").tensors["w"].read(out)
    assert torch.equal(out, tensor)


def test_a_file_of_no_tensors_opens(tmp_path, raw):
    (tmp_path / "a").write_bytes(raw({"__metadata__": {"format": "pt"}}))
    assert SafetensorsFile(tmp_path / "a").tensors == {}


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "error", "says"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, CheckpointCorrupt, "overlaps"),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, CheckpointCorrupt, "hole"),
        ({"a": entry([2], 0, 8)}, CheckpointCorrupt, "4 bytes follow"),
        ({"a": entry([4], 0, 16)}, CheckpointTruncated, "ends at byte"),
        ({"a": entry([3], 12, 0)}, CheckpointCorrupt, "does not fill"),
        ({"a": entry([2], 0, 12)}, CheckpointCorrupt, "does not fill"),
        ({"a": entry([-3], 0, 12)}, CheckpointCorrupt, "malformed"),
        ({"a": entry([True, 3], 0, 12)}, CheckpointCorrupt, "malformed"),
        ({"a": {"dtype": "F32", "shape": [3]}}, CheckpointCorrupt, "malformed"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4, 12]}}, CheckpointCorrupt, "malformed"),
        ({"a": 7}, CheckpointCorrupt, "malformed"),
        ({"a": entry([6], 0, 12, "Q9")}, WrongDtype, "Q9"),
        (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":1}', CheckpointCorrupt, "twice"),
        (b"[1, 2]", CheckpointCorrupt, "not an object"),
        (b"{nope", CheckpointCorrupt, "not JSON"),
        (b'{"a": "\xff"}', CheckpointCorrupt, "not JSON"),
        (b"[" * 100_000, CheckpointCorrupt, "not JSON"),
    ],
)
def test_a_wrong_header_is_refused_by_name(tmp_path, raw, header, error, says):
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw(header, bytes(12)))
    with pytest.raises(error, match=says) as caught:
        SafetensorsFile(path)
    assert caught.value.file == str(path)
    assert caught.value.hint
    if isinstance(header, dict) and "follow" not in says:
        assert caught.value.tensor in header


def test_a_pointer_file_says_what_it_is(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointTruncated, match="git lfs pull"):
        SafetensorsFile(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_anywhere_is_a_typed_error_or_harmless(tmp_path_factory, data):
    whole = bytearray(save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.int8)}))
    header_bytes = int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 8 + header_bytes - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    with suppress(CheckpointError):  # anything else is a failure of this test
        for tensor in SafetensorsFile(path).tensors.values():
            tensor.read(torch.empty(tensor.info.shape))


def test_every_cut_of_a_file_is_noticed(tmp_path):
    whole = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.int8)})
    path = tmp_path / "a.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointTruncated):
            SafetensorsFile(path)
