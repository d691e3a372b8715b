"""Options that several commands share, each defined once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tripool.config import Device, EngineConfig, Precision
from tripool.engine_protocol import StepEngine

Load = Callable[[str, EngineConfig], StepEngine]
"""From a model's name or path to an engine."""

TRIPOOL = (sys.executable, "-m", "tripool")

Model = Annotated[str, typer.Argument(help="A name that `tripool models` shows, or the path of a checkpoint.")]

_KV = (
    "Memory for KV blocks in GB, of each worker; room for 8 contexts, at most 2, when not given. One model alone on "
    "cuda: all that is left."
)
_STEP = "Tokens computed in one step; 512 on a CPU, 2,048 to 8,192 on cuda by memory and experts, when not given."
_THREADS = "CPU threads; all cores, or a split worker's share of them, when not given."
ModelNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help="Names that `tripool models` shows, or paths; the first is the default."),
]

_TOKEN = "What all machines of a server share, or @FILE that has it; `serve` makes one at every start."
Token = Annotated[str, typer.Option(help=_TOKEN)]
TrustedNetwork = Annotated[
    bool, typer.Option("--trusted-network", help="Do not encrypt between machines; the same on all of them.")
]
DiskGb = Annotated[
    float | None, typer.Option(min=0.001, help="Disk behind this machine's part of the cache pool; none by default.")
]
DiskDir = Annotated[
    Path | None, typer.Option(help="Where; kept for the next start. The user's cache folder by default.")
]
MooncakeStore = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="A Mooncake Store's master: cached blocks are kept there, too.")
]
PrecisionOf = Annotated[Precision, typer.Option("--precision", help="int8: fast, and exact on a CPU; or float32.")]
_DEVICE = "cpu, or cuda: bfloat16, and on Hopper 8 bits where the checkpoint has them; or float32."
_EXACT = "Tokens do not depend on the batch, on drafts or on preemptions: slower on cuda, always so in int8 on a CPU."
_ENGINE = {
    "kv_gb": Annotated[float | None, typer.Option(min=0.001, help=_KV)],
    "max_running": Annotated[int, typer.Option(min=1, max=256, help="Sequences computed at once.")],
    "step_tokens": Annotated[int | None, typer.Option(min=1, help=_STEP)],
    "mtp": Annotated[
        bool, typer.Option("--mtp/--no-mtp", help="Draft tokens with the model's MTP layer, if it has one.")
    ],
    "precision": PrecisionOf,
    "threads": Annotated[int | None, typer.Option(min=1, help=_THREADS)],
    "device": Annotated[Device, typer.Option(help=_DEVICE)],
    "exact": Annotated[bool, typer.Option("--exact", help=_EXACT)],
}
_SAMPLING = {
    "temperature": Annotated[float | None, typer.Option(help="0 picks the most likely token.")],
    "top_p": Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")],
    "top_k": Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")],
    "min_p": Annotated[float | None, typer.Option(help="Drop tokens less likely than this times the likeliest.")],
    "repetition_penalty": Annotated[float | None, typer.Option(help="Above 1 discourages tokens already seen.")],
    "max_tokens": Annotated[int | None, typer.Option(help="The longest answer.")],
    "seed": Annotated[int | None, typer.Option(help="The same seed gives the same answer.")],
    "stop": Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be given several times.")],
}

Command = Callable[..., None]


def engine_options(*without: str) -> Callable[[Command], Command]:
    """For a command with a parameter `config: EngineConfig`: its fields become options, except those in `without`."""
    options = {name: option for name, option in _ENGINE.items() if name not in without}
    defaults = EngineConfig()
    return _grouped("config", options, {name: getattr(defaults, name) for name in options}, EngineConfig)


def sampling_options(command: Command) -> Command:
    """For a command with a parameter `sampling`: the sampling options that were given, by name."""
    return _grouped("sampling", _SAMPLING, dict.fromkeys(_SAMPLING), given)(command)


def options_from(kind: type[Any], parameter: str = "given") -> Callable[[Command], Command]:
    """For a command with a parameter of this dataclass: its fields become options."""
    hints, defaults = get_type_hints(kind, include_extras=True), {}
    for each in fields(kind):
        defaults[each.name] = inspect.Parameter.empty if each.default is MISSING else each.default
    return _grouped(parameter, {name: hints[name] for name in defaults}, defaults, kind)


def _grouped(
    parameter: str, options: Mapping[str, Any], defaults: Mapping[str, Any], make: Callable[..., Any]
) -> Callable[[Command], Command]:
    """Replaces a parameter of a command by options; `make` builds its value from theirs."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**values: Any) -> None:
            found = make(**{name: values.pop(name) for name in options})
            command(**values, **{parameter: found})

        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            if each.name == parameter:
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters += [
                    inspect.Parameter(name, kind, default=defaults[name], annotation=option)
                    for name, option in options.items()
                ]
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def given(**options: Any) -> dict[str, Any]:
    """The options that were on the command line; the others keep SamplingParams' defaults."""
    return {name: value for name, value in options.items() if value is not None and value != []}
