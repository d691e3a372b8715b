"""The named models as transformers sees them: the bundled one with its int8 weights multiplied out, SmolLM2 as GGUF."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from oracle.quiet import quiet
from oracle.reference import Greedy, Reference

QUESTIONS = [
    "Tell me a story about a fox.",
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about rain.",
    "Hello! Who are you?",
    "List three fruits.",
    "Explain how a bicycle stays upright.",
    "What is 2 + 2?",
    "Give me some advice for sleeping better.",
    "Describe a sunny day at the beach.",
    "How do I make soup from vegetables?",
    "What do bees do in winter?",
    "Name two planets and say how they differ.",
    "My dog is afraid of thunder. What can I do?",
    "Write one sentence with the word 'lantern'.",
    "Is a tomato a fruit or a vegetable?",
    "How was paper made long ago?",
    "Say something kind to a tired teacher.",
    "What should I see in an old town near the sea?",
    "Explain what a prime number is, with an example.",
]


def dequantise(source: Path, folder: Path) -> Path:
    """A copy of an int8 folder with every weight as int8 · scale in float32, in plain Hugging Face layout."""
    folder.mkdir(exist_ok=True)
    stored = {name: values for path in source.glob("*.safetensors") for name, values in load_file(path).items()}
    plain: dict[str, torch.Tensor] = {}
    for name, values in stored.items():
        if values.dtype == torch.int8:
            plain[name] = values.float() * stored[f"{name}_scale"]
        elif not name.endswith("_scale"):
            plain[name] = values.float()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


class ChatReference:
    """Template, tokenizer and network of a folder or of a GGUF file, all transformers' own."""

    def __init__(self, path: Path) -> None:
        folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        with quiet():
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(folder, **file)
        self._reference = Reference.load_gguf(path) if file else Reference.load(path)

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    def answers(self, questions: Sequence[str], count: int) -> list[Greedy]:
        return self._reference.greedy([self.prompt(q) for q in questions], count)

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
