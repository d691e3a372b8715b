"""The tables of `docs/planner.md` and `docs/reproduce.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from tripool.planner.facts import Facts
from tripool.planner.hardware import hardware_names, named_hardware
from tripool.planner.models import model_names, named_model
from tripool.planner.reproduce import Table
from tripool.planner.reproduce.lines import HEADS, cells, summarise, summary_words
from tripool.planner.rows import bundled_rows, compare_rows, verdicts
from tripool.planner.rows.calibrating import leave_family_out, refit
from tripool.planner.rows.judging import PLAIN_MODEL, TABLES

_CONSTANTS_OF = ("ascend-910c", "h100", "h800")


def planner_document(text: str) -> str:
    """`docs/planner.md` with its tables made anew."""
    made = {
        "errors": errors_table, "families": families_table, "left out": left_out_table, "models": models_table,
        "constants": constants_table,
    }  # fmt: skip
    for name, table in made.items():
        text = _filled(text, name, table())
    return text


def reproduce_document(text: str, tables: Sequence[Table]) -> str:
    """`docs/reproduce.md` with its tables made anew."""
    parts = [f"{summary_words(summarise(tables))}.\n"]
    parts += [f"### {each.title}\n\n{each.description}\n\n{_table(HEADS, map(cells, each.lines))}" for each in tables]
    return _filled(text, "tables", "\n".join(parts))


def _filled(text: str, name: str, made: str) -> str:
    """`text` with what stands between `<!-- made: NAME -->` and `<!-- end -->` replaced."""
    begin, end = f"<!-- made: {name} -->\n", "<!-- end -->"
    before, found, rest = text.partition(begin)
    assert found and end in rest, f"no place for '{name}'"
    return before + begin + "\n" + made + "\n" + end + rest.partition(end)[2]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines)


def errors_table() -> str:
    model = named_model(PLAIN_MODEL)
    compared = compare_rows([row for name in TABLES for row in bundled_rows(name)], model)
    rows = []
    for each in compared:
        row, prediction = each.prediction.row, each.prediction
        numbers = (row.batch, row.context, prediction.published, prediction.predicted)
        cells = ["" if value is None else f"{value:,.0f}" for value in numbers]
        error = "" if prediction.error is None else f"{prediction.error:+.1%}"
        role = f"{each.role}: {prediction.reason}" if prediction.reason else each.role
        rows.append([row.system, row.hardware, row.phase, f"{row.ep or ''}", *cells, error, role])
    heads = ["system", "hardware", "phase", "EP", "batch", "context", "published", "predicted", "error", "row"]
    lines = [
        f"{each.family}: {each.validation_rows} validation rows, median {each.median:.1%}, worst {each.worst:.1%}."
        for each in verdicts(compared)
        if each.median is not None and each.worst is not None
    ]
    return _table(heads, rows) + "\n" + " ".join(lines) + "\n"


def families_table() -> str:
    """Errors of each family with no constant fixed by a row of its own."""
    rows = [row for name in TABLES for row in bundled_rows(name)]
    lines = []
    for each in leave_family_out(rows, named_model(PLAIN_MODEL)):
        worst = max(abs(error) for error in each.errors.values())
        lines.append([each.family, each.fixed_by, f"{len(each.errors)}", f"{each.median:.1%}", f"{worst:.1%}"])
    return _table(["family", "constants", "rows", "median", "worst"], lines)


def left_out_table() -> str:
    """Errors of all decode rows of the 910C when another of them fixes the drift."""
    model, rows = named_model(PLAIN_MODEL), bundled_rows()
    own = [row for row in rows if row.phase == "decode" and "910C" in row.hardware]
    own.sort(key=lambda row: row.batch or 0.0)
    lines = []
    for fixed in own:
        found = refit(rows, model, decode_row=fixed)
        errors = found.errors(own, model)
        cells = (f"{errors[row]:+.1%}" for row in own)
        lines.append([f"batch {fixed.batch:.0f}", f"{found.routing.decode_drift:.3f}", *cells])
    return _table(["fixed by", "drift", *(f"error at {row.batch:.0f}" for row in own)], lines)


def models_table() -> str:
    rows = []
    for name in model_names():
        model = named_model(name)
        counts = (f"{model.total_params / 1e9:,.1f} B", f"{model.active_params / 1e9:,.1f} B")
        rows.append([name, *counts, f"{model.flops_per_token / 1e9:,.1f} G", f"{model.kv_bytes_per_token():,.0f} B"])
    return _table(["model", "parameters", "active", "operations per token", "KV per token"], rows)


def constants_table() -> str:
    """What is not on a data sheet: how far kernels reach, overheads, calibration."""
    routing = Facts(files("tripool.planner.models").joinpath("routing.toml").read_text("utf-8"), "routing.toml")
    routing.table("routing")
    read = {("any", key): fact for key, fact in routing.read.items()}
    for name in (name for name in hardware_names() if name in _CONSTANTS_OF):
        prefixes = ("shares.", "exchange.", "overheads.", "cache.")
        read |= {(name, key): fact for key, fact in named_hardware(name).facts.items() if key.startswith(prefixes)}
    rows = [
        [name, key.partition(".")[2], f"{fact.value:g}", fact.kind, fact.source] for (name, key), fact in read.items()
    ]
    return _table(["hardware", "constant", "value", "kind", "source"], rows)
