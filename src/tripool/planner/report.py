"""Plans and verdicts as plain data, for JSON, tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tripool.planner.cost import Setup, StepCost
from tripool.planner.hardware import Hardware
from tripool.planner.rows import Band, Compared, Verdict, band_of, unseen
from tripool.planner.rows.calibrating import LeftOut
from tripool.planner.search import Cell, Deployment, Plan, PlanGoal

BOUND_WORDS = {
    "prefill": "prefill carries least: more prefill chips, or more of the prompts cached",
    "decode": "decode carries least: more decode chips",
    "transfer": "the transfer plane carries least: more links, or fewer bytes of KV per token",
}
STOPPED_WORDS = {
    "tpot": "a larger batch would break the TPOT",
    "memory": "a larger batch's KV does not fit in memory",
    "ttft": "a larger batch would break the TTFT",
}


def plan_data(goal: PlanGoal, plan: Plan) -> dict[str, Any]:
    return {
        "model": goal.model.name,
        "hardware": goal.hardware.name,
        "decode_hardware": goal.kinds[-1].name,
        "chips": goal.chips,
        "input_tokens": goal.input_tokens,
        "output_tokens": goal.output_tokens,
        "cached_share": goal.cached_share,
        "ttft_ms": goal.ttft_s * 1e3,
        "tpot_ms": goal.tpot_s * 1e3,
        "error": _band_data(goal, plan.deployments[0]),
        "considered": plan.num_considered,
        "compared": compared_with_shared(plan),
        "deployments": [deployment_data(goal, found) for found in plan.deployments],
        "front": [
            {
                "tokens_per_s_per_user": point.tokens_per_s_per_user,
                "tokens_per_s_per_chip": point.tokens_per_s_per_chip,
                "batch_per_rank": point.batch,
                "chips": point.chips,
                **_setup(point.setup),
            }
            for point in plan.front
        ],
    }


def deployment_data(goal: PlanGoal, found: Deployment) -> dict[str, Any]:
    """Totals; `cells` one by one, and beside them the pools of the first: most deployments have no other."""
    rate = found.requests_per_s * goal.output_tokens
    return {
        "requests_per_s": found.requests_per_s,
        "output_tokens_per_s": rate,
        "output_tokens_per_s_per_chip": rate / found.chips,
        "chips": found.chips,
        "spare_chips": found.spare_chips,
        "why": why(found.main),
        "levers": [asdict(lever) for lever in found.levers],
        "cost_per_million_output_tokens": found.cost_per_million,
        "currency": goal.money,
        "kwh_per_million_output_tokens": found.kwh_per_million,
        "watts": found.watts,
        "cache_gb": found.cache_bytes / 1e9,
        **_cell(found.main),
        "tpot_ms": found.tpot_s * 1e3,
        "ttft_ms": found.ttft_s * 1e3,
        "cells": [{"requests_per_s": cell.requests_per_s, "chips": cell.chips, **_cell(cell)} for cell in found.cells],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    prefill, decode = cell.prefill, cell.decode
    return {
        "shared": cell.shared,
        "bound": cell.bound,
        "tpot_ms": cell.tpot_s * 1e3,
        "ttft_ms": cell.ttft_s * 1e3,
        "transfer_share": cell.transfer_share,
        "prefill": {
            "instances": cell.prefill_instances,
            "chips_per_instance": prefill.chips,
            "tokens_per_rank": prefill.tokens,
            "batch_ms": prefill.batch_s * 1e3,
            "tokens_per_s_per_chip": prefill.tokens_per_s_per_chip,
            "share_of_hits_read": prefill.read_share,
            "parts_ms": parts_ms(prefill.step),
            **_setup(prefill.setup),
        },
        "decode": {
            "instances": cell.decode_instances,
            "chips_per_instance": decode.chips,
            "batch_per_rank": decode.batch,
            "step_ms": decode.step.seconds * 1e3,
            "tokens_per_s_per_chip": decode.tokens_per_s_per_chip,
            "hottest_rank": decode.step.hot,
            "parts_ms": parts_ms(decode.step),
            **_setup(decode.setup),
        },
    }


def why(cell: Cell) -> str:
    """The binding limit, in words."""
    pool = "decode" if cell.bound != "prefill" else "prefill"
    stopped = cell.decode.stopped_by if pool == "decode" else cell.prefill.stopped_by
    words = "" if cell.bound == "transfer" else f"; in a {pool} instance {STOPPED_WORDS[stopped]}"
    if cell.shared:
        return f"one pool takes turns, most of its time in {pool}; {STOPPED_WORDS[stopped]}"
    return BOUND_WORDS[cell.bound] + words


def compared_with_shared(plan: Plan) -> str:
    """The best of separate pools beside the best of one shared pool, and of experts on ranks of their own."""
    shared, split, parted = plan.best_shared, plan.best_split, plan.best_parted
    apart = "" if parted is None else f"; experts on ranks of their own {parted.requests_per_s:,.3g}"
    if shared is None and split is not None and plan.is_mixed:
        return f"separate pools {split.requests_per_s:,.3g} requests/s; two kinds of hardware share no pool{apart}"
    if shared is None or split is None:
        missing = "one shared pool" if shared is None else "separate pools"
        return f"no deployment of {missing} meets the SLO on these chips{apart}"
    gain = split.requests_per_s / shared.requests_per_s - 1.0
    return (
        f"separate pools {split.requests_per_s:,.3g} requests/s, one shared pool {shared.requests_per_s:,.3g} "
        f"({gain:+.0%} by separating){apart}"
    )


def band_words(goal: PlanGoal, best: Deployment) -> str:
    """The band of the hardware's published rows, on each figure of the best deployment."""
    slower = {"TPOT ms": best.tpot_s * 1e3, "TTFT ms": best.ttft_s * 1e3}
    if best.cost_per_million:
        slower[f"{goal.money}/M out"] = best.cost_per_million
    if best.kwh_per_million:
        slower["kWh/M out"] = best.kwh_per_million
    faster = {
        "requests/s": best.requests_per_s, "out tok/s/chip": best.requests_per_s * goal.output_tokens / best.chips,
    }  # fmt: skip
    return _band(goal).beside(faster, slower)


def _band(goal: PlanGoal) -> Band:
    """The wider one of two kinds of hardware; none where one has no rows."""
    bands = [band_of(hardware, goal.model) for hardware in goal.kinds]
    return max(bands, key=lambda band: (not band.rows, band.within))


def sources_words(hardware: Hardware) -> str:
    """How many numbers of a description are not published anywhere."""
    assumed = sum(fact.kind == "assumed" for fact in hardware.facts.values())
    return (
        f"{assumed} of the {len(hardware.facts)} numbers that describe {hardware.title} are assumed, without a source"
    )


def economy_words(goal: PlanGoal, found: Deployment) -> str:
    """Price and energy per million output tokens of the chips in use, and the chips that are not."""
    price, energy = "price unknown: give --price", "energy unknown: the hardware's description has no power"
    if found.cost_per_million is not None:
        price = f"{found.cost_per_million:,.2f} {goal.money}"
    if found.kwh_per_million is not None and found.watts is not None:
        each = found.watts / found.chips
        energy = f"{found.kwh_per_million:,.2f} kWh ({found.watts / 1e3:,.1f} kW at {each:,.0f} W per chip)"
    spare = f"; {found.spare_chips} chips spare, not counted" if found.spare_chips else ""
    return f"per million output tokens: {price}, {energy}; {found.chips} chips used{spare}"


def parts_ms(step: StepCost) -> dict[str, float]:
    """Time of each operator of a step by itself, the longest first."""
    named = sorted(step.parts, key=lambda part: -part[1])
    return {name: seconds * 1e3 for name, seconds in named if seconds > 0}


def _setup(setup: Setup) -> dict[str, Any]:
    return {
        "ep": setup.ep,
        "tp": setup.tp,
        "expert_ranks": setup.expert_ranks,
        "precision": setup.precision,
        "microbatches": setup.microbatches,
        "mtp_drafts": setup.drafts,
        "mtp_accept": setup.accept,
    }


def _band_data(goal: PlanGoal, best: Deployment) -> dict[str, Any]:
    """How far the hardware's published rows are from their predictions, and the limits of the best plan's figures."""
    band = _band(goal)
    return {
        "family": band.family,
        "rows": band.rows,
        "words": band.words(),
        "requests_per_s": band.around(best.requests_per_s),
        "tpot_ms": band.around_time(best.tpot_s * 1e3),
        "ttft_ms": band.around_time(best.ttft_s * 1e3),
        "cost_per_million": band.around_time(best.cost_per_million) if best.cost_per_million else None,
        "kwh_per_million": band.around_time(best.kwh_per_million) if best.kwh_per_million else None,
        "sources": "; ".join(map(sources_words, goal.kinds)),
    }


def validation_data(
    compared: Sequence[Compared], found: Sequence[Verdict], left_out: Sequence[LeftOut] = ()
) -> dict[str, Any]:
    rows = [_row_data(each) for each in compared]
    families = [{**asdict(each), "ok": each.ok} for each in found]
    without = [
        {"family": each.family, "fixed_by": each.fixed_by, "rows": len(each.errors), "median": each.median}
        for each in left_out
    ]
    return {"rows": rows, "families": families, "left_out": without, "ok": all(each.ok for each in found)}


def unseen_data(compared: Sequence[Compared]) -> dict[str, Any]:
    found = unseen(compared)
    return {"summary": asdict(found) if found else None, "rows": [_row_data(each) for each in compared]}


def _row_data(compared: Compared) -> dict[str, Any]:
    row, prediction = compared.prediction.row, compared.prediction
    return {
        "system": row.system,
        "hardware": prediction.hardware.name if prediction.hardware else row.hardware,
        "phase": row.phase,
        "ep": row.ep,
        "batch_per_device": row.batch,
        "context": row.context,
        "published": prediction.published,
        "predicted": prediction.predicted,
        "error": prediction.error,
        "role": compared.role,
        "reason": prediction.reason,
        "source": row.source,
    }
