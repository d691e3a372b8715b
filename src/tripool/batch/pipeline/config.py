"""A pipeline as data: what its TOML file says, checked key by key, before anything runs. Loads no model."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tripool.checkpoints.names import BUNDLED, FETCHED
from tripool.control.canary import CanaryPlan
from tripool.errors import TripoolError

COMPARED = (
    "perplexity", "reference_perplexity", "perplexity_change", "next_token_agreement", "mean_kl", "greedy_agreement"
)  # fmt: skip
"""Figures of a text."""
TRAINED = ("held_out_loss", "held_out_perplexity")
_TOP = ("name", "folder", "registry", "train", "import", "quantize", "eval", "gate", "canary")


class PipelineError(TripoolError, status=400, code="bad_pipeline"):
    """A pipeline cannot begin or go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    config: str
    """A TOML file of `tripool train`, or the name of one of ours."""
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    model: str
    """A known name, a folder, a GGUF file, or a version in the registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize:
    """As the options of `tripool quantize`."""

    calibration: str = ""
    tokens: int = 4096
    suppress: bool = True
    search: bool = True
    compensate: bool = True
    keep: float = 0.4
    vocabulary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """As the options of `tripool eval`."""

    text: str = ""
    tasks: str = ""
    reference: str = ""
    """Empty: the model before it was quantised, or itself, in float32."""
    precision: str = "int8"
    """How the model computes; the default is how it is served."""
    tokens: int = 8192
    window: int = 512
    answers: int = 16
    answer_tokens: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary(CanaryPlan):
    """As `POST /v1/canary/NAME` takes it."""

    url: str
    """Of a running server that serves the model by its name."""

    def asked(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "url"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Bars, by figure. A figure that is no number misses any bar."""

    min: Mapping[str, float] = field(default_factory=dict)
    max: Mapping[str, float] = field(default_factory=dict)

    def missed(self, figures: Mapping[str, float]) -> list[str]:
        """A sentence for each bar that was missed; also by a figure that could not be measured."""
        found = []
        for name, bar in self.min.items():
            value = figures.get(name, math.nan)
            if not value >= bar:
                found.append(f"{name} is {value:.6g}, below {bar:g}")
        for name, bar in self.max.items():
            value = figures.get(name, math.nan)
            if not value <= bar:
                found.append(f"{name} is {value:.6g}, above {bar:g}")
        return found


DEFAULT_BARS = {"perplexity_change": 0.05}
"""Where a text is read and no gate is given: 8 bits may cost so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    name: str
    folder: Path
    """Artefacts; begun stages; the journal."""
    registry: Path | None
    base: Path
    """Relative paths of the file begin here."""
    source: Train | Import
    quantize: Quantize | None
    eval: Eval
    gate: Gate
    canary: Canary | None
    tree: Mapping[str, Any]
    """As it was read, for the lineage."""

    def path(self, given: str) -> Path:
        path = Path(given).expanduser()
        return path if path.is_absolute() else self.base / path

    def model(self, given: str) -> str:
        """A path beside the file, or else a model's name."""
        return str(self.path(given)) if self.path(given).exists() else given


def read_pipeline(file: Path) -> Pipeline:
    try:
        tree = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {file}: {error}", hint="docs/pipeline.md has an example") from None
    except tomllib.TOMLDecodeError as error:
        raise PipelineError(f"{file} is not TOML: {error}", hint="docs/pipeline.md has an example") from None
    if unknown := tree.keys() - set(_TOP):
        raise PipelineError(f"{file}: unknown '{min(unknown)}'", hint=f"known: {', '.join(_TOP)}")
    name = tree.get("name")
    if not isinstance(name, str) or not name:
        raise PipelineError(f"{file} names no model", hint='name = "my-model": under it, versions are registered')
    if ("train" in tree) == ("import" in tree):
        raise PipelineError(f"{file} needs a source", hint="give it one of [train] and [import]")
    base = file.absolute().parent
    tables = {key: tree[key] for key in ("train", "import", "quantize", "eval", "gate", "canary") if key in tree}
    without = tables.get("quantize") is False
    if without:
        del tables["quantize"]
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise PipelineError(f"{file}: '{key}' is {table!r}", hint=f"write [{key}] on a line of its own")
    folder = _text(tree, "folder") or f"{file.stem}.run"
    registry = _text(tree, "registry")
    found = Pipeline(
        name=name,
        folder=base / Path(folder).expanduser(),
        registry=base / Path(registry).expanduser() if registry else None,
        base=base,
        source=_table(Train, tree["train"], "train") if "train" in tree else _table(Import, tree["import"], "import"),
        quantize=None if without else _table(Quantize, tables.get("quantize", {}), "quantize"),
        eval=_table(Eval, tables.get("eval", {}), "eval"),
        gate=_gate(tables.get("gate"), tables.get("eval", {})),
        canary=_table(Canary, tables["canary"], "canary") if "canary" in tables else None,
        tree=tree,
    )
    _check(found)
    return found


def _text(tree: Mapping[str, Any], key: str) -> str:
    value = tree.get(key, "")
    if not isinstance(value, str):
        raise PipelineError(f"{key} is {value!r}", hint="give it text in quotes")
    return value


Table = TypeVar("Table", Train, Import, Quantize, Eval, Canary)
_SAID = {"str": "text in quotes", "int": "a whole number", "float": "a number", "bool": "true or false"}


def _table(kind: type[Table], values: Mapping[str, Any], name: str) -> Table:
    known = {one.name: str(one.type) for one in fields(kind)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise PipelineError(f"unknown '{name}.{key}'", hint=f"known: {', '.join(known)}")
        wanted = known[key]
        if type(value).__name__ != wanted and not (wanted == "float" and type(value) is int):
            raise PipelineError(f"{name}.{key} is {value!r}", hint=f"give it {_SAID[wanted]}")
        given[key] = float(value) if wanted == "float" else value
    try:
        return kind(**given)
    except TypeError:
        missing = ", ".join(key for key in known if key not in given and key in ("config", "data", "model", "url"))
        raise PipelineError(f"[{name}] lacks {missing}", hint="docs/pipeline.md has an example") from None


def _gate(table: Mapping[str, Any] | None, evaluated: Mapping[str, Any]) -> Gate:
    if table is None:
        if not evaluated.get("text"):
            hint = '[gate] min = {"TASK.acc" = 0.5}; nothing is published that no bar was set for'
            raise PipelineError("no gate, and no text to compare models on", hint=hint)
        return Gate(max=DEFAULT_BARS)
    bars: dict[str, dict[str, float]] = {}
    for side, values in table.items():
        if side not in ("min", "max") or not isinstance(values, dict):
            raise PipelineError(f"gate.{side} is no table of bars", hint="[gate] has min = {...} and max = {...}")
        bars[side] = {}
        for name, bar in _flat(values):
            if isinstance(bar, bool) or not isinstance(bar, (int, float)) or not math.isfinite(bar):
                raise PipelineError(f"gate.{side}.{name} is {bar!r}", hint="give it a number")
            bars[side][name] = float(bar)
    if not any(bars.values()):
        raise PipelineError("a gate without bars", hint="[gate] max = {perplexity_change = 0.05}")
    return Gate(**bars)


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """`capitals.acc = 0.5` is a table in TOML."""
    found = []
    for key, value in values.items():
        found += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(before + key, value)]
    return found


def _check(pipeline: Pipeline) -> None:
    evaluated = pipeline.eval
    if pipeline.name in (*BUNDLED, *FETCHED):
        raise PipelineError(f"'{pipeline.name}' is another model's name", hint="give it one of its own")
    if not evaluated.text and not evaluated.tasks:
        raise PipelineError("[eval] reads nothing", hint="give it a text or tasks")
    if evaluated.precision not in ("float32", "int8", "w8a8"):
        raise PipelineError(f"eval.precision is '{evaluated.precision}'", hint="float32, int8 or w8a8")
    if evaluated.window < 64 or min(evaluated.tokens, evaluated.answer_tokens) < 1 or evaluated.answers < 0:
        raise PipelineError("[eval] has a number that is too small", hint="see `tripool eval --help`")
    measured: set[str] = set(COMPARED) if evaluated.text else set()
    if isinstance(pipeline.source, Train):
        measured |= set(TRAINED)
    if evaluated.tasks:
        from tripool.quant.tasks import read_tasks  # here: imports the room's torch

        tasks = read_tasks(pipeline.path(evaluated.tasks))
        measured |= {f"{task.name}.{name}" for task in tasks for name in task.figures}
    for name in (*pipeline.gate.min, *pipeline.gate.max):
        if name not in measured:
            hint = f"measured: {', '.join(sorted(measured))}"
            raise PipelineError(f"the gate has a bar for '{name}', which is not measured", hint=hint)
