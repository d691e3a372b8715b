"""A training run as data: what a TOML file says, checked key by key. Knows no tensor and no document."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tripool.errors import TripoolError
from tripool.train.plan import DataPlan, Optimise, Reporting

CONFIGS = Path(__file__).parent / "configs"
_TABLES = ("model", "data", "mix", "optimise", "report")


class TrainError(TripoolError, status=400, code="cannot_train"):
    """A run cannot begin or go on: its config, its documents or its folder are not what they should be."""

    def __init__(self, message: str, *, hint: str = "", file: Path | str | None = None, key: str | None = None) -> None:
        where = "".join([f" [file {file}]" if file else "", f" [key {key}]" if key else ""])
        super().__init__(message + where, hint=hint)
        self.file = str(file) if file else None
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    model: Mapping[str, Any]
    """As in Hugging Face's config.json."""
    data: DataPlan = field(default_factory=DataPlan)
    mix: Mapping[str, float] = field(default_factory=dict)
    """How often documents of a kind are used, relative to once; 0 leaves the kind out."""
    optimise: Optimise = field(default_factory=Optimise)
    report: Reporting = field(default_factory=Reporting)

    def fingerprint(self) -> dict[str, Any]:
        """All that decides which weights come out."""
        model, data, optimise = dict(self.model), asdict(self.data), asdict(self.optimise)
        return {"model": model, "data": data, "mix": dict(self.mix), "optimise": optimise}


def read_config(name_or_path: str) -> TrainConfig:
    """A config of ours by its name, such as `tripool-tiny`, or a TOML file."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = CONFIGS / f"{name_or_path}.toml"
    try:
        return parse_config(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(one.stem for one in CONFIGS.glob("*.toml")))
        hint = f"give a TOML file, or one of: {known}"
        raise TrainError(f"cannot be read: {error}", hint=hint, file=path) from error


def parse_config(text: str, file: str) -> TrainConfig:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TrainError(f"not TOML: {error}", hint="see docs/training.md for an example", file=file) from error
    for key, value in tree.items():
        if key not in _TABLES:
            raise TrainError("no such table", hint=f"known: {', '.join(_TABLES)}", file=file, key=key)
        if not isinstance(value, dict):
            raise TrainError("not a table", hint=f"write [{key}] on a line of its own", file=file, key=key)
    if "model" not in tree:
        raise TrainError("says nothing of the network", hint="give it a [model] table", file=file, key="model")
    config = TrainConfig(
        model=tree["model"],
        data=_table(DataPlan, tree.get("data", {}), "data", file),
        mix={kind: _weight(kind, value, file) for kind, value in tree.get("mix", {}).items()},
        optimise=_table(Optimise, tree.get("optimise", {}), "optimise", file),
        report=_table(Reporting, tree.get("report", {}), "report", file),
    )
    _check(config, file)
    return config


Table = TypeVar("Table", DataPlan, Optimise, Reporting)


def _table(kind: type[Table], values: Mapping[str, Any], name: str, file: str) -> Table:
    known = {one.name: type(getattr(kind(), one.name)) for one in fields(kind)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        where = f"{name}.{key}"
        if key not in known:
            raise TrainError("no such key", hint=f"known: {', '.join(known)}", file=file, key=where)
        wanted = known[key]
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if not fits:
            raise TrainError(f"is {value!r}", hint=f"give it {_SAID[wanted]}", file=file, key=where)
        given[key] = wanted(value)
    return kind(**given)


_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def _weight(kind: str, value: Any, file: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
        raise TrainError(f"is {value!r}", hint="give it a number from 0 to 100", file=file, key=f"mix.{kind}")
    return float(value)


_Bound = tuple[str, Callable[[Any], bool], str]

_BOUNDS: tuple[_Bound, ...] = (
    ("data.row_tokens", lambda v: v >= 16, "at least 16"),
    ("data.prompt_loss", lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("optimise.steps", lambda v: v >= 1, "at least 1"),
    ("optimise.rows_per_step", lambda v: v >= 1, "at least 1"),
    ("optimise.rows_per_pass", lambda v: v >= 1, "at least 1"),
    ("optimise.peak_lr", lambda v: 0 < v < 1, "above 0 and below 1"),
    ("optimise.final_lr_share", lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("optimise.warmup_steps", lambda v: v >= 0, "0 or more"),
    ("optimise.decay", lambda v: v in ("cosine", "linear"), '"cosine" or "linear"'),
    ("optimise.beta_1", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("optimise.beta_2", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("optimise.weight_decay", lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("optimise.clip", lambda v: v > 0, "above 0"),
    ("optimise.mtp_weight", lambda v: v >= 0, "0 or more"),
    ("optimise.bias_rate", lambda v: v >= 0, "0 or more"),
    ("optimise.init_std", lambda v: v > 0, "above 0"),
    ("optimise.seed", lambda v: 0 <= v < 2**31, "from 0 to 2^31 - 1"),
    ("report.line_s", lambda v: v >= 0, "0 or more"),
    ("report.save_steps", lambda v: v >= 1, "at least 1"),
    ("report.eval_steps", lambda v: v >= 1, "at least 1"),
    ("report.eval_rows", lambda v: v >= 1, "at least 1"),
)


def _check(config: TrainConfig, file: str) -> None:
    for where, holds, said in _BOUNDS:
        table, _, key = where.partition(".")
        value = getattr(getattr(config, table), key)
        if not holds(value):
            raise TrainError(f"is {value!r}", hint=f"it must be {said}", file=file, key=where)
    many, few = config.optimise.rows_per_step, config.optimise.rows_per_pass
    if many % few:
        hint = f"{few} rows at a time do not make {many}; give a divisor"
        raise TrainError(f"is {few}", hint=hint, file=file, key="optimise.rows_per_pass")
