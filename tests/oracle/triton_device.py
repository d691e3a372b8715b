"""Kernels run on the GPU where there is one, else on CPU tensors under Triton's interpreter, chosen before import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    FLOATS = {
        "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn,
        "fp64": torch.float64, "fp8e5": torch.float8_e5m2,
    }  # fmt: skip
    BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

    def convert_float(data, from_type, to_type, _rounding):
        """The interpreter's own cuts bits off on the way to bfloat16 and loses a carry on the way to e4m3."""
        bits = torch.from_numpy(data.copy()).view(FLOATS[from_type.name])
        return bits.to(FLOATS[to_type.name]).view(BITS[to_type.primitive_bitwidth]).numpy()

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot_in_float64(self, a, b, d, *more):
        """In float64, where a sum of such products is exact or nearly so.

        BLAS adds in another order for other shapes of a tile, on some CPUs, and what the card promises (a row's bits do
        not depend on its tile) would not hold here. The interpreter's own also multiplies bfloat16 as if its bits were
        whole numbers.
        """
        if a.dtype not in (tl.bfloat16, tl.float32):
            return create_dot(self, a, b, d, *more)
        if a.dtype == tl.bfloat16:
            a, b = (convert_float(one.data, tl.bfloat16, tl.float32, None).view("f4") for one in (a, b))
        else:
            a, b = a.data, b.data
        return interpreter.TensorHandle((d.data + a.astype("f8") @ b.astype("f8")).astype(d.data.dtype), d.dtype.scalar)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot_in_float64

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
