"""For dry runs on a CPU: Triton's interpreter with numpy 2.4, whose arrays of one element are no numbers any more."""

from __future__ import annotations

from typing import Any


def patch_interpreter() -> None:
    """Before the first kernel is run; `TRITON_INTERPRET=1` must have been set before Triton was imported."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
