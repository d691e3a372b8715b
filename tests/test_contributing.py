"""CONTRIBUTING.md is true: what it names exists and is what it says, and what it promises about additions holds."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tripool.cli.main import main
from tripool.kernels.cpu8 import library
from tripool.kernels.ops import REFERENCE_OPS, Ops
from tripool.models import load
from tripool.models.arch import Arch, ConfigReader, GqaShape

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
RECIPES = dict(re.findall(r"^## Add (?:a|an) (.*)\n((?:.*\n)*?)(?=^## |\Z)", PAGE, re.MULTILINE))
FOLDERS = ("", "src/tripool/checkpoints/gguf", "src/tripool/kernels/native")
"""Where a file may be that is named without its folder."""


def test_there_are_four_recipes_of_five_steps():
    assert set(RECIPES) == {"model", "kernel", "endpoint", "cache tier"}
    for name, recipe in RECIPES.items():
        assert re.findall(r"^(\d)\. ", recipe, re.MULTILINE) == list("12345"), name


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z][\w.]*:[\w.]+)`", PAGE))))
def test_names(name: str):
    """A name's shape says what it is: SETTINGS, Class, function."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    last = path.split(".")[-1]
    if last.isupper():
        assert not callable(found)
    elif last[0].isupper():
        assert inspect.isclass(found)
    else:
        assert inspect.isfunction(found)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"[`(]([\w./]+(?:/|\.(?:py|md|c|h)))[`)]", PAGE))))
def test_files(name: str):
    name = name.removeprefix(".../gguf/")
    assert any((ROOT / folder / name).exists() for folder in FOLDERS)


def test_commands():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(re.findall(r"make ([a-z]+)[ `]", PAGE)) <= set(targets)
    for verb in set(re.findall(r"`tripool ([a-z]+)`", PAGE)):
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert not ended.value.code


def test_a_model_is_a_file_with_two_names(monkeypatch: pytest.MonkeyPatch):
    for kind, read_arch in load.FAMILIES.items():
        module = inspect.getmodule(read_arch)
        assert module is not None and kind in module.MODEL_TYPES and module.read_arch is read_arch
    monkeypatch.setitem(load.FAMILIES, "newcomer", load.FAMILIES["llama"])
    config = {"model_type": "newcomer", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8, "rms_norm_eps": 1e-5}
    arch = load.arch_of(config, "config.json")
    assert isinstance(arch, Arch) and isinstance(arch.attention, GqaShape)
    with pytest.raises(load.WrongArchitecture, match="'hidden_act'"):
        ConfigReader({"hidden_act": "relu"}, "config.json").demand("hidden_act", ("silu",), "silu")


def test_every_kernel_has_a_plain_version_and_every_c_function_its_arguments():
    for field in fields(Ops):
        assert inspect.getmodule(getattr(REFERENCE_OPS, field.name)).__name__.startswith("tripool.kernels.ref.")
    entries = (ROOT / "src/tripool/kernels/native/tripool.c").read_text("utf-8")
    described = Path(library.__file__).read_text("utf-8")
    for name in re.findall(r"^API \w+ (tripool_\w+)\(", entries, re.MULTILINE):
        assert name in described
