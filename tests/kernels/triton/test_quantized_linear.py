"""Parts of the CUDA table in eight bits, integers and e4m3: kernels against plain steps."""

from __future__ import annotations

import pytest
import torch

from tripool.kernels.cuda.arithmetic import FLOATS, INTEGERS, quantized_ops_of
from tripool.kernels.cuda.make import Make, norm_for, rounding_for
from tripool.kernels.cuda.quantized_linear import Experts8, Linear8, QuantizedOps
from tripool.kernels.ref import fp8
from tripool.kernels.ref.swiglu import swiglu
from tripool.kernels.weight_store import FRESH
from tripool.kernels.weights import E4M3, INT8, Norm

KINDS = [INT8, E4M3]
PLAIN = {INT8: INTEGERS, E4M3: FLOATS}


def held(quantized: QuantizedOps, *shape: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats that are eight bits times scales."""
    steps = quantized.pack(torch.randn(shape) * 40)
    if quantized.stored == INT8:
        scales = torch.rand(shape[:-1]) * 1e-2 + 1e-3
        return (steps.float() * scales[..., None]).to(device), scales.to(device)
    scales = torch.rand(*shape[:-1], -(-shape[-1] // fp8.GROUP)) * 1e-2 + 1e-3
    return (steps.float() * fp8.by_column(scales, shape[-1])).to(device), scales.to(device)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """A tie in rounding may fall either way: not the same bits, but never far."""
    return float((ours.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "out", "width"), [(1, 16, 16), (3, 48, 48), (17, 272, 272), (40, 96, 320)])
def test_a_linear_is_its_plain_version(device: str, kind: str, rows: int, out: int, width: int) -> None:
    quantized, plain_eight = quantized_ops_of(kind, fused=True, device=device), PLAIN[kind]
    weight, bias = held(quantized, out, width, device=device), torch.randn(out, device=device)
    x = torch.randn(rows, width, device=device).to(torch.bfloat16)
    x[1:2] = 0
    ours, plain = (Linear8(weight, quantized=one) for one in (quantized, plain_eight))
    given = plain_eight.quantise(x)
    # The interpreter cuts bits off where a device rounds to bfloat16.
    torch.testing.assert_close(ours(given), plain(given), rtol=2**-7, atol=2**-7)
    assert ours.first(11)(given).shape == (rows, 11)
    assert torch.equal(ours.first(16)(given), ours(given)[:, :16])
    assert torch.equal(ours.first(11)(given), ours(given)[:, :11])
    assert relative_error(ours(x), plain(x)) < 0.01
    biased = Linear8(weight, bias, quantized=quantized)
    assert torch.equal(biased(given), ours(given) + bias.to(torch.bfloat16))
    assert torch.equal(biased.first(11)(given), biased(given)[:, :11])
    for linear in (ours, biased, plain):
        stream = torch.randn(rows, out, device=device).bfloat16()
        wanted = stream.float() + linear(given).float()
        linear.add_to(stream, given)
        torch.testing.assert_close(stream.float(), wanted, rtol=2**-6, atol=2**-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 2, 4), (5, 3, 7), (33, 2, 3)])
def test_experts_are_their_plain_version(device: str, kind: str, rows: int, top_k: int, experts: int) -> None:
    quantized = quantized_ops_of(kind, fused=True, device=device)
    gate_up, down = held(quantized, experts, 2 * 48, 64, device=device), held(quantized, experts, 64, 48, device=device)
    x = torch.randn(rows, 64, device=device).to(torch.bfloat16)
    chosen = torch.rand(rows, experts, device=device).topk(top_k).indices
    weights = torch.rand(rows, top_k, device=device)
    ours, plain = (Experts8(gate_up, down, quantized=one)(x, chosen, weights) for one in (quantized, PLAIN[kind]))
    assert relative_error(ours, plain) < 0.02
    nobody = Experts8(gate_up, down, quantized=quantized)(x[:0], chosen[:0], weights[:0])
    assert nobody.shape == (0, 64)


@pytest.mark.parametrize("kind", [INT8, E4M3])
def test_plain_experts_are_experts(kind: str) -> None:
    """Against floats throughout: what rounding the rows to eight bits costs, and nothing else."""
    quantized = PLAIN[kind]
    (gate_up, up_scales), (down, down_scales) = (held(quantized, 4, *s, device="cpu") for s in ((96, 64), (64, 48)))
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    chosen = torch.rand(9, 4).topk(2).indices
    ours = Experts8((gate_up, up_scales), (down, down_scales), quantized=quantized)(x.bfloat16(), chosen, weights)
    wanted = torch.stack([
        sum(weights[row, i] * (down[e] @ swiglu((gate_up[e] @ x[row])[None])[0]) for i, e in enumerate(chosen[row]))
        for row in range(9)
    ])  # fmt: skip
    assert relative_error(ours, wanted) < (0.02 if kind == INT8 else 0.06)


def test_what_is_packed_is_what_is_stored() -> None:
    """From bfloat16, in which a network is loaded."""
    every = torch.arange(-127, 128).repeat(64, 2)[:, :496].float()
    scales = torch.rand(64) * 1e-2 + 1e-5
    steps, kept = INTEGERS.stored_weight(((every * scales[:, None]).bfloat16(), scales), "", FRESH)
    assert torch.equal(steps.float(), every) and torch.equal(kept, scales)
    every = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 127) < 127].view(fp8.E4M3).float()  # no NaN
    every = every.repeat(64, 2)[:, :496]
    scales = torch.rand(64, 4) * 1e-2 + 1e-5
    steps, kept = FLOATS.stored_weight(((every * fp8.by_column(scales, 496)).bfloat16(), scales), "", FRESH)
    assert torch.equal(steps.float(), every) and torch.equal(kept, scales), "rows that share no scales"
    many = held(INTEGERS, 3, 2**11, 2**10, device="cpu")  # more than a piece
    assert torch.equal(INTEGERS.stored_weight(many, "", FRESH)[0].float() * many[1][..., None], many[0])


def test_what_is_not_all_in_eight_bits_stays_in_floats() -> None:
    weight, scales = held(INTEGERS, 16, 32, device="cpu")
    assert INTEGERS.held(weight, scales) is not None
    dead = weight * (torch.arange(16) > 0)[:, None]
    found = INTEGERS.held(dead, scales * (torch.arange(16) > 0))
    assert found is not None and (found[1] > 0).all(), "zeros need no scale"
    assert INTEGERS.held(weight, None) is None
    assert INTEGERS.held(weight, scales * (torch.arange(16) > 0)) is None, "a row in floats"
    assert INTEGERS.held(weight[:, :30], scales) is None, "not a multiple of 16"
    weight, scales = held(FLOATS, 16, 256, device="cpu")
    assert FLOATS.held(weight, scales) is not None
    assert FLOATS.held(weight, scales * (torch.arange(2) > 0)) is None, "a block in floats"
    dead = weight * (torch.arange(256) >= 128)
    assert FLOATS.held(dead, scales * (torch.arange(2) > 0)) is not None, "zeros need no scale"
    assert FLOATS.held(weight, scales[:, :1]) is None, "blocks of 256 columns"


def test_rows_are_rounded_once_if_all_who_multiply_them_round() -> None:
    make = Make(FRESH, torch.bfloat16, False, INTEGERS)
    weight, scales = held(INTEGERS, 16, 32, device="cpu")
    rounding, floats = make.linear(weight, None, scales), make.linear(weight)
    norm, x = Norm(torch.rand(32), 1e-6), torch.randn(3, 32).bfloat16()
    assert isinstance(norm_for(norm, floats, rounding)(x), torch.Tensor)
    assert isinstance(rounding_for(floats, rounding)(x), torch.Tensor)
    for rows in (norm_for(norm, rounding)(x), rounding_for(rounding, rounding)(x)):
        assert not isinstance(rows, torch.Tensor) and rows[0].dtype == torch.int8
    once, apart = rounding(norm_for(norm, rounding)(x)), rounding(norm_for(norm, floats)(x))
    assert relative_error(once, apart) < 0.01
