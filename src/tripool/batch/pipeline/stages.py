"""The stages that make a model and measure it: train or import, quantise, evaluate. Each calls what its command calls.

A stage gets a folder that may hold what a killed run of it has left, and goes on from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from tripool.batch.pipeline.artefacts import Artefact, Made
from tripool.batch.pipeline.config import COMPARED, Eval, Pipeline, PipelineError, Train
from tripool.checkpoints import open_checkpoint
from tripool.checkpoints.content import content_hash, json_hash, write_durably
from tripool.quant import QuantizeError, Side, Techniques, compare, quantize, read_tasks, read_windows, score
from tripool.quant.evaluate import Arithmetic
from tripool.quant.options import BUNDLED_TEXT
from tripool.quant.tasks import digest
from tripool.text import Tokenizer
from tripool.train.config import read_config
from tripool.train.run import HELD_OUT_FILE, MODEL_FOLDER
from tripool.train.run import train as run_training
from tripool.train.state import FILE as STATE_FILE

Tell = Callable[[str], None]
_WINDOW = 512
"""Tokens read at a time for calibration, as `tripool quantize` does."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on its way: what opens it, and the hash of its contents."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class Stage:
    """What decides an artefact, and what makes it."""

    name: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    run: Callable[[Path], Made]


# ---- train or import ------------------------------------------------------------------------------------------------


def train_stage(pipeline: Pipeline, source: Train, tell: Tell) -> Stage:
    given = pipeline.path(source.config)
    config, data = read_config(str(given) if given.suffix == ".toml" else source.config), pipeline.path(source.data)
    if not any(data.glob("*.jsonl")):
        raise PipelineError(f"{data} has no documents", hint="train.data is a folder of *.jsonl files")
    with open_checkpoint(config.data.text) as checkpoint:
        tokenizer = json_hash([checkpoint.text.tokenizer_json, checkpoint.text.chat_template])
    inputs = {"data": content_hash(data, "*.jsonl"), "tokenizer": tokenizer}

    def run(folder: Path) -> Made:
        done = run_training(config, data, folder, resume=True, tell=tell)
        figures = {name: done.held_out[name] for name in ("held_out_loss", "held_out_perplexity") if done.held_out}
        return Made(folder / MODEL_FOLDER, figures, spent=(STATE_FILE, HELD_OUT_FILE))

    return Stage("train", config.fingerprint(), inputs, run)


def import_stage(name: str) -> tuple[Stage, Model]:
    """The model stays where it is; the artefact names it with the hash of its contents."""
    with open_checkpoint(name) as checkpoint:
        path = checkpoint.path.absolute()
    model = Model(str(path), content_hash(path))

    def run(folder: Path) -> Made:
        write_durably(folder / "import.json", {"model": name, "content": model.content})
        return Made(folder / "import.json")

    return Stage("import", {"model": name}, {"model": model.content}, run), model


def trained(artefact: Artefact) -> Model:
    return Model(str(artefact.path / artefact.output), artefact.content)


# ---- quantise -------------------------------------------------------------------------------------------------------


def quantize_stage(pipeline: Pipeline, source: Model, tell: Tell) -> Stage:
    options = pipeline.quantize
    assert options is not None
    settings = {name: value for name, value in asdict(options).items() if name != "calibration"}
    calibration = pipeline.path(options.calibration) if options.calibration else BUNDLED_TEXT
    if not calibration.is_file():
        raise PipelineError(f"there is no {calibration}", hint="quantize.calibration is a file of plain text")
    techniques = Techniques(**{name: value for name, value in settings.items() if name != "tokens"})
    inputs = {"model": source.content, "calibration": content_hash(calibration)}

    def run(folder: Path) -> Made:
        target = folder / "model"
        if (target / "config.json").exists() and not (target / ".quantize").exists():
            return Made(target)  # killed between the last file and the note
        try:
            _quantize(source, target, calibration, options.tokens, techniques, tell)
        except QuantizeError:
            if not target.exists():
                raise
            tell("quantize: what was begun is of other files; from the beginning")
            shutil.rmtree(target)
            _quantize(source, target, calibration, options.tokens, techniques, tell)
        return Made(target)

    return Stage("quantize", settings, inputs, run)


def _quantize(source: Model, target: Path, calibration: Path, tokens: int, techniques: Techniques, tell: Tell) -> None:
    with open_checkpoint(Path(source.path)) as checkpoint:
        windows = []
        if tokens:
            windows = read_windows(calibration, Tokenizer(checkpoint.text), num_tokens=tokens, window=_WINDOW)

        def said(done: int, total: int, what: str) -> None:
            tell(f"quantize: {done} of {total}, {what}")

        quantize(checkpoint, target, techniques=techniques, windows=windows, on_progress=said)


# ---- evaluate -------------------------------------------------------------------------------------------------------


def eval_stage(pipeline: Pipeline, model: Model, before: Model, tell: Tell) -> Stage:
    """`before`: the model that was quantised, which the new one is compared with."""
    options = pipeline.eval
    settings = {name: value for name, value in asdict(options).items() if name not in ("text", "tasks", "reference")}
    inputs, reference = {"model": model.content}, before
    if options.text:
        text = pipeline.path(options.text)
        if not text.is_file():
            raise PipelineError(f"there is no {text}", hint="eval.text is a file of plain text")
        if options.reference:
            with open_checkpoint(pipeline.model(options.reference)) as checkpoint:
                path = checkpoint.path
            reference = Model(str(path), content_hash(path))
        inputs |= {"text": content_hash(text), "reference": reference.content}
    if options.tasks:
        inputs["tasks"] = digest(read_tasks(pipeline.path(options.tasks)))

    def run(folder: Path) -> Made:
        figures: dict[str, float] = {}
        report: dict[str, Any] = {}
        if options.text:
            compared = _compare(reference, model, options, pipeline.path(options.text), tell)
            figures |= {name: compared[name] for name in COMPARED}
            report["text"] = compared
        if options.tasks:
            scores = _score(model, options, pipeline.path(options.tasks), tell)
            report["tasks"] = scores
            figures |= {f"{one['task']}.{name}": value for one in scores for name, value in one["figures"].items()}
        (folder / "figures.json").write_text(json.dumps(report, indent=1, ensure_ascii=False), "utf-8")
        return Made(folder / "figures.json", figures)

    return Stage("eval", settings, inputs, run)


def _compare(reference: Model, model: Model, options: Eval, text: Path, tell: Tell) -> dict[str, float]:
    sides, context = [], max(options.window, options.answer_tokens + 64)
    with open_checkpoint(Path(reference.path)) as checkpoint:
        windows = read_windows(text, Tokenizer(checkpoint.text), num_tokens=options.tokens, window=options.window)
    for one, arithmetic in ((reference, "float32"), (model, options.precision)):
        with open_checkpoint(Path(one.path)) as checkpoint:
            kind = cast(Arithmetic, arithmetic)
            sides.append(Side(checkpoint, kind, window=context, num_answers=options.answers))
    if sides[0].vocab != sides[1].vocab:
        problem = f"the reference has {sides[0].vocab} tokens, the model {sides[1].vocab}"
        raise PipelineError(problem, hint="compare two forms of one model")

    def said(done: int, total: int) -> None:
        tell(f"eval: window {done} of {total}")

    found = compare(
        sides[0], sides[1], windows, num_answers=options.answers, answer_tokens=options.answer_tokens, on_progress=said
    ).as_dict()
    found |= {"perplexity": found.pop("perplexity_b"), "reference_perplexity": found.pop("perplexity_a")}
    return found


def _score(model: Model, options: Eval, file: Path, tell: Tell) -> list[dict[str, Any]]:
    def said(done: int, total: int) -> None:
        tell(f"eval: question {done} of {total}")

    with open_checkpoint(Path(model.path)) as checkpoint:
        scores = score(checkpoint, cast(Arithmetic, options.precision), read_tasks(file), on_progress=said)
    return [asdict(one) for one in scores]
