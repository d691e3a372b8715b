"""Tokenizer, chat template and end tokens from a GGUF file's metadata, in the `tokenizers` library's own JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tripool.checkpoints.gguf.header import Header
from tripool.checkpoints.gguf.pretokenizers import PRE_TOKENIZERS
from tripool.errors import CheckpointCorrupt, CheckpointMissing, WrongArchitecture
from tripool.text.files import TextFiles
from tripool.text.tokenizer_checks import MAX_TOKEN_CHARS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Token types of the format that are used here."""

SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_NAMES = ("eos", "eot", "eom")
MAX_PIECE_CHARS, MAX_CUTS = 2**9, 2**23
"""Limits for one token and for all together: merges are built from every split of a token. Published vocabularies have
a tenth of this.
"""
SPACE = "\u2581"


class _Vocabulary:
    """The metadata's parallel lists, checked once."""

    def __init__(self, header: Header) -> None:
        self._header = header.under("tokenizer.ggml")
        self.flag, self.list_of = self._header.flag, self._header.items
        if "tokenizer.ggml.tokens" not in header.metadata:
            hint = "convert the model again with its tokenizer, or use its Hugging Face folder"
            raise CheckpointMissing("the file has no tokenizer", hint=hint, file=header.path)
        self.tokens: list[str] = self.list_of("tokens", str)
        if max(map(len, self.tokens), default=0) > MAX_TOKEN_CHARS:
            raise self.corrupt(f"a token has more than {MAX_TOKEN_CHARS} characters")
        self.types: list[int] = self.list_of("token_type", int) or [NORMAL] * len(self.tokens)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.types) != len(self.tokens):
            raise self.corrupt(f"{len(self.types)} token types for {len(self.tokens)} tokens")

    def text(self, name: str, default: str) -> str:
        return self._header.text(name, default) or default

    def token_id(self, name: str) -> int | None:
        """Token id of a role such as "bos"; None if the file names none."""
        token_id = self._header.integer(f"{name}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise self.corrupt(f"{name}_token_id is {token_id}, the vocabulary has {len(self.tokens)} tokens")
        return token_id

    def corrupt(self, problem: str) -> CheckpointCorrupt:
        hint = "the file was converted wrongly; fetch it again or convert it again"
        return CheckpointCorrupt(f"tokenizer: {problem}", hint=hint, file=self._header.path)

    def unsupported(self, problem: str, known: Sequence[str]) -> WrongArchitecture:
        hint = f"readable: {', '.join(known)}; or use the model's Hugging Face folder"
        return WrongArchitecture(f"tokenizer: {problem}", hint=hint, file=self._header.path)


def read_text_files(header: Header) -> TextFiles:
    vocabulary = _Vocabulary(header)
    kind = vocabulary.text("model", "none")
    builders = {"gpt2": _byte_level, "llama": _sentence_pieces}
    if kind not in builders:
        raise vocabulary.unsupported(f"kind '{kind}'", tuple(builders))
    tokenizer = builders[kind](vocabulary)
    special_ids = {name: vocabulary.token_id(role) for name, role in SPECIAL_NAMES.items()}
    end_ids = {vocabulary.token_id(role) for role in END_NAMES}
    embedding = header.tensors.get("token_embd.weight")
    num_logits = len(vocabulary.tokens) if embedding is None else embedding.shape[0]
    return TextFiles(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False),
        chat_template=header.text("tokenizer.chat_template"),
        special_tokens={name: vocabulary.tokens[i] for name, i in special_ids.items() if i is not None},
        # The network has no logits for larger ids.
        end_ids=frozenset(token_id for token_id in end_ids if token_id is not None and token_id < num_logits),
    )


def _tokenizer(vocabulary: _Vocabulary, *, adds_begin: bool, **parts: Any) -> dict[str, Any]:
    begin_id = vocabulary.token_id("bos")
    adds_begin = vocabulary.flag("add_bos_token", adds_begin) and begin_id is not None
    begin = vocabulary.tokens[begin_id] if begin_id is not None else ""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _begin_template(begin, begin_id) if adds_begin else None,
        **parts,
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are matched whole in a text before pre-tokenisation: special and user-defined ones."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": vocabulary.ids[token], "content": token, **flags, "special": kind != USER_DEFINED}
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]


def _begin_template(begin: str, begin_id: int | None) -> dict[str, Any]:
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    text_a, text_b = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text_a],
        "pair": [first, text_a, {"SpecialToken": {"id": begin, "type_id": 1}}, text_b],
        "special_tokens": {begin: {"id": begin, "ids": [begin_id], "tokens": [begin]}},
    }


def _model(vocabulary: _Vocabulary, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": merges,
        **options,
    }


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = vocabulary.text("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise vocabulary.unsupported(f"pre-tokenizer '{name}'", tuple(PRE_TOKENIZERS))
    cutting = PRE_TOKENIZERS[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _tokenizer(
        vocabulary,
        adds_begin=cutting.adds_begin,
        normalizer=cutting.normalizer,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(cutting.steps)},
        decoder=byte_level,
        model=_model(vocabulary, _stored_merges(vocabulary), ignore_merges=cutting.whole_words),
    )


def _stored_merges(vocabulary: _Vocabulary) -> list[list[str]]:
    merges = [merge.split(" ", 1) for merge in vocabulary.list_of("merges", str)]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary.ids for part in (*merge, "".join(merge))):
            raise vocabulary.corrupt(f"merge '{' '.join(merge)}' is not of two tokens into a third")
    return merges


def _sentence_pieces(vocabulary: _Vocabulary) -> dict[str, Any]:
    unknown_id = vocabulary.token_id("unknown")
    prefixed = vocabulary.flag("add_space_prefix", True)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        vocabulary,
        adds_begin=True,
        normalizer=None,
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "first" if prefixed else "never",
            "split": False,
        },
        decoder={"type": "Sequence", "decoders": decoders},
        model=_model(
            vocabulary,
            _stored_merges(vocabulary) or _merges_from_scores(vocabulary),
            unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        ),
    )


def _merges_from_scores(vocabulary: _Vocabulary) -> list[list[str]]:
    """SentencePiece merges the neighbours with the best-scoring union: every split of a token in two is a merge, in the
    order of the tokens' scores; among equals the longer left part first."""
    scores = vocabulary.list_of("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.corrupt("it has neither merges nor a score for each token")
    if max(map(len, vocabulary.tokens), default=0) > MAX_PIECE_CHARS or sum(map(len, vocabulary.tokens)) > MAX_CUTS:
        raise vocabulary.corrupt("its tokens are too long to be pieces")
    ranked = []
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue  # control and byte tokens do not result from text
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary.ids and right in vocabulary.ids:
                ranked.append((-score, -len(left), -len(right), left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [[left, right] for *_, left, right in ranked]
