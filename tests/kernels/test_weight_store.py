"""Where packed weights lie: large pages hold what was put there, each tensor in a place of its own."""

from __future__ import annotations

from itertools import pairwise

import torch

from tripool.kernels.weight_store import _CHUNK_BYTES, LargePages


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


def test_memory_that_made_a_tensor_is_not_shared_with_it() -> None:
    source = torch.ones(100)
    kept = LargePages().keep("one", lambda: source)
    source.zero_()
    assert bool(kept.all())
