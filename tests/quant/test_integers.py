"""Stored integers reach the 8-bit kernels as they are, and nothing is rounded twice."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from oracle.cases import CASES
from tripool import LLM, SamplingParams
from tripool.checkpoints import open_checkpoint
from tripool.checkpoints.write import quantise_rows
from tripool.kernels import CPU8
from tripool.kernels.cpu8.library import variants
from tripool.kernels.cpu8.pack import GROUP, PANEL, Packed, quantise
from tripool.kernels.cpu8.sublayers import Linear8
from tripool.kernels.ref.int8 import round_rows
from tripool.models import load_model

BY_NAME = {case.name: case for case in CASES}

pytestmark = pytest.mark.skipif(not variants(), reason="no 8-bit kernels were compiled here")


def unpacked(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [rows, width] and scales [rows, groups] out of what the kernels read."""
    panels, groups = packed._panels.shape[:2]
    body, tail = packed._panels.split([GROUP * PANEL, 4 * PANEL], dim=2)
    steps = body.view(panels, groups, GROUP // 4, 2, 16, 4).permute(0, 3, 4, 1, 2, 5).reshape(panels * PANEL, -1)
    scales = tail.contiguous().view(torch.float32).transpose(1, 2).reshape(panels * PANEL, groups)
    return steps.to(torch.int16) - 128, scales


def test_rows_with_a_scale_keep_their_integers_and_others_find_their_own() -> None:
    rng = torch.Generator().manual_seed(3)
    integers = torch.randint(-128, 128, (40, 150), generator=rng)
    scales = torch.rand(40, generator=rng) * 10.0 ** torch.randint(-6, 3, (40,), generator=rng)
    scales[5] = 0
    weight = integers * scales[:, None]
    weight[5] = torch.randn(150, generator=rng)
    steps, found = quantise(weight, scales)
    rows = [i for i in range(40) if i != 5]
    assert torch.equal(steps.flatten(1)[rows, :150], integers[rows].to(torch.int8))
    assert torch.equal(found[rows], scales[rows, None].expand(-1, 3))
    assert torch.equal(found[5], quantise(weight)[1][5])


@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (96, 320)])
def test_a_linear_multiplies_with_the_stored_integers(shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(shape[1])
    integers, scale = quantise_rows(torch.randn(*shape, generator=rng) ** 3)
    weight, x = integers * scale, torch.randn(7, shape[1], generator=rng)
    ours = Linear8(weight, None, scale.view(-1))(x)
    wanted = round_rows(x).double() @ weight.double().T
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_served_network_holds_the_checkpoint_s_integers(made_of) -> None:
    """Dense, expert, latent and MTP weights alike, in the order in which the kernels read them."""
    made = made_of(BY_NAME["v3-groups"])
    stored = {key: v for path in made.target.glob("*.safetensors") for key, v in load_file(path).items()}
    with open_checkpoint(made.target) as checkpoint:
        model = load_model(checkpoint, kernels=CPU8)
    down = "model.layers.0.mlp.down_proj.weight"
    out = "model.layers.1.self_attn.o_proj.weight"
    expert = "model.layers.2.mlp.experts.4.down_proj.weight"
    dense, moe = model._layers[0].mlp, model._layers[2].mlp
    experts = len(model._layers[2].mlp._keep[3]) // 2 - 1  # the shared expert's pair comes last
    held = {
        down: dense._keep[2],
        out: model._layers[1].attention._keep[1][2],
        expert: moe._keep[3][experts + 4],
    }
    checked = 0
    for key, packed in held.items():
        if stored[key].dtype != torch.int8:
            continue  # stayed in floats
        rows, width = stored[key].shape
        steps, scales = unpacked(packed)
        assert torch.equal(steps[:rows, :width], stored[key].to(torch.int16)), key
        assert torch.equal(scales[:rows], stored[f"{key}_scale"].expand(-1, scales.shape[1])), key
        checked += 1
    assert checked >= 2


def test_the_engine_serves_it(made_of) -> None:
    made = made_of(BY_NAME["v3-groups"])
    prompts = [window[:40] for window in made.windows]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(made.target), threads=1) as together, LLM(str(made.target), threads=1, mtp=False) as plain:
        answers = [one.choices[0].token_ids for one in together.generate(prompts, params)]
        assert answers == [one.choices[0].token_ids for one in plain.generate(prompts, params)]
        assert all(len(answer) == 8 for answer in answers)
