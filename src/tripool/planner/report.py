"""Plans and verdicts as plain data, for JSON, tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tripool.planner.cost import Setup, StepCost
from tripool.planner.rows import Compared, Verdict, band_of
from tripool.planner.rows.calibrating import LeftOut
from tripool.planner.search import Deployment, Plan, PlanGoal

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
        "chips": goal.chips,
        "input_tokens": goal.input_tokens,
        "output_tokens": goal.output_tokens,
        "cached_share": goal.cached_share,
        "ttft_ms": goal.ttft_s * 1e3,
        "tpot_ms": goal.tpot_s * 1e3,
        "error": _band_data(goal, plan.deployments[0]),
        "considered": plan.num_considered,
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
    prefill, decode = found.prefill, found.decode
    return {
        "requests_per_s": found.requests_per_s,
        "output_tokens_per_s": found.requests_per_s * goal.output_tokens,
        "output_tokens_per_s_per_chip": found.requests_per_s * goal.output_tokens / goal.chips,
        "tpot_ms": found.tpot_s * 1e3,
        "ttft_ms": found.ttft_s * 1e3,
        "bound": found.bound,
        "why": why(found),
        "levers": [asdict(lever) for lever in found.levers],
        "cost_per_million_output_tokens": found.cost_per_million,
        "currency": goal.money,
        "watts": found.watts,
        "joules_per_output_token": found.watts / (found.requests_per_s * goal.output_tokens),
        "cache_gb": found.cache_bytes / 1e9,
        "transfer_share": found.transfer_share,
        "shared": found.shared,
        "spare_chips": found.spare_chips,
        "prefill": {
            "instances": found.prefill_instances,
            "chips_per_instance": prefill.chips,
            "tokens_per_rank": prefill.tokens,
            "batch_ms": prefill.batch_s * 1e3,
            "tokens_per_s_per_chip": prefill.tokens_per_s_per_chip,
            "parts_ms": parts_ms(prefill.step),
            **_setup(prefill.setup),
        },
        "decode": {
            "instances": found.decode_instances,
            "chips_per_instance": decode.chips,
            "batch_per_rank": decode.batch,
            "step_ms": decode.step.seconds * 1e3,
            "tokens_per_s_per_chip": decode.tokens_per_s_per_chip,
            "hottest_rank": decode.step.hot,
            "parts_ms": parts_ms(decode.step),
            **_setup(decode.setup),
        },
    }


def why(found: Deployment) -> str:
    """The binding limit, in words."""
    stopped = found.decode.stopped_by if found.bound != "prefill" else found.prefill.stopped_by
    pool = "decode" if found.bound != "prefill" else "prefill"
    words = "" if found.bound == "transfer" else f"; in a {pool} instance {STOPPED_WORDS[stopped]}"
    return BOUND_WORDS[found.bound] + words


def parts_ms(step: StepCost) -> dict[str, float]:
    """Time of each operator of a step by itself, the longest first."""
    named = sorted(step.parts, key=lambda part: -part[1])
    return {name: seconds * 1e3 for name, seconds in named if seconds > 0}


def _setup(setup: Setup) -> dict[str, Any]:
    return {
        "ep": setup.ep,
        "tp": setup.tp,
        "precision": setup.precision,
        "microbatches": setup.microbatches,
        "mtp_drafts": setup.drafts,
        "mtp_accept": setup.accept,
    }


def _band_data(goal: PlanGoal, best: Deployment) -> dict[str, Any]:
    """How far the hardware's published rows are from their predictions, and the limits of the best plan's figures."""
    band = band_of(goal.hardware)
    return {
        "family": band.family,
        "rows": band.rows,
        "words": band.words(),
        "requests_per_s": band.around(best.requests_per_s),
        "tpot_ms": band.around_time(best.tpot_s * 1e3),
        "ttft_ms": band.around_time(best.ttft_s * 1e3),
        "cost_per_million": band.around_time(best.cost_per_million) if best.cost_per_million else None,
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
