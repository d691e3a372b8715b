"""Echoes: streams that one unit's rounding disturbed, carried through later layers and measured there."""

from __future__ import annotations

import pytest
import torch

from oracle.cases import CASES
from oracle.close import assert_close
from tripool.checkpoints import open_checkpoint
from tripool.models import read_arch
from tripool.models.loader import FromCheckpoint
from tripool.quant import Techniques, quantize
from tripool.quant.folding import Factors
from tripool.quant.parts import layer_parts
from tripool.quant.sensitivity import Echo, disturbance, echoes_of, follow
from tripool.quant.stream import Stream

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["llama-wide-heads", "v3-groups"])
def test_an_echo_goes_through_later_layers_as_the_stream_does(folder_of, made_of, tmp_path, name: str) -> None:
    made = made_of(BY_NAME[name])
    with open_checkpoint(made.source) as checkpoint:
        plain = Techniques(suppress=False, keep=0)
        quantize(checkpoint, tmp_path / "int8", techniques=plain, windows=made.windows)
        shards = sorted((tmp_path / "int8").glob("model-*.safetensors"))
        arch = read_arch(checkpoint)
        stream = Stream.begin(arch, checkpoint, made.windows).start(2, 60)
        first, second = layer_parts(arch, 0), layer_parts(arch, 1)
        born = follow(checkpoint, first, Factors(), shards[1], stream, [])
        assert {echo.unit for echo in born} == {f"{first.prefix}.{one.unit}" for one in first.inputs}
        alone = Stream(arch, stream.windows, [state.clone() for state in born[0].states])
        alone.observe(second, FromCheckpoint(checkpoint))
        later = follow(checkpoint, second, Factors(), shards[2], stream, echoes_of(born[0].tensors()))
    assert [echo.age for echo in later] == [1] + [0] * (len(later) - 1)
    assert later[0].unit == born[0].unit
    for found, wanted in zip(later[0].states, alone.states, strict=True):
        assert_close(found, wanted)
    assert all(0 < disturbance(echo, stream) < 0.2 for echo in later)


def test_each_token_is_disturbed_relative_to_itself(folder_of) -> None:
    """Otherwise a part that spoils every token but one very long one would look harmless."""
    rng = torch.Generator().manual_seed(4)
    case = BY_NAME["llama-3"]
    with open_checkpoint(folder_of(case)) as checkpoint:
        arch = read_arch(checkpoint)
    wanted = torch.randn(10, 6, generator=rng)
    wanted[0] *= 1000
    spoilt = wanted * 1.1
    spoilt[0] = wanted[0]
    stream = Stream(arch, [list(range(10))], [wanted])
    assert abs(disturbance(Echo("one", 0, [spoilt]), stream) - 0.9 * 0.01) < 1e-4
    assert disturbance(Echo("one", 0, [wanted]), stream) == 0


def test_echoes_are_read_as_they_were_kept() -> None:
    some = [Echo(f"model.layers.{i}.mlp.down_proj", i, [torch.full((2, 3), float(10 * i + w)) for w in range(12)])
            for i in range(2)]  # fmt: skip
    again = echoes_of({name: values for echo in some for name, values in echo.tensors().items()})
    assert [(echo.unit, echo.age) for echo in again] == [(echo.unit, echo.age) for echo in some]
    for a, b in zip(again, some, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.states, b.states, strict=True))
