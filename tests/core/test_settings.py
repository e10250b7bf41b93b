"""Settings: strict JSON in and out, errors that name the field."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Gt, Lt
from hypothesis import given
from hypothesis import strategies as st

from lib.__main__ import COMMANDS, config_of, load
from lib.core.settings import NonEmpty, PositiveInt, check, from_json, settings, to_json
from lib.data.prepare import TokenizeConfig
from lib.model.config import ModelConfig
from lib.training.config import OptimizerConfig, SampleConfig, TrainConfig


@settings
class Inner:
    width: int = 8
    rate: float = 0.5
    name: str | None = None
    part: Annotated[float, Gt(0), Lt(1)] = 0.5


@settings
class Outer:
    steps: int
    inner: Inner = Inner()
    kind: Literal["a", "b", 3] = "a"
    is_on: bool = False
    path: Path = Path("here")
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    inners: list[Inner] = dataclasses.field(default_factory=list)
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    free: Any = None
    count: PositiveInt | None = None
    some: Annotated[tuple[PositiveInt, ...], NonEmpty] = (1,)


finite = st.floats(allow_nan=False, allow_infinity=False)
whole = functools.partial(st.integers, max_value=2**63 - 1)
signed = whole(-(2**63) + 1)
inners = st.builds(Inner, signed, finite, st.none() | st.text())
outers = st.builds(
    Outer,
    steps=signed,
    inner=inners,
    kind=st.sampled_from(["a", "b", 3]),
    is_on=st.booleans(),
    path=st.text("abc/.", min_size=1).map(Path),
    names=st.lists(st.text()).map(tuple),
    pair=st.tuples(signed, finite),
    inners=st.lists(inners, max_size=3),
    table=st.dictionaries(st.text(), signed),
    free=st.none() | st.booleans() | st.text(),
    count=st.none() | whole(1),
    some=st.lists(whole(1), min_size=1).map(tuple),
)


@given(outers)
def test_json_round_trip_gives_an_equal_config(config):
    assert from_json(Outer, to_json(config)) == config


def test_a_file_is_read_from_a_path_or_its_text(tmp_path):
    config = TokenizeConfig(output=Path("x"))
    (tmp_path / "config.json").write_text(to_json(config))
    assert from_json(TokenizeConfig, tmp_path / "config.json") == config
    assert from_json(TokenizeConfig, str(tmp_path / "config.json")) == config
    # what is missing has its default
    assert from_json(Outer, '{"steps": 3, "inner": {"width": 1}}') == Outer(3, Inner(width=1))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        from_json(TokenizeConfig, "nowhere.json")
    (tmp_path / "mine.json").write_bytes('{"corpus": "für"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine\.json: 'utf-8' codec can't decode"):
        from_json(TokenizeConfig, tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"steps": 1, "inner": {"widht": 3}}', r"'inner\.widht'; did you mean 'width'\?"),
        ('{"stesp": 1}', "unknown key 'stesp'; did you mean 'steps'?.* known keys: steps, inner"),
        ("{}", "'steps' is missing"),
        ('{"steps": "1"}', 'steps must be a whole number, got "1"'),
        ('{"steps": true}', "steps must be a whole number, got true"),
        ('{"steps": 1.0}', "steps must be a whole number, got 1.0"),
        ('{"steps": null}', "steps must be a whole number, got null"),
        ('{"steps": 1, "is_on": 1}', "is_on must be true or false, got 1"),
        ('{"steps": 1, "names": "abc"}', 'names must be a list, got "abc"'),
        ('{"steps": 1, "names": ["a", 2]}', r"names\[1\] must be text, got 2"),
        ('{"steps": 1, "kind": "c"}', 'kind must be one of "a", "b", 3, got "c"'),
        ('{"steps": 0, "count": 0}', "count must be at least 1, got 0"),
        ('{"steps": 1, "some": [3, 0]}', r"some\[1\] must be at least 1, got 0"),
        ('{"steps": 1, "some": []}', r"some must be a list of at least 1, got \[\]"),
        ('{"steps": 1, "inner": {"part": 1}}', "inner.part must be less than 1, got 1"),
        ('{"steps": 1, "inner": 3}', "inner must be an object, got 3"),
        ('{"steps": 1, "inners": [{}, {"rate": "x"}]}', r"inners\[1\]\.rate must be a number"),
        ('{"steps": 1, "table": {"a": "b"}}', r"table\.a must be a whole number"),
        ('{"steps": 1, "steps": 2}', "duplicate key 'steps'"),
        ('{"steps": NaN}', "NaN is not a number in JSON"),
        ('{"steps": 1', "Outer: .*line 1"),
    ],
)
def test_wrong_json_is_rejected_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        from_json(Outer, text)


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        # numbers that no machine or file holds
        *((Inner, wrong) for wrong in ({"rate": math.inf}, {"rate": math.nan}, {"width": 2**63})),
        (ModelConfig, {"norm": "layer"}),
        (ModelConfig, {"num_heads": 2.0}),
        (TokenizeConfig, {"special_tokens": "<|endoftext|>"}),
        (TrainConfig, {"model": OptimizerConfig()}),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused_in_python_too(cls, wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        cls(**wrong)


CONFIGS = {
    name: cls for name, command in COMMANDS.items() if (cls := config_of(load(command.function)))
}


@pytest.mark.parametrize("cls", CONFIGS.values(), ids=CONFIGS)
def test_the_config_of_every_command_comes_back_from_json_and_checks_each_field(cls):
    assert from_json(cls, to_json(cls())) == cls()
    for field in dataclasses.fields(cls):
        with pytest.raises(ValueError, match=f"^{field.name} must be "):
            cls(**{field.name: object()})


def test_a_value_with_one_meaning_is_converted_when_made_in_python():
    config = TrainConfig(
        data="data",
        max_seconds=3,
        steps=np.int64(700),
        optimizer={"learning_rate": np.float32(0.5), "beta1": np.float64(0.5)},
    )
    assert (config.data, config.steps) == (Path("data"), 700)
    assert (config.optimizer.learning_rate, config.optimizer.beta1) == (0.5, 0.5)
    kinds = (config.steps, config.max_seconds, config.optimizer.learning_rate)
    assert list(map(type, kinds)) == [int, float, float]
    assert SampleConfig(prompts=["a", "b"]).prompts == ("a", "b")


def test_a_check_names_the_field_what_is_right_and_the_value():
    check(Inner(), "width", True, "at least 1")
    with pytest.raises(ValueError, match=r"^name must be text, got 'a'$"):
        check(Inner(name="a"), "name", False, "text")
