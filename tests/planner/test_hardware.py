"""Descriptions of hardware: every number with its source, odd files refused by name."""

from __future__ import annotations

import re

import pytest

from tripool.planner.errors import BadDescription
from tripool.planner.facts import KINDS
from tripool.planner.hardware import hardware_names, named_hardware, parse_hardware
from tripool.planner.probe import Probed, describe, probe


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_has_a_source(name: str) -> None:
    hardware = named_hardware(name)
    assert len(hardware.facts) > 30
    assert all(fact.source and fact.kind in KINDS for fact in hardware.facts.values())
    assert {plane.kind for plane in hardware.planes} == {"memory", "transfer", "service"}


def test_what_the_issue_names_is_there() -> None:
    families = {named_hardware(name).family for name in hardware_names()}
    hopper, blackwell = {"H20", "H20-3e", "H100", "H800", "H200"}, {"B200", "GB200", "GB300"}
    assert families == {"910C", "920C", "950PR", "950DT", "MI300X", "MI355X"} | hopper | blackwell


def test_published_figures_of_the_supernode() -> None:
    chip = named_hardware("ascend-910c")
    assert chip.ranks == 2 and chip.domain_ranks == 768
    assert chip.flops["int8"] * chip.ranks == pytest.approx(1504e12)
    assert chip.hbm_bytes * chip.ranks == pytest.approx(128e9)
    assert not chip.supports("fp8")
    assert chip.plane("transfer").gb_s == 50 and chip.plane("memory").multi_path


def test_few_constants_are_calibrated() -> None:
    """Those fixed by rows, one each; those fixed by ablations are named so."""
    fixed_by_rows = {}
    for name in hardware_names():
        calibrated = {k: f for k, f in named_hardware(name).facts.items() if f.kind == "calibrated"}
        fixed_by_rows[name] = [key for key, fact in calibrated.items() if fact.source.startswith("row:")]
        assert all(fact.source.startswith(("row:", "ablation:")) for fact in calibrated.values())
    stack = ["overheads.prefill_stack"]
    assert {name: keys for name, keys in fixed_by_rows.items() if keys} == {
        "ascend-910c": stack, "h100": stack, "b200": ["overheads.host_us"],
        "mi300x": ["overheads.layer_us"], "mi355x": ["overheads.layer_us"],
    }  # fmt: skip


def test_one_software_for_chips_of_one_vendor() -> None:
    """What a layer takes over its operators is no property of a chip: a weaker one must not plan faster by it."""
    for names in (("h100", "h800", "h200", "h20", "h20-3e", "b200", "gb200-nvl72", "gb300-nvl72"),):
        assert len({named_hardware(name).prefill_stack for name in names}) == 1


def text_of(**changes: str) -> str:
    """A good description with some lines replaced."""
    text = describe(Probed(gemm_flops=1e12, copy_bytes_per_s=1e11, memory_bytes=64e9, num_cores=8))
    for key, line in changes.items():
        text, count = re.subn(rf"^{key} = .*$", line, text, flags=re.MULTILINE)
        assert count, key
    return text


def test_a_description_of_ones_own() -> None:
    hardware = parse_hardware(text_of(hbm_gb='hbm_gb = { value = 100, source = "mine" }'), "mine.toml")
    assert hardware.hbm_bytes == 100e9


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hbm_gb": ""}, "chip.hbm_gb' is missing"),
        ({"hbm_gb": "hbm_gb = 100"}, "chip.hbm_gb"),
        ({"hbm_gb": "hbm_gb = { value = 100 }"}, "no source"),
        ({"hbm_gb": 'hbm_gb = { value = -1, source = "x" }'}, "not a number from"),
        ({"hbm_gb": 'hbm_gb = { value = true, source = "x" }'}, "True"),
        ({"hbm_gb": 'hbm_gb = { value = 1, source = "x", kind = "guessed" }'}, "guessed"),
        ({"bf16": ""}, "must hold bf16"),
        ({"kind": 'kind = "memory"'}, "one each"),
        ({"kind": 'kind = "pigeons"'}, "needs a name and a kind"),
        ({"title": "title = 3"}, "title"),
        ({"name": "name ="}, "not TOML"),
    ],
)
def test_odd_descriptions_are_refused_by_name(changes: dict[str, str], named: str) -> None:
    with pytest.raises(BadDescription, match=re.escape(named)):
        parse_hardware(text_of(**changes), "odd.toml")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadDescription, match="ascend-910c"):
        named_hardware("abacus")


def test_the_probe_measures_this_machine() -> None:
    found = probe()
    assert found.gemm_flops > 1e8 and found.copy_bytes_per_s > 1e8 and found.memory_bytes > 1e8
    hardware = parse_hardware(describe(found), "probe")
    assert hardware.flops["bf16"] == pytest.approx(found.gemm_flops, rel=1e-4)
    assert hardware.facts["chip.hbm_tb_s"].kind == "measured"
