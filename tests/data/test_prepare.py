"""From a corpus to a tokenizer and token arrays; each step runs only when needed."""

from pathlib import Path

import pytest

from lib.data.prepare import TokenizeConfig
from lib.data.token_array import load_token_array
from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.pretokenize import SEPARATOR
from tests.data.books import book_config, tokenize


@pytest.fixture
def config(tmp_path):
    return book_config(tmp_path)


def steps_made(rows):
    return [name for name, row in rows.items() if row["MB_per_s"]]


def test_arrays_decode_to_the_corpus_and_the_table_adds_up(config, tmp_path):
    rows = tokenize(config)
    assert list(rows) == steps_made(rows) == ["tokenizer", "train", "validation"]
    assert rows["tokenizer"]["tokens"] == 300
    tokenizer = Tokenizer.load(tmp_path / "out" / "bpe.json")
    for part in ("train", "validation"):
        (text_path,) = (tmp_path / "data").glob(f"*/*{part}*.txt")
        tokens = load_token_array(
            tmp_path / "out" / f"{part}.npy", tokenizer=tokenizer, verify=True
        )
        assert tokenizer.decode(tokens) == text_path.read_text(encoding="utf-8")
        assert rows[part]["tokens"] == len(tokens)
        assert rows[part]["bytes"] == text_path.stat().st_size > 0
        assert rows[part]["bytes_per_token"] == rows[part]["bytes"] / rows[part]["tokens"]


def test_another_vocabulary_or_corpus_makes_everything_again(config, tmp_path):
    tokenize(config)
    rows = tokenize(config, vocab_size=290)
    assert rows["tokenizer"]["tokens"] == 290
    assert steps_made(rows) == ["tokenizer", "train", "validation"]
    (tmp_path / "book.txt").write_text(f"Another story.\n{SEPARATOR}\n" * 100)
    assert steps_made(tokenize(config, vocab_size=290)) == ["tokenizer", "train", "validation"]


def test_only_a_missing_array_is_made_again(config, tmp_path):
    tokenize(config)
    assert steps_made(tokenize(config)) == []
    (tmp_path / "out" / "validation.npy").unlink()
    assert steps_made(tokenize(config)) == ["validation"]


@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_the_tokenizer_of_a_model_is_never_replaced(config, tmp_path, name):
    tokenize(config)
    (tmp_path / "out" / name).touch()
    before = (tmp_path / "out" / "bpe.json").read_bytes()
    with pytest.raises(ValueError, match="output must be a folder that holds no model"):
        tokenize(config, vocab_size=301)
    assert (tmp_path / "out" / "bpe.json").read_bytes() == before


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", None])
def test_a_tokenizer_without_its_record_is_never_replaced(config, tmp_path, content):
    tokenize(config)
    before = (tmp_path / "out" / "bpe.json").read_bytes()
    record = tmp_path / "out" / "bpe.source.json"
    record.unlink() if content is None else record.write_bytes(content)
    for changes in ({}, {"vocab_size": 301}):
        with pytest.raises(ValueError, match=r"nothing says how bpe\.json was made"):
            tokenize(config, **changes)
    assert (tmp_path / "out" / "bpe.json").read_bytes() == before


def test_an_array_from_elsewhere_is_never_replaced(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/validation.npy").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"nothing says how validation\.npy was made"):
        tokenize(config)
    assert (tmp_path / "out/validation.npy").read_bytes() == b"mine"


def test_a_folder_with_the_tokenizers_older_file_name_is_up_to_date(config, tmp_path):
    tokenize(config)
    for path in (tmp_path / "out").glob("bpe.*"):
        path.rename(path.with_name(path.name.replace("bpe", "tokenizer")))
    assert steps_made(tokenize(config)) == []
    assert not (tmp_path / "out" / "bpe.json").exists()


def test_another_tokenizer_under_the_same_name_is_noticed(config, tmp_path):
    other = Tokenizer({i: bytes([i]) for i in range(256)}, [], [SEPARATOR])
    for output, folder in ((tmp_path / "out", "out"), (None, "data/book-300")):
        tokenize(config, output=output)
        other.save(tmp_path / folder / "bpe.json")
    with pytest.raises(ValueError, match=r"nothing says how bpe\.json was made"):
        tokenize(config)
    # without an output, the folder is kept under another name
    tokenize(config, output=None)
    assert Tokenizer.load(tmp_path / "data/book-300-earlier").vocab_size == 257
    assert Tokenizer.load(tmp_path / "data/book-300").vocab_size == 300


def test_arrays_of_other_sizes_and_texts_are_kept(config, tmp_path):
    mine = tmp_path / "data/book-300/train.npy"
    tokenize(config, output=None)
    tokens = mine.read_bytes()
    (tmp_path / "book.txt").write_text(f"Another story.\n{SEPARATOR}\n" * 100)
    for name in ("book-300-earlier", "book-300-earlier-2"):
        tokenize(config, output=None)
        # it was kept, and is not moved once more where nothing has changed
        tokenize(config, output=None)
        assert (tmp_path / "data" / name / "train.npy").read_bytes() == tokens != mine.read_bytes()
        tokens = mine.read_bytes()
        (tmp_path / "book.txt").write_text(f"A third story.\n{SEPARATOR}\n" * 100)


def test_arrays_of_unknown_origin_are_kept(config, tmp_path):
    folder = tmp_path / "data/book-300"
    folder.mkdir(parents=True)
    (folder / "train.npy").write_bytes(b"mine")
    tokenize(config, output=None)
    assert (tmp_path / "data/book-300-earlier/train.npy").read_bytes() == b"mine"


def test_a_tokenizer_without_the_token_between_documents_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match=r"special_tokens must be a list with '<\|endoftext\|>'"):
        tokenize(config, special_tokens=("<|end|>",))
    assert not (tmp_path / "data").exists()


# The config


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 256}, "vocab_size must be .* = 257, got 256"),
        ({"special_tokens": ("a", "")}, "special_tokens"),
        ({"special_tokens": ("a", "a")}, "special_tokens"),
        ({"corpus": ""}, "corpus must be .* got ''"),
        ({"corpus_bytes": 0}, "corpus_bytes must be at least 1"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"validation_fraction": 0.0}, "validation_fraction must be more than 0"),
    ],
)
def test_impossible_values_are_rejected_when_the_config_is_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        TokenizeConfig(**wrong)


def test_the_output_folder_is_named_for_corpus_and_vocabulary_and_others_stories_differ():
    assert TokenizeConfig().output_dir == Path("data/stories-4096")
    assert TokenizeConfig(corpus="some/where/book.txt").output_dir == Path("data/book-4096")
    assert TokenizeConfig(output=Path("mine")).output_dir == Path("mine")
    sizes = [{}, {"corpus_bytes": 10**8}, {"seed": 1}, {"validation_fraction": 0.1}]
    folders = {TokenizeConfig(**changes).output_dir for changes in sizes}
    assert len(folders) == len(sizes)
    assert all(folder.name.startswith("stories-4096") for folder in folders)
