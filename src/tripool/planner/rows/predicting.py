"""Predicts published rows: the hardware, model, software and memory of each, and why a row cannot be predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

from tripool.planner.cost import DecodeModel, PrefillModel, Setup, StepCost, footprint
from tripool.planner.cost.setup import Routing
from tripool.planner.facts import Facts
from tripool.planner.hardware import INT4, Hardware
from tripool.planner.models import ModelShape
from tripool.planner.rows.names import hardware_named, model_named
from tripool.planner.rows.reading import Row


@dataclass(frozen=True, slots=True)
class Prediction:
    row: Row
    hardware: Hardware | None
    """None: no description of this hardware."""
    predicted: float | None
    """Tokens per second and chip."""
    step: StepCost | None
    microbatches: int
    reason: str = ""
    """Why there is no prediction, or none to compare."""

    @property
    def published(self) -> float | None:
        """Tokens per second and chip."""
        if self.row.published is None or self.hardware is None:
            return self.row.published
        return self.row.published * (self.hardware.ranks if self.row.published_per_die else 1)

    @property
    def error(self) -> float | None:
        """Signed: above 0 means faster than published."""
        if self.predicted is None or self.published is None:
            return None
        return self.predicted / self.published - 1.0


def hardware_of(row: Row) -> Hardware | None:
    return hardware_named(row.hardware)


def model_of(row: Row, default: ModelShape) -> ModelShape | None:
    """The model that a row names, by its own config; `default` if its table is of one model; None if not known."""
    if row.model is None:
        return None
    return model_named(row.model) if row.model else default


Software = Mapping[str, Mapping[str, float]]
_SOFTWARE = re.compile(r"(\S+)(?: to ([\d.]+))?(?: (\S+))?")
"""Name of a section of `software.toml`: a system, the last of its versions, the hardware that it was measured on."""


@lru_cache(maxsize=1)
def named_software() -> dict[str, dict[str, float]]:
    """Constants of serving software, by its name, version and the hardware it was measured on."""
    facts = Facts(files("tripool.planner.rows").joinpath("software.toml").read_text("utf-8"), "software.toml")
    return {name: facts.table(name) for name in facts.sections()}


def served_by(row: Row, hardware: Hardware, software: Software | None = None) -> Hardware:
    """The hardware with the constants of the software that a row names."""
    for name, constants in (named_software() if software is None else software).items():
        known = _SOFTWARE.fullmatch(name)
        assert known is not None, name
        word, last, chip = known.groups()
        if chip not in (None, hardware.name) or not re.search(
            rf"\b{word}\b(?![ -]?[rv]\d)", row.software, re.IGNORECASE
        ):
            continue
        if last is None or _is_old(f"{row.software} {row.source}", word, last, constants["until"]):
            hardware = _with(hardware, constants, drafting=not row.simulated)
    return hardware


def _is_old(words: str, software: str, last: str, until: float) -> bool:
    """Up to version `last` of a software, by the version that a row states, or else by its date (year and month); what
    states neither is new.
    """
    number = rf"\b{software}[ -]v?(\d+(?:\.\d+)+)(?:\.post(\d+))?"
    if found := re.search(number, words, re.IGNORECASE):
        return (*map(int, found[1].split(".")), int(found[2] or 0)) <= (*map(int, last.split(".")), 0)
    if dated := re.search(r"\b(20\d\d)-(\d\d)\b", words):
        return int(dated[1] + dated[2]) < until
    if arxiv := re.search(r"arXiv:(\d\d)(\d\d)\.\d", words, re.IGNORECASE):
        return 2000_00 + int(arxiv[1] + arxiv[2]) < until
    return False


_TIMES = ("agree", "draft", "experts_bf16", "experts_split", "host", "latent", "latent_split")
"""Constants in microseconds that software may replace."""


def _with(hardware: Hardware, constants: Mapping[str, float], *, drafting: bool) -> Hardware:
    times = {f"{name}_s": constants[f"{name}_us"] * 1e-6 for name in _TIMES if f"{name}_us" in constants}
    if not drafting:
        times.pop("draft_s", None)
    if "latent_s" in times:  # which is a part of a layer's
        times["layer_s"] = hardware.layer_s + times["latent_s"] - hardware.latent_s
    stack = constants.get("prefill_stack", hardware.prefill_stack)
    return replace(hardware, prefill_stack=stack, **times)  # type: ignore[arg-type]


def predict(
    row: Row, model: ModelShape, *, hardware: Mapping[str, Hardware] | None = None, routing: Routing | None = None,
    software: Software | None = None,
) -> Prediction:  # fmt: skip
    """The better of one and two microbatches where a row does not say which, as in a tuned system. `hardware` replaces
    descriptions by name, `software` all of its constants.
    """
    found, shape = hardware_of(row), model_of(row, model)
    why = _unknown(row, found, shape)
    if why or found is None or shape is None:
        return Prediction(row, found, None, None, 1, why)
    found = served_by(row, (hardware or {}).get(found.name, found), software)
    best: Prediction | None = None
    counts = (1, 2) if shape.moe is not None and not _split(row) else (1,)
    counts = (2,) if row.expert_ranks else counts
    for microbatches in (row.microbatches,) if row.microbatches in counts else counts:
        tried = _predict(row, found, shape, microbatches or 1, routing)
        if best is None or (tried.predicted or 0.0) > (best.predicted or 0.0):
            best = tried
    assert best is not None
    return best


def _unknown(row: Row, hardware: Hardware | None, model: ModelShape | None) -> str:
    """What a row does not state, or what no description covers; empty if it can be predicted."""
    if hardware is None:
        return "no description of this hardware"
    if row.model is None:
        return "model not stated"
    if model is None:
        return f"no description of {row.model}"
    if row.unread:
        return row.unread
    if not row.precision:
        return "precision not stated, or not known"
    if not hardware.supports(_precision(row, hardware)):
        return f"{row.precision} is not a precision of this hardware"
    if not row.batch:
        return "batch not stated"
    if not row.context:
        return "context not stated"
    if row.phase == "decode" and row.drafts is None and model.mtp_layers:
        return "MTP not stated"
    if row.drafts and not model.mtp_layers:
        return "this model has no layer that drafts, and what drafts is not described"
    if row.drafts and row.drafts > 1 and row.accept is None:
        return "accepted length of several drafts not stated"
    if row.ep is None and row.tp is None and row.chips is None:
        return "number of devices not stated"
    if row.ep is None and row.tp is None and (row.chips or 1) * hardware.ranks > 1:
        return "neither EP nor TP stated"
    if row.ep and row.tp and row.ep % row.tp:
        return f"TP{row.tp} and EP{row.ep} together are not modelled"
    if row.tp and row.tp > hardware.domain_ranks:
        return "tensor parallelism across nodes: no published latency of such reductions"
    if row.colocated and not row.answer:
        return "length of answers not stated, between which prompts are computed"
    if model.attention.index_topk and not hardware.sparse_published:
        return "no published kernel of sparse attention on this hardware"
    return ""


def _precision(row: Row, hardware: Hardware) -> str:
    assert row.precision is not None
    if row.precision == "w8a8":
        return hardware.eight_bit
    if row.precision == "mxfp4":
        return "fp4" if hardware.supports("fp4") else INT4
    return row.precision


def _split(row: Row) -> bool:
    """Experts split over a tensor-parallel group: a TP degree, and no EP."""
    return row.tp is not None and row.tp > 1 and row.ep is None


def _setup(row: Row, hardware: Hardware, model: ModelShape, microbatches: int) -> Setup:
    accept = model.mtp_accept if row.accept is None else row.accept
    drafts = (row.drafts or 0) if row.phase == "decode" else 0
    tp = row.tp or 1
    ranks = tp if _split(row) or model.moe is None else row.ep or (row.chips or 1) * hardware.ranks
    if model.moe is None and row.tp is None:
        tp = ranks = (row.chips or 1) * hardware.ranks
    return Setup(
        ep=ranks, tp=tp, precision=_precision(row, hardware), microbatches=microbatches, drafts=drafts,
        accept=accept if drafts else 0.0, balance=row.balance, kv_element_bytes=1.0 if row.eight_bit_kv else 2.0,
        attention_8bit=row.eight_bit_attention, split_experts=_split(row) and model.moe is not None,
        expert_ranks=row.expert_ranks, rest=row.rest,
    )  # fmt: skip


def _predict(row: Row, hardware: Hardware, model: ModelShape, microbatches: int, routing: Routing | None) -> Prediction:
    assert row.batch is not None and row.context is not None
    setup = _setup(row, hardware, model, microbatches)
    per_rank = row.batch if row.batch_per_die else row.batch / hardware.ranks
    if row.phase == "decode":
        decode = DecodeModel(hardware, model, setup, routing)
        step = decode.step(per_rank, row.context)
        token_s = step.seconds / setup.tokens_per_step
        if row.colocated:
            token_s += _prompts_s(row, decode, per_rank)
        rate = per_rank * hardware.ranks * setup.attention_ranks / setup.ep / token_s
    else:
        prefill = PrefillModel(hardware, model, setup, routing)
        step = prefill.step(per_rank, row.context)
        rate = per_rank * hardware.ranks / step.seconds
    why = _no_room(hardware, model, setup, per_rank, row)
    if row.published is None:
        why = why or row.unpublished or "no rate published"
    return Prediction(row, hardware, rate, step, microbatches, why)


def _prompts_s(row: Row, decode: DecodeModel, per_rank: float) -> float:
    """What an answer's token waits for prompts that the same ranks compute: each of the batch brings one. Those that
    come during one step are computed together.
    """
    assert row.prompt and row.answer
    plain = replace(decode.setup, drafts=0, accept=0.0, microbatches=1)
    prefill = PrefillModel(decode.hardware, decode.model, plain, decode.routing)
    prompts = per_rank * plain.ep / row.answer
    together = max(1.0, prompts)
    return prompts / together * prefill.step(together * row.prompt / plain.ep, row.prompt).seconds


def _no_room(hardware: Hardware, model: ModelShape, setup: Setup, per_rank: float, row: Row) -> str:
    """What is missing if a row's batch does not fit beside the weights, in all of the memory."""
    assert row.context is not None
    room = footprint(replace(hardware, hbm_usable=1.0), model, setup)
    requests = per_rank if row.phase == "decode" else per_rank / row.context
    needed = room.weights + requests * (room.kv_per_token * row.context + room.state)
    if needed <= room.available:
        return ""
    return f"does not fit: {needed / 1e9:,.0f} GB of {room.available / 1e9:,.0f} GB a rank"
