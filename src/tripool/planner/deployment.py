"""Deployment file: a plan as TOML that `simulate` and `serve` read. Text in and out, no files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tripool.planner.checks import check_deployment
from tripool.planner.cost import Setup
from tripool.planner.errors import BadDescription
from tripool.planner.search import Cell, Deployment, PlanGoal

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    instances: int
    chips: int
    """Of one instance."""
    setup: Setup
    batch: int
    """Per rank: new tokens of a prefill batch, requests of a decode batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFile:
    model: str
    hardware: str
    decode_hardware: str
    """The same, but where decode has hardware of its own."""
    chips: int
    shared: bool
    prefill: Pool
    decode: Pool
    cache_gb: float
    ttft_ms: float
    tpot_ms: float
    input_tokens: float
    output_tokens: float
    requests_per_s: float
    """Predicted."""


def write_deployment(goal: PlanGoal, found: Deployment, cell: Cell | None = None) -> str:
    """Of one cell: the first, or another of `found`; with several, each has a file of its own."""
    cell = cell or found.main
    prefill, decode = cell.prefill, cell.decode
    share = cell.requests_per_s / found.requests_per_s
    cost = "" if found.cost_per_million is None else f"cost_per_million = {found.cost_per_million:.4g}\n"
    lines = [
        "# Made by `tripool plan`; the numbers under [expected] are predictions, the rest are settings.",
        f"version = {VERSION}", f'model = "{_plain(goal.model.name)}"', f'hardware = "{_plain(goal.hardware.name)}"',
        f"chips = {goal.chips if len(found.cells) == 1 else cell.chips}", f"shared = {str(cell.shared).lower()}", "",
        *_pool_lines("prefill", cell.prefill_instances, prefill.chips, prefill.setup, prefill.tokens),
        *_pool_lines("decode", cell.decode_instances, decode.chips, decode.setup, decode.batch)[:-1],
        *([f'hardware = "{_plain(goal.kinds[-1].name)}"'] if goal.decode_hardware else []), "",
        "[cache]", f"gb = {found.cache_bytes * share / 1e9:.1f}", "",
        "[slo]", f"ttft_ms = {goal.ttft_s * 1e3:g}", f"tpot_ms = {goal.tpot_s * 1e3:g}", "",
        "[workload]", f"input_tokens = {goal.input_tokens:g}", f"output_tokens = {goal.output_tokens:g}",
        f"cached_share = {goal.cached_share:g}", "",
        "[expected]", f"requests_per_s = {cell.requests_per_s:.4g}", f"ttft_ms = {cell.ttft_s * 1e3:.4g}",
        f"tpot_ms = {cell.tpot_s * 1e3:.4g}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n" + cost


def _pool_lines(name: str, instances: int, chips: int, setup: Setup, batch: int) -> list[str]:
    return [
        f"[{name}]", f"instances = {instances}", f"chips = {chips}", f"ep = {setup.ep}", f"tp = {setup.tp}",
        f'precision = "{setup.precision}"', f"microbatches = {setup.microbatches}", f"drafts = {setup.drafts}",
        f"accept = {setup.accept:g}", f"batch = {batch}",
        *([f"expert_ranks = {setup.expert_ranks}"] if setup.expert_ranks else []), "",
    ]  # fmt: skip


def _plain(name: str) -> str:
    return name.replace("\\", "/").replace('"', "'")


def read_deployment(text: str, origin: str) -> DeploymentFile:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadDescription(f"{origin} is not TOML: {error}", hint="`tripool plan --save` writes such files") from None
    if tree.get("version") != VERSION:
        raise BadDescription(f"{origin} has version {tree.get('version')!r}", hint=f"this is version {VERSION}")
    hint = "`tripool plan --save` writes such files"
    check_deployment(tree, lambda path, wrong: BadDescription(f"{origin}: '{path}' {wrong}", hint=hint))
    try:
        slo, expected, workload = tree["slo"], tree["expected"], tree["workload"]
        return DeploymentFile(
            model=str(tree["model"]), hardware=str(tree["hardware"]), chips=int(tree["chips"]),
            decode_hardware=str(tree["decode"].get("hardware", tree["hardware"])),
            shared=bool(tree["shared"]), prefill=_pool(tree["prefill"]), decode=_pool(tree["decode"]),
            cache_gb=float(tree["cache"]["gb"]), ttft_ms=float(slo["ttft_ms"]), tpot_ms=float(slo["tpot_ms"]),
            input_tokens=float(workload["input_tokens"]), output_tokens=float(workload["output_tokens"]),
            requests_per_s=float(expected["requests_per_s"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        missing = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error) or "cannot be read"
        raise BadDescription(f"{origin}: {missing}", hint=hint) from None


def _pool(table: Mapping[str, Any]) -> Pool:
    setup = Setup(
        ep=int(table["ep"]), tp=int(table["tp"]), precision=str(table["precision"]), drafts=int(table["drafts"]),
        microbatches=int(table["microbatches"]), accept=float(table["accept"]),
        expert_ranks=int(table.get("expert_ranks", 0)),
    )  # fmt: skip
    return Pool(instances=int(table["instances"]), chips=int(table["chips"]), setup=setup, batch=int(table["batch"]))
