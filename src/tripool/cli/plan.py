"""`tripool plan`: ranks deployments of a model on so many chips by an SLO, or validates the predictions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tripool.cli.files import read_file
from tripool.cli.options import options_from
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    from tripool.bench.trace import Workload
    from tripool.planner import Hardware, ModelShape

_DEFAULT_MODEL = "deepseek-r1"
_BROKEN = 1


@dataclass(frozen=True, slots=True)
class PlanOptions:
    model: Annotated[str, typer.Option(help="deepseek-r1, kimi-k2, ...; or the path of a config.json.")] = (
        _DEFAULT_MODEL
    )
    hardware: Annotated[
        str, typer.Option(help="ascend-910c, h100, ...; `this` probes; or the path of a TOML file.")
    ] = "ascend-910c"
    chips: Annotated[int, typer.Option(min=1, max=10**6, help="How many there are.")] = 384
    input_len: Annotated[float | None, typer.Option(min=1, help="Mean prompt tokens.")] = None
    output_len: Annotated[float | None, typer.Option(min=1, help="Mean answer tokens.")] = None
    trace: Annotated[Path | None, typer.Option(help="Mooncake JSONL: lengths and reuse are taken from it.")] = None
    ttft: Annotated[float, typer.Option(min=0.001, help="Time to the first token, ms.")] = 2000.0
    tpot: Annotated[float, typer.Option(min=0.001, help="Time per output token, ms.")] = 50.0
    cached: Annotated[
        float | None, typer.Option(min=0.0, max=0.999, help="Share of prompts found in the cache pool.")
    ] = None
    precision: Annotated[str | None, typer.Option(help="int8, fp8, fp4 or bf16.")] = None
    accept: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of MTP drafts accepted.")] = None
    price: Annotated[float | None, typer.Option(min=0.0, help="Of one chip for one hour.")] = None
    currency: Annotated[str | None, typer.Option(help="Of --price.")] = None
    validate: Annotated[bool, typer.Option("--validate", help="Print published results beside predictions.")] = False
    rows: Annotated[Path | None, typer.Option(help="With --validate: a CSV of the same columns.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None
    save_file: Annotated[Path | None, typer.Option("--save", help="Write the best deployment here, as TOML.")] = None


def register(app: typer.Typer) -> None:
    @app.command()
    @options_from(PlanOptions)
    def plan(given: PlanOptions) -> None:
        """Rank deployments of a model on described hardware, or check the predictions against published results."""
        if given.validate:
            raise typer.Exit(0 if _validate(given.model, given.rows, given.as_json) else _BROKEN)
        if given.rows is not None:
            raise InvalidRequest("--rows is for --validate", hint="add --validate", param="rows")
        from tripool.cli.plan_show import show_plan, write_plan
        from tripool.planner.report import plan_data
        from tripool.planner.search import PlanGoal, make_plan

        work = _workload(given.trace, given.input_len, given.output_len)
        goal = PlanGoal(
            model=planned_model(given.model), hardware=planned_hardware(given.hardware), chips=given.chips,
            input_tokens=work.input_tokens, output_tokens=work.output_tokens,
            cached_share=work.cached_share if given.cached is None else given.cached, ttft_s=given.ttft / 1e3,
            tpot_s=given.tpot / 1e3, precision=given.precision, accept=given.accept, price_per_hour=given.price,
            currency=given.currency,
        )  # fmt: skip
        found = make_plan(goal)
        write_plan(goal, found, given.html_file, given.save_file)
        if given.as_json:
            typer.echo(json.dumps(plan_data(goal, found), indent=1))
        else:
            show_plan(goal, found, work.requests_per_s)


def _validate(model: str, rows: Path | None, as_json: bool) -> bool:
    from tripool.cli.plan_show import show_validation
    from tripool.planner.report import validation_data
    from tripool.planner.rows import bundled_rows, compare_rows, parse_rows, verdicts

    table = bundled_rows() if rows is None else parse_rows(read_file(rows), str(rows))
    compared = compare_rows(table, planned_model(model))
    found = verdicts(compared)
    if as_json:
        typer.echo(json.dumps(validation_data(compared, found), indent=1))
    else:
        show_validation(compared, found)
    return all(each.ok for each in found)


def planned_model(name: str) -> ModelShape:
    from tripool.planner.errors import BadModelConfig
    from tripool.planner.models import named_model, read_config

    path = Path(name)
    if path.suffix != ".json" and not path.is_dir():
        return named_model(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(read_file(file))
    except ValueError as error:
        raise BadModelConfig(f"{file} is not JSON: {error}", hint="a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise BadModelConfig(f"{file} is not an object", hint="a Hugging Face config.json")
    return read_config(config, file.parent.name if file.name == "config.json" else file.stem)


def planned_hardware(name: str) -> Hardware:
    from tripool.planner.hardware import named_hardware, parse_hardware

    if name == "this":
        from tripool.planner.probe import describe, probe

        return parse_hardware(describe(probe()), "probe")
    if name.endswith(".toml"):
        return parse_hardware(read_file(Path(name)), name)
    return named_hardware(name)


def _workload(trace: Path | None, input_len: float | None, output_len: float | None) -> Workload:
    from tripool.bench.trace import Workload, measure_trace, parse_trace

    if trace is not None:
        if input_len is not None or output_len is not None:
            raise InvalidRequest("--trace has its own lengths", hint="leave --input-len and --output-len out")
        return measure_trace(parse_trace(read_file(trace).splitlines()))
    return Workload(input_tokens=input_len or 4096.0, output_tokens=output_len or 1024.0)
