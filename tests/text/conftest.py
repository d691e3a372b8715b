"""Small tokenizers of every supported kind, trained here on a text with many scripts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tripool.text import TextFiles
from tripool.text import Tokenizer as TripoolTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "Stop here. Stop there. User: hello\nAssistant: hello, how are you?\n\n",
    "Größe und Übermut führen zu Ärger. Straße, Fuß, Maß.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "敏捷的棕色狐狸跳过了懒狗。今天天气很好,我们去公园吧。",
    "すばやい茶色の狐がのろまな犬を飛び越える。",
    "🙂🙃 emoji 👩‍👩‍👧‍👦 and flags 🇫🇷 mixed 👍🏽 into text",
    "def f(x):\n    return x + 1  # comment\n",
]
SPECIALS = ["<unk>", "<s>", "</s>"]
LLAMA_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
# As converted from GGUF files: the mark is replaced when the tokens are already one string.
LATE_DECODER = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
GEMMA_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
EARLY_METASPACE_DECODER = [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]


def byte_level() -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([AddedToken("<tool>", special=False), AddedToken(" two words", special=False)])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Characters of the corpus's Latin part have tokens; the other scripts are written in byte tokens."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    trained.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in SPECIALS]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in model["merges"]]
    library = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = trained.normalizer
    library.decoder = decoder
    library.add_special_tokens(SPECIALS)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def unigram() -> Tokenizer:
    library = Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    return library


def words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    vocab = {word: i for i, word in enumerate([*SPECIALS, "the", "fox", "dog", "über", "狐"])}
    library = Tokenizer(models.WordLevel(vocab, unk_token="none"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(SPECIALS)
    return library


MAKERS: dict[str, Any] = {
    "byte_level": byte_level,
    "llama": lambda: sentencepiece(decoders.Sequence(LLAMA_DECODER)),
    "late_replace": lambda: sentencepiece(decoders.Sequence(LATE_DECODER)),
    "gemma": lambda: sentencepiece(decoders.Sequence(GEMMA_DECODER)),
    "early_metaspace": lambda: sentencepiece(decoders.Sequence(EARLY_METASPACE_DECODER)),
    "unigram": unigram,
    "words": words,
}


@pytest.fixture(scope="session")
def libraries() -> dict[str, Tokenizer]:
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="session")
def text_files(libraries: dict[str, Tokenizer]) -> dict[str, TextFiles]:
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return {
        name: TextFiles(tokenizer_json=library.to_str(), special_tokens=special_tokens, end_ids=frozenset({2}))
        for name, library in libraries.items()
    }


@pytest.fixture(scope="session")
def tokenizers_by_kind(text_files: dict[str, TextFiles]) -> dict[str, TripoolTokenizer]:
    return {name: TripoolTokenizer(files) for name, files in text_files.items()}


@pytest.fixture(params=list(MAKERS), scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def tokenizer(kind: str, tokenizers_by_kind: dict[str, TripoolTokenizer]) -> TripoolTokenizer:
    """Every kind in turn."""
    return tokenizers_by_kind[kind]


@pytest.fixture(scope="session")
def library(kind: str, libraries: dict[str, Tokenizer]) -> Tokenizer:
    """The same kind's untouched original."""
    return libraries[kind]
