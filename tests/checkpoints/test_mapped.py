from __future__ import annotations

import numpy as np
import pytest
import torch

from tripool.checkpoints import mapped as module
from tripool.checkpoints.mapped import MappedFile, row_pieces
from tripool.checkpoints.safetensors import SafetensorsFile
from tripool.errors import CheckpointError, CheckpointMissing, CheckpointTruncated


def test_unaligned_bytes_are_read_right(tmp_path):
    path = tmp_path / "bytes"
    values = np.arange(5, dtype=np.float32)
    path.write_bytes(b"x" * 3 + values.tobytes())
    file = MappedFile(path)
    assert file.tensor(3, 23, torch.float32).tolist() == values.tolist()
    assert file.tensor(7, 7, torch.float32).shape == (0,)
    file.close()


def test_nothing_reaches_the_file(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(64))
    file = MappedFile(path)
    file.tensor(0, 64, torch.uint8).fill_(7)
    file.close()
    assert path.read_bytes() == bytes(64)


def test_a_view_outlives_the_close_and_takes_the_mapping_with_it(tmp_path, mapped):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    file = MappedFile(path)
    view = file.tensor(10, 20, torch.uint8)
    file.close()
    assert view.tolist() == list(range(10, 20))
    assert mapped(path)
    del view
    assert not mapped(path)


def test_dropped_pages_come_back(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 64)
    file = MappedFile(path)
    view = file.tensor(0, file.num_bytes, torch.uint8)
    before = view.clone()
    file.drop(5000, 9000)
    assert torch.equal(view, before)


def test_missing_empty_and_unreadable_files_are_typed(tmp_path):
    with pytest.raises(CheckpointMissing, match="nowhere"):
        MappedFile(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointTruncated, match="empty"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        MappedFile(tmp_path)


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "multiple"), [(0, 8, 1), (1, 0, 1), (1000, 3000, 1), (130, 70000, 64)]
)
def test_pieces_cover_every_row_once(monkeypatch, num_rows, row_bytes, multiple):
    monkeypatch.setattr(module, "PIECE_BYTES", 100_000)
    pieces = list(row_pieces(num_rows, row_bytes, multiple))
    assert [row for first, last in pieces for row in range(first, last)] == list(range(num_rows))
    assert all((last - first) % multiple == 0 for first, last in pieces[:-1])
    assert all(last - first <= multiple or (last - first) * row_bytes <= 100_000 for first, last in pieces)


def test_reading_a_large_file_keeps_memory_flat(tmp_path, raw, resident):
    """200 MB in 50 tensors through one buffer. The second half shows that the measurement would notice."""
    num_tensors, num_values = 50, 2**20
    size = 4 * num_values
    header = {
        f"t{i}": {"dtype": "F32", "shape": [1024, 1024], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(num_tensors)
    }
    path = tmp_path / "large.safetensors"
    path.write_bytes(raw(header))
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size + num_tensors * size)
    file = SafetensorsFile(path)
    out = torch.empty(1024, 1024, dtype=torch.bfloat16)
    file.tensors["t0"].read(out)
    before = resident()
    peak = before
    for tensor in file.tensors.values():
        tensor.read(out)
        peak = max(peak, resident())
    assert peak - before < 60 * 2**20
    for tensor in file.tensors.values():
        tensor.whole().sum()
    assert resident() - before > 150 * 2**20
    file.close()
