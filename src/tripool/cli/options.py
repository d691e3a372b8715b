"""Options that several commands share, each defined once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from tripool.config import Device, EngineConfig, Precision
from tripool.engine.protocol import StepEngine

Load = Callable[[str, EngineConfig], StepEngine]
"""From a model's name or path to an engine."""

Model = Annotated[str, typer.Argument(help="A name that `tripool models` shows, or the path of a checkpoint.")]

_KV = "Memory for KV blocks in GB, of each worker; room for 8 contexts, at most 2, when not given."
_THREADS = "CPU threads; all cores, or a split worker's share of them, when not given."
ModelNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help="Names that `tripool models` shows, or paths; the first is the default."),
]

KvGb = Annotated[float | None, typer.Option("--kv-gb", min=0.001, help=_KV)]
MaxRunning = Annotated[int, typer.Option("--max-running", min=1, max=256, help="Sequences computed at once.")]
Mtp = Annotated[bool, typer.Option("--mtp/--no-mtp", help="Draft tokens with the model's MTP layer, if it has one.")]
PrecisionOf = Annotated[Precision, typer.Option("--precision", help="int8: fast, and exact on a CPU; or float32.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help=_THREADS)]
_DEVICE = "cpu, or cuda: bfloat16, and on Hopper 8 bits where the checkpoint has them; or float32."
DeviceOf = Annotated[Device, typer.Option("--device", help=_DEVICE)]

Temperature = Annotated[float | None, typer.Option(help="0 picks the most likely token.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep this many of the likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Drop tokens less likely than this times the likeliest.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1 discourages tokens already seen.")
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="The longest answer.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be given several times.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were on the command line; the others keep SamplingParams' defaults."""
    return {name: value for name, value in options.items() if value is not None and value != []}
