"""Text for calibration and evaluation: from a file, or the one that comes with the package, as windows of tokens."""

from __future__ import annotations

from pathlib import Path

from tripool.quant.options import QuantizeError
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
