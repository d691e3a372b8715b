"""Kernels run on the GPU where there is one, else on CPU tensors under Triton's interpreter, chosen before import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_new_numpy(tensor, scope):
        """The interpreter's loop bounds are arrays of one element, and numpy 2.4 refuses int() of those."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_new_numpy


@pytest.fixture
def device() -> str:
    torch.manual_seed(7)
    return "cuda" if torch.cuda.is_available() else "cpu"
