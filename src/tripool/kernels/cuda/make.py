"""The parts of the CUDA table: linear layers, routed experts, norms and rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tripool.kernels.cuda.elementwise import normed, rms_norm, swiglu
from tripool.kernels.cuda.invariant_linear import Invariant, InvariantLinear, check_width
from tripool.kernels.cuda.quantized_linear import Experts8, Held, Linear8, QuantizedOps
from tripool.kernels.ref import linear, route
from tripool.kernels.weight_store import FRESH, WeightStore, decided
from tripool.kernels.weights import INT8, MoeWeights, Norm

# Routed experts on the device, without asking it how many rows each expert got.
#
# Three ways: bfloat16 goes through `triton/experts`, widths that it does not take through torch's grouped product of
# rows sorted by expert; anything else (float32, or a device without that product) runs every expert over every row and
# keeps what was chosen: wasteful, plain, and the oracle of the other two.


class Experts:
    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        store: WeightStore = FRESH,
        dtype: torch.dtype = torch.float32,
        fused: bool = False,
        exact: bool = False,
    ) -> None:
        """`exact`: a row's bits do not depend on other rows."""
        self._exact = exact
        self._gate_up = store.keep("gate_up", lambda: gate_up.to(dtype))  # [experts, 2 * width, hidden]
        self._down = store.keep("down", lambda: down.to(dtype))  # [experts, hidden, width]
        self._fused = fused and dtype == torch.bfloat16
        self.num_bytes = self._gate_up.nbytes + self._down.nbytes
        if exact:
            check_width(down.shape[1])
            check_width(down.shape[2])

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, onto: torch.Tensor | None = None,
        also: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """x [rows, hidden]; experts and weights [rows, top_k]. `also` [rows, hidden] is added to the result. With
        `onto` [rows, hidden] the result is added to it in place."""
        if self._fused:
            from tripool.kernels.triton.experts import routed_experts, takes

            if takes(*self._down.shape[1:]):
                x = x.to(self._down.dtype).contiguous()
                return routed_experts(
                    x, experts.contiguous(), weights, self._gate_up, self._down, onto, also, invariant=self._exact
                )
        way = sorted_rows if self._fused else all_rows
        out = way(x, experts, weights, self._gate_up, self._down)
        out = out if also is None else out + also
        return out if onto is None else onto.add_(out)


def all_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Run every expert over every row and weight the results."""
    row_weights = weights.new_zeros(len(x), len(gate_up)).scatter_(1, experts, weights)
    parts = swiglu(x.to(gate_up.dtype) @ gate_up.mT) @ down.mT  # [experts, rows, hidden]
    return torch.einsum("erh,re->rh", parts, row_weights.to(parts.dtype))


def sorted_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Sort the rows by expert for a grouped product."""
    rows, top_k = experts.shape
    flat, order = experts.flatten().sort(stable=True)
    every = torch.arange(len(gate_up), dtype=flat.dtype, device=x.device)
    ends = torch.searchsorted(flat, every, right=True, out_int32=True)
    grouped = x.to(gate_up.dtype).index_select(0, order // top_k)
    out = torch._grouped_mm(swiglu(torch._grouped_mm(grouped, gate_up.mT, offs=ends)), down.mT, offs=ends)
    back = torch.empty_like(out).index_copy_(0, order, out).view(rows, top_k, -1)
    return torch.bmm(weights[:, None].to(back.dtype), back)[:, 0]


class Linear(linear.Linear):
    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        store: WeightStore = FRESH,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        kept_bias = None if bias is None else store.keep("bias", lambda: bias.to(dtype))
        super().__init__(store.keep("weight", lambda: weight.to(dtype)), kept_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def add_to(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """x += self(rows). Without a bias the product adds x itself, before it rounds."""
        if self.bias is None and x.dtype == rows.dtype == self.weight.dtype:
            x.addmm_(rows, self.weight.mT)
        else:
            x += self(rows)

    def first(self, count: int) -> Linear:
        return Linear(self.weight[:count], None if self.bias is None else self.bias[:count], dtype=self.weight.dtype)


class Router:
    """RMS norm, and the choice of experts in float32: never quantised, because it selects experts."""

    def __init__(
        self, weights: MoeWeights, *, store: WeightStore = FRESH, fused: bool = False, int8: bool = False,
        invariant: Invariant | None = None,
    ) -> None:  # fmt: skip
        """`int8`: the normed rows are used in 8 bits, so they may come like that."""
        self._int8, self._invariant = int8, invariant
        self._norm, self._bias, self._plan, self._fused = weights.norm, weights.gate_bias, weights.plan, fused
        self._gate = store.keep("weight", lambda: _router_weight(weights.gate, fused))
        if invariant is not None and self._gate.dtype == torch.float32:
            check_width(self._gate.shape[1])
            self._gate = store.keep("three parts", partial(_three_parts, self._gate))
        self.num_bytes = self._gate.nbytes

    def __call__(self, x: torch.Tensor) -> tuple[AnyRows, torch.Tensor, torch.Tensor]:
        """x [rows, hidden] -> normed rows (perhaps in 8 bits), experts and weights [rows, top_k]."""
        if self._fused:
            from tripool.kernels.triton.gate import route as choose
            from tripool.kernels.triton.router import MOST_ROWS, norm_route

            norm, invariant = self._norm, self._invariant
            if invariant is not None and self._gate.dim() == 3:
                return self._by_parts(x, invariant)
            few = invariant is not None or len(x) <= MOST_ROWS
            if x.is_contiguous() and self._gate.dtype == x.dtype and few:
                return norm_route(x, norm.gain, norm.eps, self._gate, self._bias, self._plan, int8=self._int8)
        else:
            choose = route.route
        rows = normed(x, self._norm)
        return rows, *choose(F.linear(rows.float(), self._gate.float()), self._bias, self._plan)

    def _by_parts(self, x: torch.Tensor, invariant: Invariant) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With a float32 gate in three 16-bit parts, whose products with 16-bit rows are exact."""
        from tripool.kernels.triton.elementwise import rms_norm as fused_norm
        from tripool.kernels.triton.gate import route_parts

        rows = fused_norm(x, self._norm.gain, self._norm.eps)
        logits = invariant.product(rows, self._gate.flatten(0, 1), dtype=torch.float32)
        by_part = logits.unflatten(1, (3, -1)).transpose(0, 1).contiguous()
        return rows, *route_parts(by_part, self._bias, self._plan)


def _router_weight(gate: torch.Tensor, fused: bool) -> torch.Tensor:
    """In bfloat16 where that is exact, as it is for nearly all checkpoints: sums are float32 in both."""
    narrow = gate.to(torch.bfloat16)
    return narrow if fused and torch.equal(narrow.float(), gate.float()) else gate.float()


def _three_parts(gate: torch.Tensor) -> torch.Tensor:
    """float32 [experts, hidden] -> bfloat16 [3, experts, hidden] whose sum it is."""
    high = gate.to(torch.bfloat16)
    middle = (gate - high.float()).to(torch.bfloat16)
    return torch.stack((high, middle, (gate - high.float() - middle.float()).to(torch.bfloat16)))


AnyRows = Any
"""Rows in the table's type, or `Rows8` where the next product takes 8 bits."""
AnyLinear = Linear | InvariantLinear | Linear8
AnyExperts = Experts | Experts8


@dataclass(frozen=True, slots=True)
class Make:
    store: WeightStore
    dtype: torch.dtype
    fused: bool
    """Whether Triton kernels may be used: on CUDA, in bfloat16."""
    quantized: QuantizedOps | None = None
    """Arithmetic for weights stored in 8 bits; None: they are dequantised when loaded."""
    invariant: Invariant | None = None
    """Products for the exact mode; None: the fastest ones, whose last bits may depend on the batch."""

    def __post_init__(self) -> None:
        assert self.fused or self.invariant is None, "only Triton kernels are batch-invariant"

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> AnyLinear:
        held = self._held(weight, scales)
        if self.quantized and held:
            return Linear8(held, bias, quantized=self.quantized, store=self.store)
        if self.invariant is not None:
            return self.invariant.linear(weight, bias, store=self.store, dtype=self.dtype)
        return Linear(weight, bias, store=self.store, dtype=self.dtype)

    def _held(self, weight: torch.Tensor, scales: torch.Tensor | None) -> Held | None:
        """See `QuantizedOps.held`. Where the store has the packed tensors, the result is not read."""
        if self.quantized is None:
            return None
        ops, found = self.quantized, []

        def stored() -> bool:
            found.append(ops.held(weight, scales))
            return found[0] is not None

        return (found[0] if found else (weight, weight)) if decided(self.store, "8 bits", stored) else None

    def rms_norm(self) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
        if self.invariant is None:
            return rms_norm
        from tripool.kernels.triton.elementwise import rms_norm as fused_norm

        return fused_norm

    def swiglu(self) -> Callable[[torch.Tensor], torch.Tensor]:
        if not self.fused:
            return swiglu
        from tripool.kernels.triton.elementwise import swiglu as fused_swiglu

        return fused_swiglu

    def router(self, weights: MoeWeights, *users: AnyLinear | AnyExperts) -> Router:
        quantized = _common(users)
        int8 = quantized is not None and quantized.stored == INT8
        return Router(weights, store=self.store, fused=self.fused, int8=int8, invariant=self.invariant)

    def experts(self, weights: MoeWeights) -> AnyExperts:
        gate_up = self._held(weights.gate_up, weights.gate_up_scales)
        down = self._held(weights.down, weights.down_scales)
        if self.quantized and gate_up and down:
            return Experts8(gate_up, down, quantized=self.quantized, store=self.store)
        exact = self.invariant is not None
        return Experts(weights.gate_up, weights.down, store=self.store, dtype=self.dtype, fused=self.fused, exact=exact)


def norm_for(norm: Norm, *users: AnyLinear | AnyExperts, fused: bool = False) -> Callable[[torch.Tensor], AnyRows]:
    """RMS norm for these users: quantised at once if all of them take 8 bits. `fused`: with Triton kernels."""
    quantized = _common(users)
    if quantized is None:
        if fused:
            from tripool.kernels.triton.elementwise import rms_norm as fused_norm

            return lambda x: fused_norm(x, norm.gain, norm.eps)
        return lambda x: rms_norm(x, norm.gain, norm.eps)
    return lambda x: quantized.norm(x, norm.gain, norm.eps)


def rounding_for(*users: AnyLinear | AnyExperts) -> Callable[[torch.Tensor], AnyRows]:
    """Quantisation for these users, for rows that are also needed as floats: done once instead of by each user."""
    quantized = _common(users)
    return (lambda x: x) if quantized is None else quantized.quantise


def _common(users: tuple[AnyLinear | AnyExperts, ...]) -> QuantizedOps | None:
    if not users:
        return None
    quantized_ops = [one.quantized for one in users if isinstance(one, Linear8 | Experts8)]
    return quantized_ops[0] if len(quantized_ops) == len(users) else None
