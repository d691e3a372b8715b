"""Files that a user may write: what is out of range, in other units or misspelled is refused by name."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from random import Random

import pytest

from tests.planner.test_search import ask_of
from tripool.errors import InvalidRequest
from tripool.planner.checks import HARDWARE, MODEL, PLANE
from tripool.planner.deployment import read_deployment, write_deployment
from tripool.planner.errors import BadDescription, BadModelConfig
from tripool.planner.hardware import hardware_names, parse_hardware
from tripool.planner.models import model_names, named_model, read_config
from tripool.planner.search import best_deployment


def description(name: str = "h200") -> str:
    return files("tripool.planner.hardware").joinpath(f"{name}.toml").read_text("utf-8")


def config(name: str = "deepseek-v3") -> dict[str, object]:
    return json.loads(files("tripool.planner.models").joinpath(f"{name}.json").read_text("utf-8"))


def changed(key: str, value: str) -> str:
    text, count = re.subn(rf"^({key} = {{ value = )[^,]+", rf"\g<1>{value}", description(), count=1, flags=re.MULTILINE)
    assert count, key
    return text


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hbm_tb_s", "0", "chip.hbm_tb_s' has the value 0"),
        ("gb_s", "0", r"planes[0].gb_s"),
        ("gemm", "6.5", "a share of 1"),
        ("ranks", "1.5", "not a whole number"),
        ("hbm_gb", "141e9", "GB per chip"),
        ("fp8", "1979e12", "TFLOPS per chip"),
        ("watts", "inf", "watts per chip"),
        ("price_per_hour", "nan", "economy.price_per_hour"),
        ("latency_us", '"two"', "microseconds"),
        ("domain_chips", "0", "chips"),
        ("paths", "2.5", "paths"),
    ],
)
def test_numbers_out_of_range_or_in_another_unit(key: str, value: str, said: str) -> None:
    with pytest.raises(BadDescription, match=re.escape(said)):
        parse_hardware(changed(key, value), "mine.toml")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("hbm_usable =", "hbm_useable =", "is it 'hbm_usable'?"),
        ("[economy]", "[economics]", "is it 'economy'?"),
        ("fp8 = {", "fp6 = {", "tflops.fp6"),
        ("multi_path = true", "multipath = true", "is it 'multi_path'?"),
        ('kind = "assumed" }', 'sort = "assumed" }', "is not known"),
        ('title = "NVIDIA H200 SXM"', 'title = "NVIDIA H200 SXM"\nvendor = "NVIDIA"', "'vendor' is not known"),
    ],
)
def test_unknown_keys_are_named(old: str, new: str, said: str) -> None:
    assert old in description()
    with pytest.raises(BadDescription, match=re.escape(said)):
        parse_hardware(description().replace(old, new, 1), "mine.toml")


def test_price_and_power_may_be_unknown_and_are_then_not_made_up() -> None:
    text = re.sub(r"^(price_per_hour|watts) = .*\n", "", description(), flags=re.MULTILINE)
    found = best_deployment(ask_of(hardware=parse_hardware(text, "mine.toml"), chips=16))
    assert found.cost_per_million is None and found.kwh_per_million is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 7168.5}, "not a whole number"),
        ({"num_hidden_layers": -61}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"n_group": 7}, "does not divide"),
        ({"topk_group": 9}, "more than n_group"),
        ({"tie_word_embeddings": "no"}, "true or false"),
        ({"kv_lora_rank": None, "kv_lora_rnk": 512}, "is it 'kv_lora_rank'?"),
        ({"first_k_dense_replace": 99}, "more than num_hidden_layers"),
    ],
)
def test_configs_out_of_range(change: dict[str, object], said: str) -> None:
    given = {key: value for key, value in (config() | change).items() if value is not None}
    with pytest.raises(BadModelConfig, match=re.escape(said)):
        read_config(given, "mine")


def test_keys_of_a_config_that_no_shape_reads_are_left_alone() -> None:
    more = {"torch_dtype": "bfloat16", "rope_scaling": {"factor": 40}, "bos_token_id": 0, "num_logits_to_keep": 1}
    assert read_config(config() | more, "deepseek-v3") == named_model("deepseek-v3")


def test_every_number_of_the_bundled_files_has_a_limit() -> None:
    """A new key is a new line in its table."""
    for name in hardware_names():
        paths = set(parse_hardware(description(name), name).facts)
        paths = {path for path in paths if not path.startswith("planes[")}
        assert paths <= HARDWARE.keys()
    read = {key for name in model_names() for key, value in config(name).items() if type(value) is int}
    assert {"hidden_size", "n_routed_experts"} <= read & MODEL.keys() and PLANE


VALUES = (
    "0", "-1", "1.5", "1e30", "inf", "nan", "true", '""', '"x"', "[]", "{}", "[1, 2]", "null", "1979-05-27", "9" * 400,
)  # fmt: skip


def mutated(text: str, rng: Random) -> str:
    """One edit that a hand or a disk may make."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    match rng.randrange(7):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2:
            lines[at] = re.sub(r"-?\d+(\.\d+)?(e\d+)?", rng.choice(VALUES), lines[at], count=1)
        case 3:
            lines[at] = re.sub(
                r"[=:] *[^,}]+", lambda found: found[0][0] + " " + rng.choice(VALUES), lines[at], count=1
            )
        case 4:
            where = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:where] + rng.choice("\"'{}[]=,#\\\x00é9e-") + lines[at][where:]
        case 5:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        case _:
            return "\n".join(lines)[: rng.randrange(len(text))]
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ["hardware", "model", "deployment"])
def test_mutated_files_give_typed_errors(kind: str) -> None:
    """500 mutations of three kinds of files: each is read, or refused by an error with a hint."""
    rng, ask = Random(kind), ask_of(chips=16)
    texts = {
        "hardware": description, "model": lambda: json.dumps(config(), indent=1),
        "deployment": lambda: write_deployment(ask, best_deployment(ask)),
    }  # fmt: skip
    text, refused = texts[kind](), list[InvalidRequest]()
    for _ in range(500 // 3 + 1):
        broken = mutated(text, rng)
        try:
            if kind == "hardware":
                best_deployment(ask_of(hardware=parse_hardware(broken, "mine.toml"), chips=8))
            elif kind == "deployment":
                read_deployment(broken, "mine.toml")
            else:
                read_json(broken)
        except InvalidRequest as error:
            refused.append(error)
    assert len(refused) > 50 and all(error.hint for error in refused)


def read_json(text: str) -> None:
    try:
        given = json.loads(text)
    except ValueError:
        raise BadModelConfig("not JSON", hint="as the command line says it") from None
    if isinstance(given, dict):
        best_deployment(ask_of(model=read_config(given, "mine"), chips=48))
    else:
        raise BadModelConfig("not an object", hint="as the command line says it")
