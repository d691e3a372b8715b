"""One rank's layers of DeepSeek-V3 in 8 bits: weights of every layer in their own memory, and the operators over them.

An operator reads and writes the workspace, so all of them in order are a step, and one of them over all layers is that
operator's time with cold weights. Each knows the fewest bytes and operations it needs, from which its floor follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import timing  # noqa: F401  (first: it puts src/ on the path)
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tripool.kernels.ref.route import RoutePlan


@dataclass(frozen=True)
class Shape:
    """DeepSeek-V3; `toy` is the same network in miniature, for a dry run on a CPU."""

    layers: int = 61
    dense_layers: int = 3
    hidden: int = 7168
    heads: int = 128
    q_rank: int = 1536
    rank: int = 512
    rope: int = 64
    nope: int = 128
    v: int = 128
    dense_width: int = 18432
    width: int = 2048
    vocab: int = 129280
    local_experts: int = 8

    @classmethod
    def toy(cls) -> Shape:
        return cls(2, 1, 64, 4, 48, 32, 16, 16, 16, 64, 32, 128, 8)

    @property
    def latent(self) -> int:
        return self.rank + self.rope

    @property
    def queries(self) -> int:
        return self.heads * (self.nope + self.rope)


PLAN = RoutePlan(top_k=8, score="sigmoid", groups=8, top_groups=4, group_top=2, normalise=True, scaling=2.5)


@dataclass(frozen=True)
class Op:
    name: str
    run: Callable[[Any], None]
    """Given a layer."""
    num_bytes: float
    int8_ops: float = 0.0
    bf16_ops: float = 0.0


@dataclass
class Weights8:
    """int8 [.., out, in] with a scale per channel that keeps results near 1."""

    q: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def random(cls, *shape: int, device: str) -> Weights8:
        q = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        return cls(q, torch.full(shape[:-1], 1 / (73 * shape[-1] ** 0.5), device=device))


@dataclass
class Layer:
    dense: bool
    down: Weights8
    q_up: Weights8
    out: Weights8
    kv_up: torch.Tensor
    """bf16 [heads, nope + v, rank]; both halves are read by head in decoding."""
    kv_up8: Weights8
    """The same as one product, for prefill."""
    gains: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """Before attention, before experts, of queries, of the latent."""
    gate_up: Weights8
    shared_down: Weights8
    gate: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    experts_gate_up: Weights8 | None = None
    experts_down: Weights8 | None = None
    kv: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    kv_first: int = 0


def make_layer(s: Shape, device: str, *, dense: bool) -> Layer:
    def gain(width: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(width, device=device)).to(torch.bfloat16)

    width = s.dense_width if dense else s.width
    layer = Layer(
        dense=dense,
        down=Weights8.random(s.q_rank + s.latent, s.hidden, device=device),
        q_up=Weights8.random(s.queries, s.q_rank, device=device),
        out=Weights8.random(s.hidden, s.heads * s.v, device=device),
        kv_up=torch.randn(s.heads, s.nope + s.v, s.rank, device=device, dtype=torch.bfloat16) * s.rank**-0.5,
        kv_up8=Weights8.random(s.heads * (s.nope + s.v), s.rank, device=device),
        gains=(gain(s.hidden), gain(s.hidden), gain(s.q_rank), gain(s.rank)),
        gate_up=Weights8.random(2 * width, s.hidden, device=device),
        shared_down=Weights8.random(s.hidden, width, device=device),
    )
    if not dense:
        layer.gate = torch.randn(256, s.hidden, device=device, dtype=torch.bfloat16) * s.hidden**-0.5
        layer.gate_bias = torch.randn(256, device=device) * 0.01
        layer.experts_gate_up = Weights8.random(s.local_experts, 2 * s.width, s.hidden, device=device)
        layer.experts_down = Weights8.random(s.local_experts, s.hidden, s.width, device=device)
    return layer


class Operators:
    """Attention and experts over a workspace of `tokens` rows; who builds it sets what prefill or decode adds."""

    def __init__(self, s: Shape, tokens: int, rows: Sequence[int], *, own_shared: bool, device: str) -> None:
        from tripool.kernels.triton import gate, grouped_gemm, int8_gemm, mla_prologue, norm_quant

        self.s, self.tokens, self.device, self.own_shared = s, tokens, device, own_shared
        self.k = SimpleNamespace(
            gemm=int8_gemm.int8_gemm, grouped=grouped_gemm.grouped_gemm, make_plan=grouped_gemm.make_plan,
            choose=int8_gemm.choose, choose_grouped=grouped_gemm.choose_grouped,
            norm=norm_quant.rms_norm_quant, swiglu=norm_quant.swiglu_quant,
            quantise=norm_quant.quantise_rows, route=gate.route, prologue=mla_prologue.mla_prologue,
            rope=mla_prologue.rope_queries,
        )  # fmt: skip
        self.arrived = int8_gemm.arrivals(device)
        self.units = 0
        """Multiprocessors that are left to this; 0: all."""
        self.total = sum(rows)
        self.num_local = len(rows)
        counts = torch.tensor(rows, dtype=torch.int32)
        self.counts, self.starts = counts.to(device), (counts.cumsum(0, dtype=torch.int32) - counts).to(device)
        self.ws = SimpleNamespace(
            x=self._normal(tokens, s.hidden), delta=self._normal(tokens, s.hidden),
            combined=self._normal(tokens, s.hidden),
            arrivals=torch.randint(-127, 128, (self.total, s.hidden), dtype=torch.int8, device=device),
            arrival_scales=torch.full((self.total,), 1 / 73, device=device),
        )  # fmt: skip
        angles = torch.rand(tokens, s.rope // 2, device=device) * 6.28
        self.cos_sin = torch.complex(angles.cos(), angles.sin())
        self.order = torch.arange(tokens, device=device)
        self.slots, self.first_block, self.num_blocks = self.order, 0, -(-tokens // 64)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def _gemm(self, x: tuple[torch.Tensor, torch.Tensor], w: Weights8) -> torch.Tensor:
        tiling = self._within(self.k.choose(len(x[0]), *w.q.shape))
        return self.k.gemm(x[0], x[1], w.q, w.scale, arrived=self.arrived, tiling=tiling)

    def _within(self, tiling: Any) -> Any:
        """A grid that stays on the device must not count on multiprocessors that others hold."""
        return replace(tiling, programs=self.units) if hasattr(tiling, "programs") else tiling

    def _product(self, name: str, n: int, k: int, run: Callable[[Any], None], rows: int | None = None) -> Op:
        m = self.tokens if rows is None else rows
        return Op(name, run, n * k + m * k + 2 * m * n, int8_ops=2.0 * m * n * k)

    # ---- the operators, in the order of a layer -------------------------------------------------------------------

    def before_attention(self) -> list[Op]:
        s, ws, t = self.s, self.ws, self.tokens

        def norm(layer: Layer) -> None:
            ws.normed = self.k.norm(ws.delta, layer.gains[0], 1e-6, residual=ws.x)

        def down(layer: Layer) -> None:
            ws.down = self._gemm(ws.normed, layer.down)

        def prologue(layer: Layer) -> None:
            ws.q_normed = self.k.prologue(
                ws.down, layer.gains[2], layer.gains[3], self.cos_sin, self.order, self.slots, self.cache(layer),
                q_eps=1e-6, kv_eps=1e-6, int8=True,
            )  # fmt: skip

        def q_up(layer: Layer) -> None:
            ws.q = self._gemm(ws.q_normed, layer.q_up).view(t, s.heads, -1)

        inner = s.q_rank + s.latent
        return [
            Op("norm + quantise (attention)", norm, t * s.hidden * (2 * 3 + 1)),
            self._product(f"down {s.hidden}→{inner}", inner, s.hidden, down),
            Op("prologue: norms, turn, cache", prologue, t * inner * 4),
            self._product(f"query up {s.q_rank}→{s.queries}", s.queries, s.q_rank, q_up),
        ]

    def cache(self, layer: Layer) -> torch.Tensor:
        """This layer's blocks of the pool."""
        first = layer.kv_first + self.first_block
        return layer.kv[first : first + self.num_blocks]

    def after_attention(self) -> list[Op]:
        """From attention's result `ws.attended` [tokens, heads * v]."""
        s, ws, t = self.s, self.ws, self.tokens
        wide = s.heads * s.v

        def quantise(layer: Layer) -> None:
            ws.attended8 = self.k.quantise(ws.attended)

        def out(layer: Layer) -> None:
            ws.delta = self._gemm(ws.attended8, layer.out)

        return [
            Op("quantise attention's result", quantise, t * wide * 3),
            self._product(f"out {wide}→{s.hidden}", s.hidden, wide, out),
        ]

    def experts(self, *, dense: bool) -> list[Op]:
        """`dense`: the first layers' wide SwiGLU instead of routed experts."""
        s, ws, t, total = self.s, self.ws, self.tokens, self.total
        tile = self.k.choose_grouped(max(1, total // self.num_local), 2 * s.width, s.hidden, self.num_local)
        tile = self._within(tile)

        def norm(layer: Layer) -> None:
            ws.normed = self.k.norm(ws.delta, layer.gains[1], 1e-6, residual=ws.x)

        def gate(layer: Layer) -> None:
            logits = F.linear(F.rms_norm(ws.x, (s.hidden,), layer.gains[1], 1e-6), layer.gate).float()
            ws.chosen = self.k.route(logits, layer.gate_bias, PLAN)

        def own(layer: Layer) -> None:
            gated = self.k.swiglu(self._gemm(ws.normed, layer.gate_up))
            ws.own = self._gemm(gated, layer.shared_down)

        def routed(layer: Layer) -> None:
            up, back = layer.experts_gate_up, layer.experts_down
            n = self.num_local
            plan = self.k.make_plan(self.starts, self.counts, total, tile)
            wide = self.k.grouped(ws.arrivals, ws.arrival_scales, up.q[:n], up.scale[:n], plan, arrived=self.arrived)
            gated = self.k.swiglu(wide)
            ws.returned = self.k.grouped(*gated, back.q[:n], back.scale[:n], plan, arrived=self.arrived)

        def add(layer: Layer) -> None:
            ws.delta = ws.own + ws.combined if self.own_shared else ws.combined

        width = s.dense_width if dense else s.width
        ops = [Op("norm + quantise (experts)", norm, t * s.hidden * (2 * 3 + 1))]
        swiglu = Op(
            "dense SwiGLU" if dense else "shared expert", own,
            3 * width * s.hidden + t * (s.hidden * 3 + width * 6), int8_ops=6.0 * t * width * s.hidden,
        )  # fmt: skip
        if dense:
            return [*ops, swiglu, Op("take", lambda layer: setattr(ws, "delta", ws.own), 0)]
        ops.append(Op("gate, choose", gate, t * s.hidden * 4 + 512 * s.hidden, bf16_ops=512.0 * t * s.hidden))
        if self.own_shared:
            ops.append(swiglu)
        weights, rows = 3 * s.width * s.hidden * self.num_local, total * (s.hidden * 3 + s.width * 6)
        ops.append(Op("experts of this rank", routed, weights + rows, int8_ops=6.0 * total * s.width * s.hidden))
        return [*ops, Op("add", add, t * s.hidden * 6 if self.own_shared else 0)]


class Decode(Operators):
    def __init__(self, s: Shape, requests: int, queries: int, kv_tokens: int, rows: Sequence[int], **kw: Any) -> None:
        super().__init__(s, requests * queries, rows, **kw)
        from tripool.kernels.triton.mla_decode import mla_decode

        self.mla, self.requests, self.queries, self.kv_tokens = mla_decode, requests, queries, kv_tokens
        blocks = -(-kv_tokens // 64)
        self.num_blocks = requests * blocks
        order = torch.randperm(self.num_blocks, device=self.device).to(torch.int32)
        self.table = order.view(requests, blocks)
        self.lengths = torch.full((requests,), kv_tokens, dtype=torch.int32, device=self.device)
        position = kv_tokens - queries + torch.arange(queries, device=self.device)
        self.slots = (self.table[:, position // 64].long() * 64 + position % 64).flatten()
        self.ws.q_latent = self._normal(requests, queries, s.heads, s.latent)

    def ops(self, *, dense: bool) -> list[Op]:
        s, ws, t = self.s, self.ws, self.tokens

        def absorb(layer: Layer) -> None:
            flat = ws.q_latent.view(t, s.heads, s.latent)
            self.k.rope(ws.q[..., s.nope :], self.cos_sin, self.order, flat[..., s.rank :])
            flat[..., : s.rank] = torch.bmm(ws.q[..., : s.nope].transpose(0, 1), layer.kv_up[:, : s.nope]).transpose(
                0, 1
            )

        def attend(layer: Layer) -> None:
            ws.found = self.mla(
                ws.q_latent, self.cache(layer), self.table, self.lengths, (s.nope + s.rope) ** -0.5, rank=s.rank
            )

        def values(layer: Layer) -> None:
            found = ws.found.view(t, s.heads, s.rank).transpose(0, 1)
            ws.attended = torch.bmm(found, layer.kv_up[:, s.nope :].mT).transpose(0, 1).reshape(t, -1)

        half = s.heads * s.rank * t
        context = self.requests * self.kv_tokens
        return [
            *self.before_attention(),
            Op("absorb", absorb, 2 * s.heads * s.nope * s.rank + t * s.heads * (s.nope + 2 * s.latent) * 2,
               bf16_ops=2.0 * half * s.nope),
            Op("mla_decode", attend, context * s.latent * 2 + t * s.heads * (s.latent + s.rank) * 2,
               bf16_ops=2.0 * self.queries * s.heads * context * (s.latent + s.rank)),
            Op("values", values, 2 * s.heads * s.v * s.rank + t * s.heads * (s.rank + 2 * s.v) * 2,
               bf16_ops=2.0 * half * s.v),
            *self.after_attention(),
            *self.experts(dense=dense),
        ]  # fmt: skip


class Prefill(Operators):
    def __init__(self, s: Shape, prompts: int, prompt_tokens: int, rows: Sequence[int], **kw: Any) -> None:
        super().__init__(s, prompts * prompt_tokens, rows, **kw)
        self.prompts, self.prompt_tokens = prompts, prompt_tokens
        self.pad_values, self.backend = True, ""
        """Whether values are padded to the keys' width, and which of torch's kernels attends; the fastest is chosen."""

    def ops(self, *, dense: bool) -> list[Op]:
        s, ws, t = self.s, self.ws, self.tokens

        def expand(layer: Layer) -> None:
            ws.latent = self.cache(layer).view(-1, s.latent)[:t]
            ws.expanded = self._gemm(self.k.quantise(ws.latent[:, : s.rank]), layer.kv_up8).view(t, s.heads, -1)

        def spread(layer: Layer) -> None:
            self.k.rope(ws.q[..., s.nope :], self.cos_sin, self.order, ws.q[..., s.nope :])
            turned = ws.latent[:, None, s.rank :].expand(-1, s.heads, -1)
            ws.keys = torch.cat((ws.expanded[..., : s.nope], turned), dim=2)
            values = ws.expanded[..., s.nope :]
            ws.values = F.pad(values, (0, s.nope + s.rope - s.v)) if self.pad_values else values

        def attend(layer: Layer) -> None:
            ws.attended = self.attend(ws.q, ws.keys, ws.values)[..., : s.v].reshape(t, -1)

        wide = s.heads * (s.nope + s.v)
        pairs = self.prompts * s.heads * self.prompt_tokens**2 / 2
        return [
            *self.before_attention(),
            self._product(f"expand {s.rank}→{wide}", wide, s.rank, expand),
            Op("keys and values in place", spread, t * s.heads * (3 * (s.nope + s.rope) + 2 * s.v) * 2),
            Op("causal attention", attend, t * s.heads * (2 * (s.nope + s.rope) + 2 * s.v) * 2,
               bf16_ops=2.0 * pairs * (s.nope + s.rope + s.v)),
            *self.after_attention(),
            *self.experts(dense=dense),
        ]  # fmt: skip

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        heads_first = [one.unflatten(0, (self.prompts, -1)).transpose(1, 2) for one in (q, keys, values)]
        scale = (self.s.nope + self.s.rope) ** -0.5
        allowed = sdpa_kernel(getattr(SDPBackend, self.backend)) if self.backend else nullcontext()
        with allowed:
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)
