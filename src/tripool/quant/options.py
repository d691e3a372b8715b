"""Options of a quantisation and its calibration text. Each technique can be switched off, to measure its gain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tripool.errors import InvalidRequest, TripoolError
from tripool.text import Tokenizer

BUNDLED_TEXT = Path(__file__).with_name("calibration.txt")


def read_windows(file: Path | None, tokenizer: Tokenizer, *, num_tokens: int | None, window: int) -> list[list[int]]:
    """As many whole windows as the text gives, at most `num_tokens` in all; a short text is one short window."""
    path = file or BUNDLED_TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"cannot read {path}: {error}", hint="give a file of plain UTF-8 text") from error
    ids = tokenizer.encode(text)[:num_tokens]
    windows = [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]
    if not windows and len(ids) > 1:
        windows = [ids]
    if not windows:
        raise QuantizeError(f"{path} has {len(ids)} tokens", hint="give a longer text")
    return windows


class QuantizeError(TripoolError, status=400, code="cannot_quantize"):
    """A quantisation cannot start or continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Techniques:
    suppress: bool = True
    """Outliers of activations are scaled down, and the weights that read them scaled up by the same factor."""
    search: bool = True
    """Each channel's scale is the candidate with the least output error; otherwise the largest weight decides."""
    compensate: bool = True
    """The rounding error of a column is compensated by the following columns."""
    keep: float = 0.4
    """Mixed precision: the most sensitive parts stay in 16-bit floats, as long as the linears' bytes grow by at most
    this share. 0: none.
    """
    vocabulary: bool = False
    """Embedding and head are quantised too, with a scale per token: in small models they are much of the file."""

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise InvalidRequest(f"keep is {self.keep!r}", hint="a share: at least 0 and below 1", param="keep")


PLAIN = Techniques(suppress=False, search=False, compensate=False, keep=0.0)
"""Per-channel rounding and nothing else."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part that could stay in floats."""

    name: str
    sensitivity: float
    """Squared error that its rounding adds to the residual stream, relative to the stream."""
    extra_bytes: int
    """Bytes that floats would cost."""


def choose_kept(candidates: list[Candidate], budget_bytes: int) -> list[str]:
    """Greedy by error saved per byte; a candidate that does not fit is skipped."""
    kept, left = [], budget_bytes
    for one in sorted(candidates, key=lambda one: (-one.sensitivity / max(one.extra_bytes, 1), one.name)):
        if one.extra_bytes <= left and one.sensitivity > 0:
            kept.append(one.name)
            left -= one.extra_bytes
    return sorted(kept)
