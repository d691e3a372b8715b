from __future__ import annotations

import random
from itertools import pairwise

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from tripool.checkpoints import GgufCheckpoint
from tripool.errors import CheckpointCorrupt, CheckpointMissing, WrongArchitecture

TEXTS = [
    "Hello world, it's 2024 and we've 12345 things.",
    "x =  12345\n\n\n   100  200\t3\r\n",
    "naïve café Ünïcödé e\u0301 日本語テキスト 한국어 текст ٣٤ ²³ ½ 🙂👍🏽",
    "<|begin|>user\nhi 42<|end|>\n  def f(a,b): return a+b # ok!!",
    "  leading and trailing  ",
    "",
    " ",
    "HTTPServer's don't I'LL we'Re",
]


def varied_texts() -> list[str]:
    source = random.Random(11)
    ranges = [
        (32, 126),
        (48, 57),
        (97, 122),
        (0xA0, 0x17F),
        (0x400, 0x4FF),
        (0x3040, 0x30FF),
        (0x4E00, 0x4FFF),
        (10, 10),
        (32, 32),
    ]
    made = [
        "".join(chr(source.randint(*source.choice(ranges))) for _ in range(source.randint(1, 50))) for _ in range(300)
    ]
    return TEXTS + made


@pytest.fixture
def text_of(tmp_path, write_gguf, llama_parts):
    def read(metadata):
        sizes, tensors = llama_parts()
        write_gguf(tmp_path / "m.gguf", "llama", sizes | metadata, tensors)
        with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
            return checkpoint.text

    return read


def same(ours: Tokenizer, encode, texts: list[str]) -> None:
    for text in texts:
        assert ours.encode(text, add_special_tokens=False).ids == encode(text), text


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
ORIGINALS = {
    "gpt-2": BYTE_LEVEL,
    "default": BYTE_LEVEL,
    # SmolLM2's own tokenizer.json. Transformers' conversion of a GGUF forgets the digits, so it is no oracle here.
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    # DeepSeek-V3's own tokenizer.json.
    "deepseek-v3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥\u3040-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(
                Regex(
                    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_tokenises_like_the_tokenizer_the_file_was_made_from(text_of, train, vocabulary, pre):
    original = train(ORIGINALS[pre])
    text = text_of(vocabulary(original, pre=pre))
    ours = Tokenizer.from_str(text.tokenizer_json)
    same(ours, lambda t: original.encode(t).ids, varied_texts())
    for sample in varied_texts():
        ids = original.encode(sample).ids
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    assert text.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert text.end_ids == {original.token_to_id("<|end|>")}


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "deepseek-r1-qwen"])
def test_tokenises_like_transformers(tmp_path, text_of, byte_level, vocabulary, pre):
    """Where transformers' conversion of the same file is right, it is the oracle."""
    text = text_of(vocabulary(byte_level, pre=pre))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = Tokenizer.from_str(text.tokenizer_json)
    composed = normalizers.NFC()  # Qwen's own normaliser, which transformers' conversion leaves out
    prepare = composed.normalize_str if "qwen" in pre else str
    same(ours, lambda t: theirs(prepare(t), add_special_tokens=False)["input_ids"], varied_texts())


def pieces(text_of, vocabulary, tokenizer: Tokenizer, pre: str, text: str) -> list[str]:
    ours = Tokenizer.from_str(text_of(vocabulary(tokenizer, pre=pre)).tokenizer_json)
    return [text[start:end] for _, (start, end) in ours.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "x =  12", ["x", " =", "  ", "1", "2"]),
        ("llama-bpe", "a  12345 b!\n\nI'LL", ["a", " ", " ", "123", "45", " b", "!\n\n", "I", "'LL"]),
        ("qwen2", "a  123 b", ["a", " ", " ", "1", "2", "3", " b"]),
        ("deepseek-llm", "ça va?\n12 中文a", ["ç", "a", " va", "?", "\n", "12", " ", "中文", "a"]),
        ("deepseek-coder", "ab, 12\n中", ["ab", ",", " ", "1", "2", "\n", "中"]),
        ("deepseek-v3", "a.b 1234中c", ["a", ".b", " ", "123", "4", "中", "c"]),
    ],
)
def test_text_is_cut_as_the_model_learned_it(text_of, vocabulary, byte_level, pre, text, expected):
    assert pieces(text_of, vocabulary, byte_level, pre, text) == expected


@pytest.mark.parametrize(
    ("pre", "more", "adds"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_the_begin_token_is_added_when_the_model_wants_it(text_of, vocabulary, byte_level, pre, more, adds):
    ours = Tokenizer.from_str(text_of(vocabulary(byte_level, pre=pre, **more)).tokenizer_json)
    assert (ours.encode("fox").ids[0] == ours.token_to_id("<|begin|>")) == adds
    assert ours.encode("fox", add_special_tokens=False).ids[0] != ours.token_to_id("<|begin|>")


def test_template_and_other_ends_are_passed_on(text_of, vocabulary, byte_level):
    more = {"eot_token_id": 7, "eom_token_id": 8, "unknown_token_id": 2, "padding_token_id": 1}
    text = text_of(vocabulary(byte_level, pre="gpt-2", **more) | {"tokenizer.chat_template": "{{ messages }}"})
    assert text.chat_template == "{{ messages }}"
    assert text.end_ids == {1, 7, 8}
    assert text.special_tokens["pad_token"] == "<|end|>"
    assert text.special_tokens["unk_token"] == "<|pad｜>"


def test_control_tokens_are_special_and_the_users_own_are_not(text_of, vocabulary, byte_level):
    metadata = vocabulary(byte_level, pre="gpt-2")
    index = metadata["tokenizer.ggml.tokens"].index("the") if "the" in metadata["tokenizer.ggml.tokens"] else 260
    metadata["tokenizer.ggml.token_type"][index] = 4
    ours = Tokenizer.from_str(text_of(metadata).tokenizer_json)
    added = ours.get_added_tokens_decoder()
    assert not added[index].special
    assert added[0].special
    assert ours.encode("a<|pad｜>b").ids[1] == byte_level.token_to_id("<|pad｜>")


def sentence_pieces() -> dict[str, object]:
    """Characters, bytes and some words, with scores that fall as a real vocabulary's do."""
    words = [
        "▁t",
        "he",
        "▁the",
        "in",
        "▁f",
        "ox",
        "▁fox",
        "er",
        "▁a",
        "an",
        "▁an",
        "▁q",
        "ck",
        "ui",
        "▁qui",
        "▁quick",
        "▁▁",
    ]
    characters = list("▁abcdefghijklmnopqrstuvwxyz.,ü中<>/")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *characters, "</", "s>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(characters) + 2)]
    scores = [0.0] * 259 + [float(-i) for i in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def best_first(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """The definition, slowly: join the neighbours whose union scores best, leftmost first, until none is a token."""
    ids = {token: index for index, token in enumerate(tokens)}
    symbols = list(("▁" + text).replace(" ", "▁"))
    while True:
        joins = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not joins:
            break
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    by_byte = [[ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [index for part in by_byte for index in part]


SENTENCES = [
    "the quick fox",
    "an inner ant",
    "ü 中 🙂 x",
    "quick quick  the",
    "a, the fox. in",
    "theinn er anan",
    "tthee",
]


def test_sentence_pieces_join_by_score(text_of):
    metadata = sentence_pieces()
    ours = Tokenizer.from_str(text_of(metadata).tokenizer_json)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    same(ours, lambda t: best_first(t, tokens, scores), SENTENCES)
    for sentence in SENTENCES:
        assert ours.decode(ours.encode(sentence).ids) == sentence
    assert ours.encode("the").ids[0] == 1
    assert ours.encode("a</s>", add_special_tokens=False).ids[-1] == 2


def test_sentence_pieces_like_transformers(tmp_path, text_of):
    ours = Tokenizer.from_str(text_of(sentence_pieces()).tokenizer_json)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    same(ours, lambda t: theirs(t, add_special_tokens=False)["input_ids"], SENTENCES)


def test_sentence_pieces_without_a_leading_space(text_of):
    ours = Tokenizer.from_str(text_of(sentence_pieces() | {"tokenizer.ggml.add_space_prefix": False}).tokenizer_json)
    assert ours.encode("he", add_special_tokens=False).tokens == ["he"]
    assert ours.decode(ours.encode(" he").ids) == " he"


def broken(**changes):
    def change(metadata):
        return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}

    return change


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (broken(pre="kimi-k2"), WrongArchitecture, "kimi-k2"),
        (broken(model="bert"), WrongArchitecture, "bert"),
        (broken(merges=["zz zz"]), CheckpointCorrupt, "zz zz"),
        (broken(merges=["alone"]), CheckpointCorrupt, "alone"),
        (broken(token_type=[1, 2]), CheckpointCorrupt, "2 token types"),
        (broken(token_type=["a"]), CheckpointCorrupt, "token_type"),
        (broken(eos_token_id=10**6), CheckpointCorrupt, "eos_token_id"),
        (broken(tokens="abc"), CheckpointCorrupt, "tokens"),
        (broken(model="llama", merges=[1]), CheckpointCorrupt, "merges"),
        (lambda metadata: {}, CheckpointMissing, "no tokenizer"),
        (broken(model=[1, 2]), CheckpointCorrupt, "model"),
        (broken(pre=[1, 2]), CheckpointCorrupt, "pre"),
        (broken(add_bos_token=[1]), CheckpointCorrupt, "add_bos_token"),
        (broken(bos_token_id=True), CheckpointCorrupt, "bos_token_id"),
        (broken(eos_token_id=[1]), CheckpointCorrupt, "eos_token_id"),
        (lambda metadata: metadata | {"tokenizer.chat_template": [1]}, CheckpointCorrupt, "chat_template"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(text_of, vocabulary, byte_level, change, error, says):
    with pytest.raises(error, match=says) as caught:
        text_of(change(vocabulary(byte_level, pre="gpt-2")))
    assert caught.value.file.endswith("m.gguf")
    assert caught.value.hint


def test_pieces_without_scores_are_refused(text_of):
    metadata = sentence_pieces()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointCorrupt, match="score"):
        text_of(metadata)


def test_tokens_too_long_to_be_cut_are_refused(text_of):
    metadata = sentence_pieces()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-1], "a" * 3_000_000]
    with pytest.raises(CheckpointCorrupt, match="characters"):
        text_of(metadata)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-1], "a" * 1000]
    with pytest.raises(CheckpointCorrupt, match="too long to be pieces"):
        text_of(metadata)


def test_ends_that_no_logit_stands_for_are_dropped(tmp_path, write_gguf, llama_parts, vocabulary, byte_level):
    metadata, tensors = llama_parts()
    spelled = vocabulary(byte_level, pre="gpt-2")
    tokens = [*spelled["tokenizer.ggml.tokens"], *(f"<{i}>" for i in range(10_000))]
    types = [*spelled["tokenizer.ggml.token_type"], *[1] * 10_000]
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    more["tokenizer.ggml.eot_token_id"] = len(tokens) - 1
    write_gguf(tmp_path / "m.gguf", "llama", metadata | spelled | more, tensors)
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.text.end_ids
        assert max(checkpoint.text.end_ids) < checkpoint.config["vocab_size"]
