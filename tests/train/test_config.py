"""A config is read whole or refused with the key that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tripool.cli.main import main
from tripool.models.load import arch_of
from tripool.train.__main__ import main as plain_main
from tripool.train.config import CONFIGS, TrainError, parse_config, read_config
from tripool.train.network import trainable

MODEL = '[model]\nmodel_type = "deepseek_v3"\n'


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_our_configs_are_of_networks_that_can_be_trained(name: str) -> None:
    arch = arch_of(read_config(name).model, name)
    trainable(arch)
    assert arch.mtp_layers == 1 and arch.moe is not None and arch.vocab == 8192


def test_the_bundled_models_config_is_what_was_promised() -> None:
    arch = arch_of(read_config("tripool-tiny").model, "tripool-tiny")
    assert arch.moe is not None and arch.moe.experts >= 32 and arch.context_tokens == 2048
    assert (arch.hidden, arch.layers, arch.moe.width) == (320, 8, 64)


def test_values_are_read_and_the_rest_is_as_usual() -> None:
    text = MODEL + "[data]\nprompt_loss = 0\n[mix]\nstory = 2\n[optimise]\npeak_lr = 1e-3\nsteps = 7\n"
    config = parse_config(text, "a.toml")
    assert (config.data.prompt_loss, config.optimise.peak_lr, config.optimise.steps) == (0.0, 1e-3, 7)
    assert config.mix == {"story": 2.0}
    assert config.optimise.mtp_weight == 0.3


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("", "model", "[model]"),
        ("steps = 3\n", "steps", "known: model"),
        ("model = 3\n", "model", "line of its own"),
        (MODEL + "[optimise]\nstep = 3\n", "optimise.step", "known: steps"),
        (MODEL + "[optimise]\nsteps = 3.5\n", "optimise.steps", "whole number"),
        (MODEL + "[optimise]\nsteps = true\n", "optimise.steps", "whole number"),
        (MODEL + "[optimise]\nsteps = 0\n", "optimise.steps", "at least 1"),
        (MODEL + "[optimise]\npeak_lr = nan\n", "optimise.peak_lr", "above 0"),
        (MODEL + '[optimise]\ndecay = "stairs"\n', "optimise.decay", "cosine"),
        (MODEL + "[optimise]\nrows_per_step = 6\nrows_per_pass = 4\n", "optimise.rows_per_pass", "divisor"),
        (MODEL + "[data]\nprompt_loss = 2\n", "data.prompt_loss", "between 0 and 1"),
        (MODEL + "[mix]\nstory = -1\n", "mix.story", "from 0 to 100"),
    ],
)
def test_what_is_wrong_is_named(text: str, key: str, hint: str) -> None:
    with pytest.raises(TrainError) as caught:
        parse_config(text, "a.toml")
    assert caught.value.key == key and caught.value.file == "a.toml"
    assert hint in caught.value.hint


def test_text_that_is_not_toml_is_refused() -> None:
    with pytest.raises(TrainError, match="not TOML"):
        parse_config("steps = = 3", "a.toml")


def test_a_network_that_cannot_be_trained_is_refused() -> None:
    model = dict(read_config("smoke").model)
    for changed, said in (
        ({"attention_bias": True}, "attention"),
        ({"rope_interleave": False}, "attention"),
        ({"num_nextn_predict_layers": 2}, "is 2"),
    ):
        with pytest.raises(TrainError, match=said):
            trainable(arch_of(model | changed, "a.toml"))


def test_both_commands_say_what_is_wrong_and_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["no-such-config", "--data", str(tmp_path), "--out", str(tmp_path)]
    assert plain_main(arguments) == 2
    assert "tripool-tiny" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    assert "tripool-tiny" in "".join(capsys.readouterr().err.split())
