"""Where a run computes, and in which of the equal ways: chosen once, each choice tried before it is relied on.

A way that cannot be had here is said and replaced by the plain one; it is never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tripool.models.arch import MlaShape
from tripool.train.attention import MASKED, Way, by_documents
from tripool.train.rows import NO_DOCUMENT, Rows

Tell = Callable[[str], None]
_CLOSE = 0.02
"""Largest difference of two ways in bfloat16, relative to the largest value."""
_TRIED = 256


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 products on CUDA, over float32 weights; float32 throughout on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def choose_way(device: torch.device, shape: MlaShape, some: Sequence[Rows], rows_per_pass: int, tell: Tell) -> Way:
    if device.type != "cuda":
        return MASKED
    try:
        apart = _difference(by_documents(8, _TRIED), shape, device)
    except (ImportError, RuntimeError, TypeError) as error:  # an older torch, another device, another signature
        tell(f"attention by masked rows: {line_of(error)}")
        return MASKED
    if apart > _CLOSE:
        tell(f"attention by masked rows: by documents it differs by {apart:.3f}")
        return MASKED
    sizes = [_sizes(rows, rows_per_pass) for rows in some if len(rows)]
    return by_documents(max(most for most, _ in sizes), max(longest for _, longest in sizes))


def _sizes(rows: Rows, rows_per_pass: int) -> tuple[int, int]:
    """Most documents that the rows of one pass can hold, with what fills rows up, and the longest one's tokens. Where
    one epoch goes over into the next, or there are few rows, a pass may hold a row twice."""
    begins = torch.ones_like(rows.documents, dtype=torch.bool)
    begins[:, 1:] = rows.documents[:, 1:] != rows.documents[:, :-1]
    places = torch.cat((begins.flatten().nonzero().flatten(), torch.tensor([begins.numel()])))
    return rows_per_pass * int(begins.sum(1).max()), int(places.diff().max())


def _difference(way: Way, shape: MlaShape, device: torch.device) -> float:
    """Of results and gradients, from the plain way, on three rows of made-up documents."""
    documents = torch.full((3, _TRIED), NO_DOCUMENT, dtype=torch.int16)
    documents[0, :200], documents[0, 200:] = 0, 1
    documents[1, :1], documents[1, 1:130], documents[2] = 0, 1, 0
    documents = documents.to(device)
    rng = torch.Generator(device).manual_seed(0)
    size = (3, _TRIED, shape.heads)
    parts = [
        torch.randn(*size, width, generator=rng, device=device, dtype=torch.bfloat16)
        for width in (shape.nope + shape.rope, shape.nope + shape.rope, shape.v, shape.v)
    ]
    found = []
    for one in (way, MASKED):
        q, k, v = (part.clone().requires_grad_() for part in parts[:3])
        out = one.attend(q, k, v, one.sight(documents), shape.scale)
        out.backward(parts[3])
        found.append([out.detach(), q.grad, k.grad, v.grad])
    pairs = zip(*found, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
