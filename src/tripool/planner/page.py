"""A plan as one self-contained HTML file: the best deployment, the others, and three plots."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from tripool.page import Plot, html_page, plots, table, tiles
from tripool.planner.cost import DecodeModel
from tripool.planner.report import compared_with_shared, economy_words, parts_ms, why
from tripool.planner.search import Cell, Deployment, Plan, PlanGoal
from tripool.planner.search.results import DecodePool, PrefillPool

_NUM_CURVE = 40
_OWN_STYLE = """
.ranked :is(th,td):nth-child(2),.ranked :is(th,td):last-child{text-align:left}.ranked td:nth-child(2){min-width:124px}
.ranked td{white-space:pre-line}
"""


def render_plan(goal: PlanGoal, plan: Plan) -> str:
    best = plan.deployments[0]
    title = f"{goal.model.name} on {goal.chips} x {goal.title}"
    asked = (
        f"{goal.input_tokens:,.0f} tokens in ({goal.cached_share:.0%} cached), {goal.output_tokens:,.0f} out · "
        f"first token within {goal.ttft_s * 1e3:,.0f} ms, then {goal.tpot_s * 1e3:g} ms per token · "
        f"{plan.num_considered:,} combinations considered"
    )
    levers = "".join(f"<p>{escape(lever.name)}: {lever.gain:+.1%}</p>" for lever in best.levers if lever.gain >= 0.005)
    body = (
        f"<h1>{escape(title)}</h1><p>{escape(asked)}</p>{tiles(_tiles(goal, best))}"
        f"<h2>What binds</h2><p>{escape(why(best.main))}.</p>"
        f"<p>{escape(compared_with_shared(plan))}.</p><p>{escape(economy_words(goal, best))}.</p>"
        f"<h2>What would lift it</h2>{levers or '<p>Nothing tried moves it by half a per cent.</p>'}"
        f"<h2>Deployments, best first</h2>{_ranked(goal, plan)}"
        f"<h2>Plots</h2>{plots(plot.render() for plot in _plots(goal, plan))}"
        f"<h2>Where a step's time goes, milliseconds</h2>{_parts(best)}"
        "<p>Predictions of a cost model; `tripool plan --validate` prints its errors against published results.</p>"
    )
    return html_page(f"tripool plan: {title}", body, _OWN_STYLE)


def _tiles(goal: PlanGoal, best: Deployment) -> Iterator[tuple[str, str]]:
    rate = best.requests_per_s * goal.output_tokens
    yield "requests per second", rate_words(best.requests_per_s)
    yield "output tokens per second and chip", f"{rate / best.chips:,.0f}"
    yield "time per output token", f"{best.tpot_s * 1e3:.1f} ms"
    yield "time to first token", f"{best.ttft_s * 1e3:,.0f} ms"
    yield "cost per million output tokens", f"{number(best.cost_per_million)} {goal.money}"
    yield "energy per million output tokens", f"{number(best.kwh_per_million)} kWh"
    yield "prefill", pool_words(best, "prefill")
    yield "decode", pool_words(best, "decode")
    yield "cache pool", f"{best.cache_bytes / 1e9:,.0f} GB keep contexts for {goal.keep_s / 60:g} min"
    yield "chips in use", f"{best.chips}, {best.spare_chips} spare"


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.2f}"


def rate_words(per_s: float) -> str:
    return f"{per_s:,.1f}" if per_s >= 10 else f"{per_s:.3g}"


def pool_words(found: Deployment, which: str) -> str:
    """Of each cell, one line."""
    return "\n".join(_cell_words(cell, which) for cell in found.cells)


def _cell_words(cell: Cell, which: str) -> str:
    pool: PrefillPool | DecodePool = cell.prefill
    instances, batch = cell.prefill_instances, f"{cell.prefill.tokens:,} tokens a rank"
    if which == "decode":
        pool, instances, batch = cell.decode, cell.decode_instances, f"{cell.decode.batch:,} requests a rank"
    setup = pool.setup
    extras = [f"EP{setup.ep}", f"TP{setup.tp}", setup.precision, batch]
    if setup.expert_ranks:
        extras[:2] = [f"{setup.attention_ranks} ranks of attention, {setup.expert_ranks} of experts"]
    extras += ["two microbatches"] if setup.microbatches == 2 else []
    extras += ["MTP"] if pool.setup.drafts else []
    extras += ["shared"] if cell.shared else []
    return f"{instances} x {pool.chips} chips: {', '.join(extras)}"


def ranked_heads(goal: PlanGoal) -> list[str]:
    """Columns of the ranked deployments after their pools."""
    rates = ["requests/s", "out tok/s/chip", "TPOT ms", "TTFT ms"]
    return [*rates, f"{goal.money}/M out", "kWh/M out", "spare", "binds"]


def _ranked(goal: PlanGoal, plan: Plan) -> str:
    rows = [deployment_cells(goal, found) for found in plan.deployments]
    return f'<div class="ranked">{table(["prefill", "decode", *ranked_heads(goal)], rows)}</div>'


def deployment_cells(goal: PlanGoal, found: Deployment) -> list[str]:
    """Both pools, and a text for each of `ranked_heads`."""
    return [
        pool_words(found, "prefill"), pool_words(found, "decode"), rate_words(found.requests_per_s),
        f"{found.requests_per_s * goal.output_tokens / found.chips:,.0f}", f"{found.tpot_s * 1e3:.1f}",
        f"{found.ttft_s * 1e3:,.0f}", number(found.cost_per_million), number(found.kwh_per_million),
        str(found.spare_chips), found.main.bound,
    ]  # fmt: skip


def _parts(best: Deployment) -> str:
    prefill, decode = parts_ms(best.main.prefill.step), parts_ms(best.main.decode.step)
    names = dict.fromkeys((*decode, *prefill))
    rows = [[name, f"{decode.get(name, 0.0):,.2f}", f"{prefill.get(name, 0.0):,.2f}"] for name in names]
    steps = best.main.decode.step, best.main.prefill.step
    hidden = ["hidden by overlap", *(f"-{step.hidden_s * 1e3:,.2f}" for step in steps)]
    total = ["step", *(f"{step.seconds * 1e3:,.2f}" for step in steps)]
    return table(["operator", "decode", "prefill"], [*rows, hidden, total])


def _plots(goal: PlanGoal, plan: Plan) -> Iterator[Plot]:
    fastest = max(point.tokens_per_s_per_user for point in plan.front)
    most = max(point.tokens_per_s_per_chip for point in plan.front)
    title = "Decode: speed for a user against throughput"
    front = Plot(title, "tokens per second, one user", fastest, most, "per chip")
    front.line(((point.tokens_per_s_per_user, point.tokens_per_s_per_chip) for point in plan.front), "one")
    for point in plan.front:
        user, chip, setup = point.tokens_per_s_per_user, point.tokens_per_s_per_chip, point.setup
        text = f"{user:.1f} tok/s a user, {chip:,.0f} a chip: EP{setup.ep} TP{setup.tp}, {point.batch} a rank, "
        front.points([(user, chip, text + setup.precision)], "one")
    front.rule(1.0 / goal.tpot_s, f"{goal.tpot_s * 1e3:g} ms")
    yield front
    yield from _by_batch(goal, plan.deployments[0].main)


def _by_batch(goal: PlanGoal, best: Cell) -> Iterator[Plot]:
    model = DecodeModel(goal.of_decode.hardware, goal.model, best.decode.setup)
    most = max(best.decode.batch * 2, 8)
    sizes = sorted({max(1, round(most * index / _NUM_CURVE)) for index in range(1, _NUM_CURVE + 1)})
    steps = [(size, model.tpot_s(size, goal.mean_context)) for size in sizes]
    tpot = Plot("Best deployment: time per token by batch", "requests per rank", most, steps[-1][1] * 1e3, "ms")
    tpot.points(((size, s * 1e3, f"{size} requests: {s * 1e3:.1f} ms") for size, s in steps), "two")
    tpot.level(goal.tpot_s * 1e3, f"limit {goal.tpot_s * 1e3:g}")
    tpot.rule(best.decode.batch, f"batch {best.decode.batch}")
    yield tpot
    rates = [(size, model.tokens_per_s_per_chip(size, goal.mean_context)) for size, _ in steps]
    rate = Plot("Best deployment: throughput by batch", "requests per rank", most, max(r for _, r in rates), "per chip")
    rate.points(((size, r, f"{size} requests: {r:,.0f} tok/s a chip") for size, r in rates), "three")
    rate.rule(best.decode.batch, f"batch {best.decode.batch}")
    yield rate
