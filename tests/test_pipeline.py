"""From a corpus to a tokenizer and token arrays, each step only when it is needed."""

import dataclasses
from contextlib import contextmanager

import pytest

from lib.config import TokenizeConfig
from lib.data import load_token_array
from lib.pipeline import tokenize_corpus
from lib.tokenizer import SEPARATOR, Tokenizer

STORY = f"The cat sat on the mat. “Là,” said the dog.\n{SEPARATOR}\n"


@contextmanager
def silent(name, num_bytes):
    yield lambda count: None


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i} {STORY}" for i in range(300)), encoding="utf-8")
    return TokenizeConfig(
        corpus=str(path), vocab_size=300, data_dir=tmp_path / "data", output=tmp_path / "out"
    )


def tokenize(config, **changes):
    rows = tokenize_corpus(dataclasses.replace(config, **changes), progress_bar=silent)
    return {row["step"]: row for row in rows}


def test_arrays_decode_to_the_corpus(config, tmp_path):
    rows = tokenize(config)
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    for part in ("train", "validation"):
        (text_path,) = (tmp_path / "data").glob(f"*/*{part}*.txt")
        tokens = load_token_array(
            tmp_path / "out" / f"{part}.npy", tokenizer=tokenizer, verify=True
        )
        assert tokenizer.decode(tokens) == text_path.read_text(encoding="utf-8")
        assert rows[part]["tokens"] == len(tokens)
        assert rows[part]["bytes"] == text_path.stat().st_size > 0


def test_table_adds_up(config):
    rows = tokenize(config)
    assert list(rows) == ["tokenizer", "train", "validation"]
    train = rows["train"]
    assert train["bytes_per_token"] == train["bytes"] / train["tokens"]
    assert rows["tokenizer"]["tokens"] == 300
    assert all(row["MB_per_s"] > 0 for row in rows.values())


def test_a_second_run_does_nothing(config, tmp_path):
    tokenize(config)
    before = {path.name: path.stat() for path in (tmp_path / "out").iterdir()}
    rows = tokenize(config)
    assert all(row["MB_per_s"] is None for row in rows.values())
    after = {path.name: path.stat() for path in (tmp_path / "out").iterdir()}
    assert {name: stat.st_mtime_ns for name, stat in after.items()} == {
        name: stat.st_mtime_ns for name, stat in before.items()
    }


def test_another_vocabulary_makes_everything_again(config):
    tokenize(config)
    rows = tokenize(config, vocab_size=290)
    assert rows["tokenizer"]["tokens"] == 290
    assert all(row["MB_per_s"] is not None for row in rows.values())


def test_only_the_lost_array_is_made_again(config, tmp_path):
    tokenize(config)
    (tmp_path / "out" / "validation.npy").unlink()
    rows = tokenize(config)
    assert [name for name, row in rows.items() if row["MB_per_s"]] == ["validation"]


def test_an_altered_tokenizer_is_refused_by_name(config, tmp_path):
    tokenize(config)
    path = tmp_path / "out" / "tokenizer.json"
    path.write_text(path.read_text().replace("endoftext", "endoftest"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenize(config)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}"])
def test_a_damaged_note_of_the_source_means_training_again(config, tmp_path, content):
    before = tokenize(config)
    (tmp_path / "out" / "tokenizer.source.json").write_bytes(content)
    after = tokenize(config)
    assert after["tokenizer"]["MB_per_s"] is not None
    assert after["train"]["tokens"] == before["train"]["tokens"]
    assert tokenize(config)["tokenizer"]["MB_per_s"] is None


def test_another_tokenizer_in_its_place_is_noticed(config, tmp_path):
    tokenize(config)
    tokens = (tmp_path / "out" / "train.npy").read_bytes()
    other = Tokenizer({i: bytes([i]) for i in range(256)}, [], [SEPARATOR])
    other.save(tmp_path / "out" / "tokenizer.json")
    tokenize(config)
    assert (tmp_path / "out" / "train.npy").read_bytes() == tokens
    assert Tokenizer.load(tmp_path / "out" / "tokenizer.json").vocab_size == 300
