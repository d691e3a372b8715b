"""Where packed weights lie: large pages hold what was put there, each tensor in a place of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from tripool.kernels.cuda import table
from tripool.kernels.cuda.table import OnDevice
from tripool.kernels.weight_store import _CHUNK_BYTES, FRESH, LargePages, decided


def test_large_pages_hold_every_tensor_in_a_place_of_its_own() -> None:
    store = LargePages()
    shapes = [
        (3, 5),
        (0, 4),
        (1,),
        (_CHUNK_BYTES // 2 + 1,),
        (7, 64),
        (_CHUNK_BYTES // 2,),
        (_CHUNK_BYTES + 100,),
        (9,),
    ]
    made = [torch.randint(0, 100, shape, dtype=torch.uint8) for shape in shapes]
    made += [torch.randn(33, 17).T, torch.randn(4, 4, dtype=torch.complex64)]
    kept = [store.keep("one", lambda one=one: one) for one in made]
    del store  # the tensors keep their memory
    assert all(torch.equal(a, b) and a.dtype == b.dtype and a.is_contiguous() for a, b in zip(kept, made, strict=True))
    assert all(one.data_ptr() % 64 == 0 for one in kept if one.numel())
    seqs = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in kept if one.numel())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(seqs))


def test_what_was_decided_once_is_not_decided_again() -> None:
    class Recorded(dict[str, torch.Tensor]):
        def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
            return self[label] if label in self else self.setdefault(label, make())

    for store in (FRESH, Recorded()):
        for answer in (True, False):
            assert decided(store, str(answer), lambda answer=answer: answer) is answer
    for answer in (True, False):
        assert decided(store, str(answer), lambda: 1 / 0) is answer


def test_on_its_way_to_a_device_a_tensor_stays_with_the_host() -> None:
    kept: list[str] = []

    class Host:
        def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
            kept.append(label)
            return torch.arange(7.0) if label == "known" else make()

    store, made = OnDevice("cpu", Host()), torch.randn(3, 5)
    assert store.keep("new", lambda: made) is made
    assert torch.equal(store.keep("known", lambda: made), torch.arange(7.0))
    assert kept == ["new", "known"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_uploads_in_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(table, "_PIECE_BYTES", 13)
    for shape in ((3, 11), (0, 4), (1,)):
        source = torch.randint(0, 100, shape).to(dtype)
        there = table.uploaded(source, torch.device("cpu"))
        assert there.shape == source.shape and there.dtype == dtype
        assert torch.equal(there.view(torch.uint8), source.view(torch.uint8))


def test_memory_that_made_a_tensor_is_not_shared_with_it() -> None:
    source = torch.ones(100)
    kept = LargePages().keep("one", lambda: source)
    source.zero_()
    assert bool(kept.all())
