"""`tripool chat`: chat with a model in the terminal, or ask it one question from a script."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tripool.cli.options import Load, Model, engine_options, sampling_options
from tripool.cli.terminal import harmless, print_error, stderr
from tripool.config import EngineConfig
from tripool.core import Message, SamplingParams
from tripool.errors import ContextOverflow

if TYPE_CHECKING:
    from tripool.llm import LLM


def register(app: typer.Typer, load: Load) -> None:
    @app.command()
    @engine_options("max_running")
    @sampling_options
    def chat(
        model: Model = "tiny",
        question: Annotated[str | None, typer.Argument(help="Ask this and exit; also read from a pipe.")] = None,
        system: Annotated[str | None, typer.Option(help="Instructions that come before the conversation.")] = None,
        *,
        sampling: dict[str, Any],
        config: EngineConfig,
    ) -> None:
        """Chat with MODEL; /reset starts again, /exit leaves."""
        from tripool.llm import LLM

        params = SamplingParams.from_options(sampling)
        if question is None and not sys.stdin.isatty():
            question = sys.stdin.read().strip()
        with LLM(load(model, replace(config, max_running=1))) as llm:
            talk = _Talk(llm, params, system)
            if question is not None:
                talk.ask(question, raise_interrupt=True)
            else:
                _converse(talk)


@dataclass(slots=True)
class _Talk:
    """A conversation and its history."""

    llm: LLM
    params: SamplingParams
    system: str | None
    history: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        self.history.clear()

    def ask(self, question: str, *, raise_interrupt: bool) -> None:
        """Print the answer as it is generated. In a conversation, Ctrl-C ends it, and its text so far is kept."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        exchange: list[Message] = [{"role": "user", "content": question}]
        console, pieces, started_s, first_s = Console(), list[str](), time.perf_counter(), 0.0
        stream = self.llm.stream_chat(first + self.history + exchange, self.params)
        try:
            for piece in stream:
                first_s = first_s or time.perf_counter() - started_s
                pieces.append(piece)
                shown = harmless(piece) if console.is_terminal else piece
                console.print(shown, end="", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            if raise_interrupt:
                raise
        finally:
            stream.close()
            console.print()
        self.history += [*exchange, {"role": "assistant", "content": "".join(pieces)}]
        if stream.generation is not None:
            num_tokens, taken_s = stream.generation.usage.completion_tokens, time.perf_counter() - started_s
            rate = f"{num_tokens / taken_s:.1f} tokens/s"
            stderr().print(f"{num_tokens} tokens, {rate}, first after {first_s:.2f} s", style="dim")


def _converse(talk: _Talk) -> None:
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # line editing for input(); absent on some platforms
    console = Console()
    console.print(f"{talk.llm.name}: /reset starts again, /exit or Ctrl-D leaves", style="dim", markup=False)
    while True:
        try:
            question = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question == "/exit":
            return
        if question == "/reset":
            talk.reset()
        elif question.startswith("/"):
            console.print("known: /reset, /exit", style="dim")
        elif question:
            try:
                talk.ask(question, raise_interrupt=False)
            except ContextOverflow as full:
                print_error(full)
                console.print("the conversation no longer fits: /reset starts again", style="dim")
