"""`tripool generate`: answers a file of prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tripool.cli.files import CannotWrite, check_folder
from tripool.cli.options import Load, Model, engine_options, sampling_options
from tripool.cli.terminal import progress
from tripool.config import EngineConfig

if TYPE_CHECKING:
    from tripool.answer import Choice, Generation


def register(app: typer.Typer, load: Load) -> None:
    @app.command()
    @engine_options()
    @sampling_options
    def generate(
        model: Model,
        prompts: Annotated[Path, typer.Option(help=".txt: one per line; .jsonl: prompt or messages, with options.")],
        out: Annotated[Path, typer.Option(help="JSON lines in the order of the prompts; replaced only when complete.")],
        *,
        sampling: dict[str, Any],
        config: EngineConfig,
    ) -> None:
        """Answer every prompt of a file with MODEL."""
        from tripool.cli.prompts import read_prompts, to_requests
        from tripool.llm import LLM

        lines = read_prompts(prompts)  # before loading the model, which takes time
        check_folder(out)
        with LLM(load(model, config)) as llm:
            requests = list(to_requests(prompts, lines, llm, sampling))
            with progress(llm.name, len(requests)) as update:
                generations = llm.run(requests, on_progress=lambda done, total: update(completed=done))
        _write_whole(out, "".join(json.dumps(_row(g), ensure_ascii=False) + "\n" for g in generations))


def _row(generation: Generation) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "accepted_draft_tokens")
    usage = {name: getattr(generation.usage, name) for name in names}
    row = _choice(generation.choices[0]) | {"usage": usage}
    if len(generation.choices) > 1:
        row["choices"] = [_choice(choice) for choice in generation.choices]
    return row


def _choice(choice: Choice) -> dict[str, Any]:
    row = {"text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason}
    if choice.logprobs is not None:
        row["logprobs"] = [{"chosen": token.chosen, "top": token.top} for token in choice.logprobs]
    return row


def _write_whole(out: Path, content: str) -> None:
    """A reader sees the old file or the complete new one, never a part."""
    try:
        with NamedTemporaryFile("w", encoding="utf-8", dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).chmod(0o644)  # a temporary file is created private to its owner
                Path(file.name).replace(out)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        raise CannotWrite(f"cannot write {out}: {error.strerror}", hint="give another --out") from error
