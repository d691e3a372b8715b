"""A tokenizer small enough for the small vocabularies: trained here, on a few sentences."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

SPECIALS = ["<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_LINES = [
    "three pools of peers serve one request after the other",
    "a block holds sixty four tokens and nobody writes it twice",
    "the prompt is read in chunks, the answer is written token by token",
    "what you simulate is what you run, and what breaks gets fixed first",
    "every number in a table was measured by a script that anyone can start",
    "an odd size finds the mistake that a round size hides",
]


def train_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.decoder = MetaspaceDecoder()
    trainer = BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(_LINES, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size
    return tokenizer
