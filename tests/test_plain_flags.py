"""Flags read without tyro give what tyro gives."""

import importlib.util
from pathlib import Path

import pytest

from lib.__main__ import full_flag, parse_alone
from lib.config import TokenizeConfig
from lib.config_training import TrainConfig
from lib.plain_flags import with_flags
from lib.strict_json import to_json

TRAIN = TrainConfig(data=Path("data"), output=Path("run"), steps=700)
LINES = (
    "",
    "--steps 100",
    "--steps=100 --ddp_wrapper fsdp2",
    "--d_model 64 --num_heads 4",
    "--model.d_model=64 --model.num_heads=4",
    "--compile --no_tf32",
    "--learning_rate 3e-4 --output else/where",
    "--seed 3 --compile --no_compile",
)


@pytest.mark.parametrize("line", LINES)
def test_both_read_the_same(tmp_path, line):
    file = tmp_path / "train.json"
    file.write_text(to_json(TRAIN))
    by_tyro = parse_alone(TrainConfig, "train", ["--config", str(file), *line.split()])
    flags = [full_flag(TrainConfig, word) for word in line.split()]
    assert with_flags(TRAIN, flags) == by_tyro
    assert (by_tyro == TRAIN) == (line == "")


def test_the_command_line_does_without_tyro(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tyro" else find_spec(name)
    )
    file = tmp_path / "train.json"
    file.write_text(to_json(TRAIN))
    arguments = ["--config", str(file), "--steps", "900"]
    assert parse_alone(TrainConfig, "train", arguments).steps == 900
    assert parse_alone(TokenizeConfig, "tokenize", ["--vocab_size", "512"]).vocab_size == 512


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--stepz 3", "unknown flag '--stepz'"),
        ("steps 3", "unknown flag 'steps'"),
        ("--nothing.steps 3", "unknown flag '--nothing.steps'"),
        ("--steps.more 3", "unknown flag '--steps.more'"),
        ("--steps many", "steps is"),
        ("--steps 1 2", "steps is"),
        ("--steps -3", "steps is -3"),
        ("--help", "unknown flag '--help'"),
    ],
)
def test_what_is_wrong_is_named(line, words):
    with pytest.raises(ValueError, match=words):
        with_flags(TRAIN, line.split())
