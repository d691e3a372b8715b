from __future__ import annotations

import pytest
import torch

from oracle.cases import CASES
from quant.conftest import windows_of
from tripool.checkpoints import open_checkpoint
from tripool.models import read_arch
from tripool.models.loader import FromCheckpoint
from tripool.quant.folding import Factors, _descend, _error, choose_factors
from tripool.quant.layer import FoldedSource
from tripool.quant.parts import Fold, layer_parts
from tripool.quant.rounding import Seen
from tripool.quant.stream import Stream

BY_NAME = {case.name: case for case in CASES}
NAMES = [
    "llama-linear",
    "llama-wide-heads",
    "qwen2-7-1",
    "qwen3-biased",
    "qwen3-moe-plain",
    "v2-groups",
    "v3-groups",
    "v3-unnormalised",
    "v3-plain-query",
]


def some_power_of_two(parts, seen, source, rng) -> Factors:
    """As `choose_factors`, but any factor at all, and for every fold."""
    import tripool.quant.folding as folding

    factors = Factors()
    for fold in parts.folds:
        stats = seen[parts.input(fold.inputs[0]).observed]
        wanted = torch.randn(len(stats.largest), generator=rng).mul(2).exp2()
        factor = folding._settled(folding._tied(fold, wanted, torch.ones(len(wanted)), 0.9), in_powers=True)
        readers = [name for label in fold.inputs for name in parts.input(label).linears]
        folding._note(factors, fold, factor, readers, source)
    return factors


@pytest.mark.parametrize("name", NAMES)
def test_scaled_layers_compute_the_same_bits(folder_of, name: str) -> None:
    """Every fold of every layer, the MTP layer too, with factors from 1/64 to 64."""
    case, rng = BY_NAME[name], torch.Generator().manual_seed(7)
    windows = windows_of(case, count=1, length=70)
    with open_checkpoint(folder_of(case)) as checkpoint:
        arch = read_arch(checkpoint)
        plain, scaled = (Stream.begin(arch, checkpoint, windows) for _ in range(2))
        for i in range(arch.layers + case.mtp):
            parts = layer_parts(arch, i)
            unscaled = FromCheckpoint(checkpoint)
            seen = plain.enter_mtp(parts, checkpoint, unscaled) if parts.mtp else {}
            seen |= plain.observe(parts, unscaled)
            for one in parts.inputs:  # an expert that nobody chose was not seen; it is scaled all the same
                width = checkpoint.infos()[f"{parts.prefix}.{one.linears[0]}.weight"].shape[1]
                seen.setdefault(one.observed, Seen(torch.eye(width), torch.ones(width), torch.ones(1, width), 1))
            factors = some_power_of_two(parts, seen, FoldedSource(checkpoint, parts, Factors()), rng)
            source = FoldedSource(checkpoint, parts, factors)
            if parts.mtp:
                scaled.enter_mtp(parts, checkpoint, source)
            scaled.observe(parts, source)
            changed = [key for key in factors.tensors() if not (factors.tensors()[key] == 1).all()]
            assert len(changed) > len(parts.folds)
            for a, b in zip(plain.states, scaled.states, strict=True):
                assert torch.equal(a, b), parts.prefix


@pytest.mark.parametrize("name", ["llama-wide-heads", "qwen2-7-1", "v2-groups", "v3-groups"])
def test_what_is_chosen_leaves_the_float_network_as_it_was(folder_of, name: str) -> None:
    """Gains as they are stored, in bfloat16; what stays in 16 bits for ever, router and biases, by powers of two."""
    case = BY_NAME[name]
    windows = windows_of(case, count=2, length=70)
    with open_checkpoint(folder_of(case)) as checkpoint:
        arch = read_arch(checkpoint)
        plain, scaled = (Stream.begin(arch, checkpoint, windows) for _ in range(2))
        for i in range(arch.layers):
            parts, unscaled = layer_parts(arch, i), FoldedSource(checkpoint, layer_parts(arch, i), Factors())
            factors = choose_factors(parts, plain.observe(parts, unscaled), unscaled)
            assert factors.columns, "random activations have larger columns and smaller ones"
            source = FoldedSource(checkpoint, parts, factors)
            for norm in factors.norms:
                gain = source.linear(norm)
                if is_power_of_two(factors.norms[norm]):
                    continue
                torch.testing.assert_close(gain, gain.bfloat16().float(), rtol=1e-6, atol=0)
            if parts.moe and "mlp.gate" in factors.columns:
                assert is_power_of_two(factors.columns["mlp.gate"])
            for linear, rows in factors.rows.items():
                assert is_power_of_two(rows) or not source.has_bias(linear)
            scaled.observe(parts, source)
            for a, b in zip(plain.states, scaled.states, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def is_power_of_two(values: torch.Tensor) -> bool:
    return bool((values.log2() == values.log2().round()).all())


@pytest.mark.parametrize("tied", [False, True])
def test_descent_lowers_the_error_on_rows_it_never_saw(tied: bool) -> None:
    rng = torch.Generator().manual_seed(8)
    sizes = torch.randn(48, generator=rng).exp()
    sizes = sizes[:24].repeat(2) if tied else sizes
    rows, others = (torch.randn(400, 48, generator=rng) * sizes for _ in range(2))
    weight = torch.randn(64, 48, generator=rng)
    fold = Fold(("one",), rows_of="two", source_rows=tuple(range(24)) * 2 if tied else tuple(range(48)))
    found = _descend(torch.ones(48), rows, weight, fold)
    if tied:
        assert torch.equal(found[:24], found[24:])
    assert _error(others / found, weight * found) < 0.9 * _error(others, weight)


def test_an_outlier_goes_where_it_does_less_harm(folder_of) -> None:
    """One column of activations a hundred times the others: suppressing it saves most of the rounding error."""
    case = BY_NAME["llama-3"]
    with open_checkpoint(folder_of(case)) as checkpoint:
        arch, parts = read_arch(checkpoint), layer_parts(read_arch(checkpoint), 0)
        seen = Stream.begin(arch, checkpoint, windows_of(case)).observe(parts, FromCheckpoint(checkpoint))
        factor = torch.ones(arch.hidden)
        factor[5] = 1 / 128
        seen = {label: one.divided(factor) if label == "self_attn.in" else one for label, one in seen.items()}
        source = FoldedSource(checkpoint, parts, Factors())
        factors = choose_factors(parts, seen, source)
        weight, rows = source.linear("self_attn.q_proj"), seen["self_attn.in"].rows
        found = factors.columns["self_attn.q_proj"]
        assert found[5] >= 8 * found.median()
        assert _error(rows / found, weight * found) < 0.1 * _error(rows, weight)
        again = Factors.of_tensors(factors.tensors())
        assert again.tensors().keys() == factors.tensors().keys()
