"""Hardware as data: one type of chip, its networks and prices, read from TOML with a source for each number.

Rates are per rank, a die of a multi-die chip: what runs one copy of attention and holds experts. Published tables count
chips; `Hardware.ranks` converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

from tripool.planner.checks import check_hardware
from tripool.planner.errors import BadDescription
from tripool.planner.facts import Fact, Facts

PlaneKind = Literal["memory", "transfer", "service"]
PLANE_KINDS = ("memory", "transfer", "service")
PRECISIONS = ("fp4", "fp8", "int8", "bf16")
INT4 = "int4"
"""Weights of 4 bits that are computed with in BF16, as every hardware can: INT4, and MXFP4 where there is no FP4."""
WEIGHT_BYTES = {"fp4": 0.5625, INT4: 0.5625, "fp8": 1.0, "int8": 1.0, "bf16": 2.0}
"""NVFP4 has an 8-bit scale for each 16 weights, INT4 a 16-bit one for each 32."""
_SPARSE = 410 / 660  # sparse over dense MLA decoding on H800, in TFLOPS: FlashMLA's README


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A network that a chip is attached to."""

    name: str
    kind: PlaneKind
    gb_s: float
    """One way, per chip, as built."""
    share: float
    """Share available to applications."""
    latency_us: float
    domain_chips: int
    """Chips that reach each other over it."""
    paths: int = 1
    multi_path: bool = True
    """Whether one flow is spread over all paths."""

    @property
    def bytes_per_s(self) -> float:
        """Rate of one chip, one way, with many flows."""
        return self.gb_s * 1e9 * self.share

    @property
    def flow_bytes_per_s(self) -> float:
        """Rate of a single flow."""
        return self.bytes_per_s if self.multi_path else self.bytes_per_s / self.paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Dispatch and combine of expert parallelism."""

    fixed_us: float
    per_peer_us: float
    token_us: float
    """Time of the sender's cores per dispatched token: routing, quantisation, addresses."""
    prefill_core_share: float
    """Share of the cores used by communication while it overlaps with prefill compute."""
    decode_exposed: float
    """Share of the transfer time that two microbatches cannot hide: it takes cores and bandwidth."""
    prefill_exposed: float
    near_us: float
    """`fixed_us` where all ranks are on one memory plane."""
    decode_gb_s: float = float("inf")
    """Rate of the low-latency kernels over the memory plane, per chip; they do not reach a fast plane's own."""
    reduce_gb_s: float = float("inf")
    """The same of all-reduces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    name: str
    title: str
    family: str
    """Name in published tables."""
    ranks: int
    """Per chip."""
    node_chips: int
    flops: Mapping[str, float]
    """Per rank and precision, per second."""
    hbm_bytes: float
    hbm_usable: float
    hbm_bytes_per_s: float
    gemm_shares: Mapping[str, float]
    """Share of a precision's peak that large GEMMs reach."""
    grouped_shares: Mapping[str, float]
    """The same of a decode step's grouped GEMMs over experts."""
    split_shares: Mapping[str, float]
    """The same of experts that are split over a tensor-parallel group."""
    memory_share: float
    grouped_memory_shares: Mapping[str, float]
    """Share of the memory bandwidth at which experts' weights of a precision are read."""
    attention_compute_share: float
    attention_memory_share: float
    attention_8bit_share: float
    """Share of the 8-bit peak that attention over an 8-bit cache reaches; 0: it computes in BF16."""
    prefill_attention_share: float
    prefill_attention_8bit_share: float
    attention_sparse_share: float
    """Share of the BF16 peak that attention over chosen tokens reaches."""
    gemm_rows: float
    """Rows that a grouped GEMM loses to tiling and filling its pipeline, per expert."""
    gemm_tile: float
    """Least number of rows that a grouped GEMM computes per expert."""
    split_rows: float
    """`gemm_rows` and `gemm_tile` where experts are split."""
    split_tile: float
    layer_s: float
    """Of a layer and microbatch beside its operators' bytes and operations: launches, ramps, small kernels."""
    dense_layer_s: float
    """The same of a layer without experts: eight kernels, of which attention takes as long as four others."""
    step_s: float
    prefill_stack: float
    """A prefill layer's compute time over the sum of its operators at their own efficiencies."""
    buffers_bytes: float
    exchange: Exchange
    planes: tuple[Plane, ...]
    """One of each kind, in the order of `PLANE_KINDS`."""
    cache_bytes_per_s: Mapping[str, float]
    """Per chip, reading cached KV over the memory and over the service plane."""
    price_per_hour: float | None
    """None: unknown."""
    currency: str
    watts: float | None
    """Per chip, with its share of the machine around it. None: unknown."""
    agree_s: float = 0.0
    """Of a decode step before which several ranks with requests of their own agree on it."""
    latent_s: float = 0.0
    """Part of `layer_s` that latent attention takes; 0: not known apart, other attention takes as long."""
    latent_split_s: float = 0.0
    """The same of latent attention whose heads are split over a tensor-parallel group."""
    index_s: float = 0.0
    """What the indexer of sparse attention adds to a layer; 0: not known, counted by its kernels."""
    experts_s: float = 0.0
    """Part of `layer_s` that 8-bit experts take beside their weights."""
    experts_fp4_s: float = 0.0
    """The same of 4-bit experts, which one kernel computes; 0: not known, as the others."""
    experts_bf16_s: float = 0.0
    experts_int4_s: float = 0.0
    experts_split_s: float = 0.0
    """The same of 8-bit experts that are split over a tensor-parallel group."""
    host_s: float = 0.0
    """Least time of a prefill layer: the host launches its kernels one by one, while decode steps are graphs."""
    draft_s: float = 0.0
    """Of a step that drafts, beside the drafts themselves."""
    facts: Mapping[str, Fact] = field(default_factory=dict, repr=False, compare=False, hash=False)

    def plane(self, kind: PlaneKind) -> Plane:
        return self.planes[PLANE_KINDS.index(kind)]

    @property
    def domain_ranks(self) -> int:
        return self.plane("memory").domain_chips * self.ranks

    def supports(self, precision: str) -> bool:
        return precision in self.flops

    @property
    def sparse_published(self) -> bool:
        """Whether attention over chosen tokens was measured, on this hardware or one with the same kernels."""
        return self.latent_s > 0 or "shares.attention_sparse" in self.facts

    @property
    def eight_bit(self) -> str:
        """The 8-bit precision of this hardware, or BF16."""
        return next((name for name in ("fp8", "int8") if name in self.flops), "bf16")


def parse_hardware(text: str, origin: str) -> Hardware:
    facts = Facts(text, origin)
    check_hardware(facts.tree, facts.error)
    ranks = facts.number("chip", "ranks", least=1)
    planes = tuple(_plane(facts, path, table) for path, table in facts.tables("planes"))
    if {plane.kind for plane in planes} != set(PLANE_KINDS):
        raise facts.error("planes", f"must hold one each of {', '.join(PLANE_KINDS)}")
    planes = tuple(sorted(planes, key=lambda plane: PLANE_KINDS.index(plane.kind)))
    flops = {name: tera * 1e12 / ranks for name, tera in facts.table("tflops").items()}
    if "bf16" not in flops or not flops.keys() <= set(PRECISIONS):
        raise facts.error("tflops", f"must hold bf16, and may hold {', '.join(PRECISIONS)}")
    flops[INT4] = flops["bf16"]
    number = facts.number
    gemm, memory, attention = (number("shares", key) for key in ("gemm", "memory", "attention_compute"))
    gemm_shares = {name: number("shares", f"gemm_{name}", default=gemm) for name in flops}
    gemm_shares[INT4] = number("shares", f"gemm_{INT4}", default=gemm_shares["bf16"])
    grouped = {name: number("shares", f"grouped_{name}", default=gemm_shares[name]) for name in flops if name != INT4}
    grouped[INT4] = number("shares", f"grouped_{INT4}", default=grouped["bf16"])
    grouped_memory = {name: number("shares", f"grouped_memory_{name}", default=memory) for name in flops}
    split = {name: number("shares", f"split_{name}", default=grouped[name]) for name in flops if name != INT4}
    split[INT4] = number("shares", f"split_{INT4}", default=split["bf16"])
    gemm_rows, gemm_tile = number("overheads", "gemm_rows"), number("overheads", "gemm_tile", default=0.0)
    eight_bit = number("shares", "attention_8bit", default=0.0)
    layer_us = number("overheads", "layer_us")
    return Hardware(
        name=facts.text("name"), title=facts.text("title"), family=facts.text("family"),
        currency=facts.text("currency"),
        ranks=int(ranks), node_chips=int(number("chip", "node_chips", least=1)), flops=flops, planes=planes,
        hbm_bytes=number("chip", "hbm_gb") * 1e9 / ranks,
        hbm_usable=number("chip", "hbm_usable"),
        hbm_bytes_per_s=number("chip", "hbm_tb_s") * 1e12 / ranks,
        gemm_shares=gemm_shares, grouped_shares=grouped, memory_share=memory, attention_compute_share=attention,
        grouped_memory_shares=grouped_memory,
        attention_memory_share=number("shares", "attention_memory"),
        attention_8bit_share=eight_bit,
        prefill_attention_share=number("shares", "prefill_attention", default=attention),
        prefill_attention_8bit_share=number("shares", "prefill_attention_8bit", default=eight_bit),
        attention_sparse_share=number("shares", "attention_sparse", default=attention * _SPARSE),
        gemm_rows=gemm_rows, gemm_tile=gemm_tile, split_shares=split,
        split_rows=number("overheads", "split_rows", default=gemm_rows),
        split_tile=number("overheads", "split_tile", default=gemm_tile),
        layer_s=layer_us * 1e-6, dense_layer_s=number("overheads", "dense_layer_us", default=layer_us) * 1e-6,
        step_s=number("overheads", "step_us") * 1e-6, agree_s=number("overheads", "agree_us", default=0.0) * 1e-6,
        latent_s=number("overheads", "latent_us", default=0.0) * 1e-6,
        latent_split_s=number("overheads", "latent_split_us", default=0.0) * 1e-6,
        host_s=number("overheads", "host_us", default=0.0) * 1e-6,
        index_s=number("overheads", "index_us", default=0.0) * 1e-6,
        experts_s=number("overheads", "experts_us", default=0.0) * 1e-6,
        experts_fp4_s=number("overheads", "experts_fp4_us", default=0.0) * 1e-6,
        experts_bf16_s=number("overheads", "experts_bf16_us", default=0.0) * 1e-6,
        experts_int4_s=number("overheads", "experts_int4_us", default=0.0) * 1e-6,
        experts_split_s=number("overheads", "experts_split_us", default=0.0) * 1e-6,
        prefill_stack=number("overheads", "prefill_stack", least=0.1),
        buffers_bytes=number("overheads", "buffers_gb") * 1e9 / ranks,
        exchange=_exchange(facts),
        cache_bytes_per_s={kind: number("cache", f"{kind}_gb_s") * 1e9 for kind in ("memory", "service")},
        price_per_hour=facts.optional("economy", "price_per_hour"), watts=facts.optional("economy", "watts"),
        facts=facts.read,
    )  # fmt: skip


def _exchange(facts: Facts) -> Exchange:
    names = ("fixed_us", "per_peer_us", "token_us", "prefill_core_share", "decode_exposed", "prefill_exposed")
    found = {name: facts.number("exchange", name) for name in names}
    near_us = facts.number("exchange", "near_us", default=found["fixed_us"])
    rates = {name: facts.number("exchange", name, default=float("inf")) for name in ("decode_gb_s", "reduce_gb_s")}
    return Exchange(**found, near_us=near_us, **rates)


def _plane(facts: Facts, path: str, table: Mapping[str, object]) -> Plane:
    name, kind, multi_path = table.get("name"), table.get("kind"), table.get("multi_path", True)
    if not isinstance(name, str) or kind not in PLANE_KINDS or not isinstance(multi_path, bool):
        raise facts.error(path, f"needs a name and a kind ({', '.join(PLANE_KINDS)}); multi_path is true or false")
    return Plane(
        name=name, kind=kind, multi_path=multi_path,  # type: ignore[arg-type]
        gb_s=facts.entry(path, table, "gb_s"),
        share=facts.entry(path, table, "share"),
        latency_us=facts.entry(path, table, "latency_us"),
        domain_chips=int(facts.entry(path, table, "domain_chips")),
        paths=int(facts.entry(path, table, "paths", 1)),
    )  # fmt: skip


def hardware_names() -> list[str]:
    here = files("tripool.planner.hardware")
    return sorted(entry.name.removesuffix(".toml") for entry in here.iterdir() if entry.name.endswith(".toml"))


def named_hardware(name: str) -> Hardware:
    known = name.lower()
    if known not in hardware_names():
        hint = f"known: {', '.join(hardware_names())}, this; or the path of a TOML file"
        raise BadDescription(f"no hardware called '{name}'", hint=hint)
    text = files("tripool.planner.hardware").joinpath(f"{known}.toml").read_text("utf-8")
    return parse_hardware(text, f"{known}.toml")
