"""Llama: Llama 2 and 3, SmolLM2, R1-Distill-Llama."""

from __future__ import annotations

from tripool.models.arch import Arch, ConfigReader, GqaShape
from tripool.models.rope import read_rope

MODEL_TYPES = ("llama",)


def read_arch(config: ConfigReader) -> Arch:
    config.demand("hidden_act", ("silu", "swish"), "silu")
    heads = config.int("num_attention_heads")
    head_dim = config.int("head_dim", config.int("hidden_size") // max(heads, 1))
    attention_bias = config.flag("attention_bias", False)
    shape = GqaShape(
        heads=heads,
        kv_heads=config.int("num_key_value_heads", heads),
        head_dim=head_dim,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
    )
    return dense_arch("llama", config, shape)


def dense_arch(family: str, config: ConfigReader, shape: GqaShape) -> Arch:
    """An architecture with this attention and a dense MLP in every layer."""
    config.positive("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    config.positive("max_position_embeddings")
    if shape.kv_heads == 0 or shape.heads % shape.kv_heads:
        raise config.error(f"{shape.heads} attention heads cannot share {shape.kv_heads} key heads evenly")
    return Arch(
        family=family,
        vocab=config.int("vocab_size"),
        hidden=config.int("hidden_size"),
        layers=config.int("num_hidden_layers"),
        context_tokens=config.int("max_position_embeddings"),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=read_rope(config, shape.head_dim),
        attention=shape,
        dense_width=config.int("intermediate_size"),
        mlp_bias=config.flag("mlp_bias", False),
    )
