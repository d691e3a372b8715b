"""Output of commands besides their results: progress and errors, always on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from tripool.config import EngineConfig
from tripool.engine_protocol import StepEngine
from tripool.errors import TripoolError

if TYPE_CHECKING:
    from tripool.cache.weight_cache import WeightCache

_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


@contextmanager
def progress(
    description: str, total: int | None, *last: ProgressColumn, enabled: bool = True, transient: bool = False
) -> Iterator[Callable[..., None]]:
    """A bar on stderr, with its time in the `last` columns. Yields `update`: `completed`, `advance`, `description`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *(last or (TimeRemainingColumn(),)))
    with Progress(*columns, console=stderr(), disable=not enabled, transient=transient, refresh_per_second=4) as bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda **changes: bar.update(task, **changes)


def load_model(model: str, config: EngineConfig, weight_cache: WeightCache | None = None) -> StepEngine:
    from tripool.engine.load import load_engine  # here, so that --help does not load torch

    console = stderr()
    with console.status(f"loading {model}") as status:
        return load_engine(model, config, progress=status.update, weight_cache=weight_cache)


def print_error(error: TripoolError) -> None:
    """One line in red. Notes name the request it was, of many."""
    notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", []))
    stderr().print(Text(f"error: {error}{notes}", style="red"), soft_wrap=True)


def harmless(text: str) -> str:
    """Without control characters except tab and newline: a model must not control the terminal."""
    return text.translate(_CONTROLS)
