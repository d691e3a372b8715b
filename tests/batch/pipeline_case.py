"""A pipeline of the smallest network: documents to train it on, a text and tasks, all made here by seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from train.small import small_config, small_network, write_documents
from tripool.checkpoints import open_checkpoint
from tripool.train.config import CONFIGS
from tripool.train.export import export

SENTENCE = "The fox ran to the river and the rain came down on the stones. "
QUESTIONS = [
    {"question": f"After {word} comes", "choices": ["two", "a long word", "nothing at all"], "answer": number % 3}
    for number, word in enumerate(("one", "rain", "bread"))
]
BROKEN_TEMPLATE = "{{ raise_exception('this template is broken') }}"


def small_checkpoint(folder: Path, template: str | None = None) -> Path:
    """Random weights, with the bundled model's tokenizer and another chat template."""
    config = small_config()
    with open_checkpoint("tiny") as checkpoint:
        text = checkpoint.text
    if template is not None:
        text = dataclasses.replace(text, chat_template=template)
    export(small_network(config), config.model, text, folder)
    return folder


def write_case(folder: Path, num_documents: int = 200) -> Path:
    """The pipeline's file: trains, quantises, reads a text and three questions."""
    write_documents(folder / "corpus", num_documents)
    config = (CONFIGS / "smoke.toml").read_text("utf-8")
    for old, new in (
        ("steps = 40", "steps = 4"), ("save_steps = 20", "save_steps = 1"), ("eval_steps = 20", "eval_steps = 100"),
        ("row_tokens = 256", "row_tokens = 96"), ("line_s = 2", "line_s = 0"),
    ):  # fmt: skip
        assert config.count(old) == 1, old
        config = config.replace(old, new)
    (folder / "net.toml").write_text(config, "utf-8")
    (folder / "text.txt").write_text(SENTENCE * 12, "utf-8")
    (folder / "q.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS), "utf-8")
    return write_file(folder, source='[train]\nconfig = "net.toml"\ndata = "corpus"\n')


def write_file(
    folder: Path,
    name: str = "pipeline",
    *,
    source: str,
    quantize: str = "tokens = 96\nkeep = 0.1",
    gate: str = 'max = {perplexity_change = 0.5}\nmin = {"q.acc" = 0.0}',
    more: str = "",
) -> Path:
    file = folder / f"{name}.toml"
    file.write_text(
        f'name = "story"\nregistry = "registry"\nfolder = "run"\n{source}\n'
        f"[quantize]\n{quantize}\n"
        '[eval]\ntext = "text.txt"\ntasks = "q.jsonl"\ntokens = 128\nwindow = 64\nanswers = 1\nanswer_tokens = 4\n'
        f"[gate]\n{gate}\n{more}",
        "utf-8",
    )
    return file
