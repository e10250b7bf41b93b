"""Configs: strict JSON in and out, errors that name what is wrong."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config import TokenizeConfig
from lib.strict_json import from_json, to_dict, to_json


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 8
    rate: float = 0.5
    name: str | None = None


@dataclasses.dataclass(frozen=True)
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
    size: int | str = 0


finite = st.floats(allow_nan=False, allow_infinity=False)
inners = st.builds(Inner, st.integers(), finite, st.none() | st.text())
outers = st.builds(
    Outer,
    steps=st.integers(),
    inner=inners,
    kind=st.sampled_from(["a", "b", 3]),
    is_on=st.booleans(),
    path=st.text("abc/.", min_size=1).map(Path),
    names=st.lists(st.text()).map(tuple),
    pair=st.tuples(st.integers(), finite),
    inners=st.lists(inners, max_size=3),
    table=st.dictionaries(st.text(), st.integers()),
    free=st.none() | st.booleans() | st.text(),
    size=st.integers() | st.text(),
)


@given(outers)
def test_json_round_trip_gives_an_equal_config(config):
    assert from_json(Outer, to_json(config)) == config


def test_default_tokenize_config_survives_a_file(tmp_path):
    (tmp_path / "config.json").write_text(to_json(TokenizeConfig(output=Path("x"))))
    assert from_json(TokenizeConfig, tmp_path / "config.json") == TokenizeConfig(output=Path("x"))
    assert from_json(TokenizeConfig, str(tmp_path / "config.json")).output == Path("x")


def test_missing_keys_take_their_defaults():
    assert from_json(Outer, '{"steps": 3, "inner": {"width": 1}}') == Outer(3, Inner(width=1))


def test_whole_numbers_are_fine_where_a_number_is_asked_for():
    rate = from_json(Inner, '{"rate": 2}').rate
    assert (rate, type(rate)) == (2.0, float)


def test_to_dict_is_plain():
    assert to_dict(TokenizeConfig())["special_tokens"] == ["<|endoftext|>"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"steps": 1, "inner": {"widht": 3}}', r"'inner\.widht'; did you mean 'width'\?"),
        ('{"stesp": 1}', "unknown key 'stesp'; did you mean 'steps'?.* known keys: steps, inner"),
        ("{}", "'steps' is missing"),
        ('{"steps": "1"}', 'steps is "1"; right is: a whole number'),
        ('{"steps": true}', "steps is true; right is: a whole number"),
        ('{"steps": 1.0}', "steps is 1.0; right is: a whole number"),
        ('{"steps": null}', "steps is null; right is: a whole number"),
        ('{"steps": 1, "is_on": 1}', "is_on is 1; right is: true or false"),
        ('{"steps": 1, "names": "abc"}', 'names is "abc"; right is: a list, each text'),
        ('{"steps": 1, "names": ["a", 2]}', r"names\[1\] is 2; right is: text"),
        ('{"steps": 1, "pair": [1]}', r"pair is \[1\]; right is: a list of exactly \[a whole"),
        ('{"steps": 1, "kind": "c"}', 'kind is "c"; right is: one of "a", "b", 3'),
        ('{"steps": 1, "inner": 3}', "inner is 3; right is: an object"),
        ('{"steps": 1, "inners": [{}, {"rate": "x"}]}', r"inners\[1\]\.rate is \"x\""),
        ('{"steps": 1, "table": {"a": "b"}}', r"table\.a is \"b\""),
        ('{"steps": 1, "size": 1.5}', "size is 1.5; right is: a whole number or text"),
        ('{"steps": 1, "steps": 2}', "key 'steps' stands twice"),
        ('{"steps": NaN}', "NaN"),
        ('{"steps": 1', "Outer: .*line 1"),
    ],
)
def test_wrong_json_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        from_json(Outer, text)


def test_an_error_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"vocab_sise": 3}')
    with pytest.raises(ValueError, match=r"mine\.json: unknown key 'vocab_sise'"):
        from_json(TokenizeConfig, path)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match="nowhere"):
        from_json(TokenizeConfig, "nowhere.json")


def test_numbers_without_a_json_form_are_not_written():
    with pytest.raises(ValueError, match="JSON"):
        to_json(Inner(rate=float("inf")))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 256}, "vocab_size is 256; right is: .* = 257"),
        ({"special_tokens": ("a", "")}, "special_tokens"),
        ({"special_tokens": ("a", "a")}, "special_tokens"),
        ({"corpus": ""}, "corpus is ''"),
        ({"corpus_bytes": 0}, "corpus_bytes is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
    ],
)
def test_impossible_values_are_refused_when_the_config_is_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        TokenizeConfig(**wrong)


def test_output_folder_is_named_for_corpus_and_vocabulary():
    assert TokenizeConfig().output_dir == Path("data/stories-4096")
    assert TokenizeConfig(corpus="some/where/book.txt").output_dir == Path("data/book-4096")
    assert TokenizeConfig(output=Path("mine")).output_dir == Path("mine")
