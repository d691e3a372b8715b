"""`tripool generate`: answers a file of prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tripool.cli import options
from tripool.cli.files import CannotWrite, check_folder
from tripool.cli.options import DeviceOf, KvGb, Load, MaxRunning, Model, Mtp, PrecisionOf, Threads
from tripool.cli.terminal import stderr
from tripool.config import EngineConfig

if TYPE_CHECKING:
    from tripool.answer import Choice, Generation

_DEFAULT = EngineConfig()


def register(app: typer.Typer, load: Load) -> None:
    @app.command()
    def generate(
        model: Model,
        prompts: Annotated[Path, typer.Option(help=".txt: one per line; .jsonl: prompt or messages, with options.")],
        out: Annotated[Path, typer.Option(help="JSON lines in the order of the prompts; replaced only when complete.")],
        temperature: options.Temperature = None,
        top_p: options.TopP = None,
        top_k: options.TopK = None,
        min_p: options.MinP = None,
        repetition_penalty: options.RepetitionPenalty = None,
        max_tokens: options.MaxTokens = None,
        seed: options.Seed = None,
        stop: options.Stop = None,
        kv_gb: KvGb = None,
        max_running: MaxRunning = _DEFAULT.max_running,
        mtp: Mtp = _DEFAULT.mtp,
        precision: PrecisionOf = _DEFAULT.precision,
        threads: Threads = None,
        device: DeviceOf = _DEFAULT.device,
    ) -> None:
        """Answer every prompt of a file with MODEL."""
        defaults = options.given(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
            seed=seed,
            stop=stop,
        )
        config = EngineConfig(
            kv_gb=kv_gb, max_running=max_running, mtp=mtp, precision=precision, threads=threads, device=device
        )
        _generate(load, model, config, prompts, out, defaults)


def _generate(
    load: Load, model: str, config: EngineConfig, prompts: Path, out: Path, defaults: Mapping[str, Any]
) -> None:
    from tripool.cli.prompts import read_prompts, to_requests
    from tripool.llm import LLM

    lines = read_prompts(prompts)  # before loading the model, which takes time
    check_folder(out)
    with LLM(load(model, config)) as llm:
        requests = list(to_requests(prompts, lines, llm, defaults))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=stderr()) as progress:
            task = progress.add_task(llm.name, total=len(requests))
            generations = llm.run(requests, on_progress=lambda done, total: progress.update(task, completed=done))
    _write_whole(out, "".join(json.dumps(_row(g), ensure_ascii=False) + "\n" for g in generations))


def _row(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    row = _choice(generation.choices[0]) | {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "accepted_draft_tokens": usage.accepted_draft_tokens,
        }
    }
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
