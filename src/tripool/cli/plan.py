"""`tripool plan`: ranks deployments of a model on so many chips by an SLO, or validates the predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tripool.cli.files import read_file
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    from tripool.bench.trace import Workload
    from tripool.planner import Hardware, ModelShape

_DEFAULT_MODEL = "deepseek-r1"
_BROKEN = 1

ModelOf = Annotated[str, typer.Option("--model", help="deepseek-r1, kimi-k2, ...; or the path of a config.json.")]
HardwareOf = Annotated[
    str, typer.Option("--hardware", help="ascend-910c, h100, ...; `this` probes; or the path of a TOML file.")
]
Chips = Annotated[int, typer.Option(min=1, max=10**6, help="How many there are.")]
InputLen = Annotated[float | None, typer.Option("--input-len", min=1, help="Mean prompt tokens.")]
OutputLen = Annotated[float | None, typer.Option("--output-len", min=1, help="Mean answer tokens.")]
Trace = Annotated[Path | None, typer.Option(help="Mooncake JSONL: lengths and reuse are taken from it.")]
Ttft = Annotated[float, typer.Option(min=0.001, help="Time to the first token, ms.")]
Tpot = Annotated[float, typer.Option(min=0.001, help="Time per output token, ms.")]
Cached = Annotated[float | None, typer.Option(min=0.0, max=0.999, help="Share of prompts found in the cache pool.")]
PrecisionOf = Annotated[str | None, typer.Option("--precision", help="int8, fp8, fp4 or bf16.")]
Accept = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of MTP drafts accepted.")]
Price = Annotated[float | None, typer.Option(min=0.0, help="Of one chip for one hour.")]
Currency = Annotated[str | None, typer.Option(help="Of --price.")]
Validate = Annotated[bool, typer.Option("--validate", help="Print published results beside predictions.")]
Rows = Annotated[Path | None, typer.Option(help="With --validate: a CSV of the same columns.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")]
SaveFile = Annotated[Path | None, typer.Option("--save", help="Write the best deployment here, as TOML.")]


def register(app: typer.Typer) -> None:
    @app.command()
    def plan(
        model: ModelOf = _DEFAULT_MODEL,
        hardware: HardwareOf = "ascend-910c",
        chips: Chips = 384,
        input_len: InputLen = None,
        output_len: OutputLen = None,
        trace: Trace = None,
        ttft: Ttft = 2000.0,
        tpot: Tpot = 50.0,
        cached: Cached = None,
        precision: PrecisionOf = None,
        accept: Accept = None,
        price: Price = None,
        currency: Currency = None,
        validate: Validate = False,
        rows: Rows = None,
        as_json: AsJson = False,
        html_file: HtmlFile = None,
        save_file: SaveFile = None,
    ) -> None:
        """Rank deployments of a model on described hardware, or check the predictions against published results."""
        if validate:
            raise typer.Exit(0 if _validate(model, rows, as_json) else _BROKEN)
        if rows is not None:
            raise InvalidRequest("--rows is for --validate", hint="add --validate", param="rows")
        from tripool.cli.plan_show import show_plan, write_plan
        from tripool.planner.report import plan_data
        from tripool.planner.search import PlanGoal, make_plan

        work = _workload(trace, input_len, output_len)
        ask = PlanGoal(
            model=_model(model), hardware=_hardware(hardware), chips=chips, input_tokens=work.input_tokens,
            output_tokens=work.output_tokens, cached_share=work.cached_share if cached is None else cached,
            ttft_s=ttft / 1e3, tpot_s=tpot / 1e3, precision=precision, accept=accept, price_per_hour=price,
            currency=currency,
        )  # fmt: skip
        found = make_plan(ask)
        write_plan(ask, found, html_file, save_file)
        if as_json:
            typer.echo(json.dumps(plan_data(ask, found), indent=1))
        else:
            show_plan(ask, found, work.requests_per_s)


def _validate(model: str, rows: Path | None, as_json: bool) -> bool:
    from tripool.cli.plan_show import show_validation
    from tripool.planner.report import validation_data
    from tripool.planner.rows import bundled_rows, compare_rows, parse_rows, verdicts

    table = bundled_rows() if rows is None else parse_rows(read_file(rows), str(rows))
    compared = compare_rows(table, _model(model))
    found = verdicts(compared)
    if as_json:
        typer.echo(json.dumps(validation_data(compared, found), indent=1))
    else:
        show_validation(compared, found)
    return all(each.ok for each in found)


def _model(name: str) -> ModelShape:
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


def _hardware(name: str) -> Hardware:
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
