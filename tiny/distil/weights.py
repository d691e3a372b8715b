"""A Llama checkpoint as the few large matrices that a static batch multiplies with. Knows no text and no sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tripool.checkpoints import Checkpoint, open_checkpoint
from tripool.errors import WrongArchitecture
from tripool.models.arch import Arch, GqaShape
from tripool.models.load import read_arch
from tripool.models.rope import amplitude, inverse_frequencies


@dataclass(frozen=True, slots=True)
class Layer:
    norm_in: torch.Tensor
    qkv: torch.Tensor
    """[(heads + 2 kv_heads) · dim, hidden]"""
    out: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    arch: Arch
    shape: GqaShape
    embed: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor
    turns: tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines, float32 [places, dim / 2]."""


@contextmanager
def open_parts(paths: Sequence[Path]) -> Iterator[Checkpoint]:
    """One checkpoint; several paths are parts of one GGUF file, joined in their order."""
    if len(paths) == 1:
        with open_checkpoint(str(paths[0])) as checkpoint:
            yield checkpoint
        return
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "teacher.gguf"
        with whole.open("wb") as file:
            for path in paths:
                file.write(path.read_bytes())
        with open_checkpoint(str(whole)) as checkpoint:
            yield checkpoint


def load_weights(checkpoint: Checkpoint, *, device: str, dtype: torch.dtype, places: int) -> Weights:
    """`places`: how long a row may grow, prompt and answer together."""
    arch = read_arch(checkpoint)
    shape = arch.attention
    if not isinstance(shape, GqaShape) or shape.qkv_bias or shape.out_bias or shape.qk_norm or arch.mlp_bias:
        hint = "the teacher must be of the Llama family, without biases"
        raise WrongArchitecture("this network is not one that the teacher runs", hint=hint, file=checkpoint.path)

    def read(*names: str) -> torch.Tensor:
        pieces = []
        for name in names:
            piece = torch.empty(checkpoint.infos()[name].shape, dtype=torch.float32)
            checkpoint.read(name, piece)
            pieces.append(piece)
        return torch.cat(pieces).to(device=device, dtype=dtype)

    embed = read("model.embed_tokens.weight")
    angles = torch.arange(places, dtype=torch.float32)[:, None] * inverse_frequencies(arch.rope)
    size = amplitude(arch.rope)
    return Weights(
        arch=arch,
        shape=shape,
        embed=embed,
        layers=tuple(_layer(read, f"model.layers.{number}.") for number in range(arch.layers)),
        norm=read("model.norm.weight"),
        head=embed if arch.tied_head else read("lm_head.weight"),
        turns=((angles.cos() * size).to(device), (angles.sin() * size).to(device)),
    )


def _layer(read: Callable[..., torch.Tensor], prefix: str) -> Layer:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return Layer(
        norm_in=read(prefix + "input_layernorm.weight"),
        qkv=read(*(f"{attention}{name}_proj.weight" for name in "qkv")),
        out=read(attention + "o_proj.weight"),
        norm_mlp=read(prefix + "post_attention_layernorm.weight"),
        gate_up=read(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=read(mlp + "down_proj.weight"),
    )
