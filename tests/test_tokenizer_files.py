"""Tokenizers as files: what is written is read back, and what was altered is refused."""

import json

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from tiktoken.load import load_tiktoken_bpe

from lib import tokenizer_files
from lib.pretokenize import GPT2_PATTERN, SEPARATOR
from lib.tokenizer import Tokenizer, train_bpe
from tests.texts import tricky_text

TEXT = "The cat's hat, the café and 42 日本 cats. " * 5 + SEPARATOR


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    # One special token looks like an ordinary one, one has a space.
    special_tokens = [SEPARATOR, "a", "<| two words |>"]
    return Tokenizer(*train_bpe(path, 300, special_tokens), special_tokens)


@pytest.fixture(scope="module")
def plain(tokenizer):
    """The same without the special token that looks like an ordinary one."""
    ids = dict(tokenizer.special_tokens)
    vocab = {i: token for i, token in tokenizer.vocab.items() if i != ids["a"]}
    return Tokenizer(vocab, tokenizer.merges, [token for token in ids if token != "a"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokenizer.json"


@settings(max_examples=50)
@given(text=tricky_text())
def test_a_loaded_tokenizer_encodes_as_the_saved_one(tokenizer, tmp_path_factory, text):
    path = tmp_path_factory.mktemp("saved") / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.parts == tokenizer.parts
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode(text) == tokenizer.encode(text)


def test_every_byte_has_a_printable_form():
    everything = bytes(range(256))
    assert tokenizer_files.from_printable(tokenizer_files.to_printable(everything)) == everything
    assert tokenizer_files.to_printable(b" the\n") == "ĠtheĊ"
    with pytest.raises(ValueError, match=r"'日' .* stands for no byte"):
        tokenizer_files.from_printable("日")


@pytest.mark.parametrize("key", ["vocab", "merges", "special_tokens"])
def test_an_altered_file_is_refused(tokenizer, path, key):
    tokenizer.save(path)
    document = json.loads(path.read_text())
    if key == "merges":
        document["merges"][:2] = reversed(document["merges"][:2])
    elif key == "vocab":
        a, b = list(document["vocab"])[:2]
        document["vocab"][a], document["vocab"][b] = document["vocab"][b], document["vocab"][a]
    else:
        document["special_tokens"]["<|new|>"] = 1000
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"tokenizer\.json was altered"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[]", "not a tokenizer of this library"),
        ('{"format": "byte-level-bpe", "version": 2}', "has version 2"),
        ('{"format": "byte-level-bpe", "version": 1}', "is damaged: KeyError"),
    ],
)
def test_other_files_are_refused(path, content, message):
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json.*{message}"):
        Tokenizer.load(path)


def test_a_torn_file_is_refused(tokenizer, path):
    tokenizer.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is not JSON"):
        Tokenizer.load(path)


@settings(max_examples=50)
@given(text=tricky_text())
def test_hugging_face_reads_the_export_and_gives_the_same_ids(plain, tmp_path_factory, text):
    path = tmp_path_factory.mktemp("export") / "tokenizer.json"
    tokenizer_files.save_huggingface(path, plain.parts)
    peer = tokenizers.Tokenizer.from_file(str(path))
    # It follows another version of Unicode, so only ASCII is sure to be cut the same way.
    text = text.encode("ascii", "ignore").decode()
    assert peer.encode(text).ids == plain.encode(text)


def test_hugging_face_export_is_imported_again(plain, path):
    tokenizer_files.save_huggingface(path, plain.parts)
    loaded = Tokenizer.from_parts(tokenizer_files.load_huggingface(path))
    assert loaded.encode(TEXT) == plain.encode(TEXT)
    assert loaded.parts == plain.parts


def test_what_hugging_face_cannot_express_is_refused(tokenizer, path):
    with pytest.raises(ValueError, match="special token 'a' reads like an ordinary token"):
        tokenizer_files.save_huggingface(path, tokenizer.parts)


def test_a_tokenizer_trained_by_hugging_face_is_imported(tmp_path):
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=[SEPARATOR], show_progress=False
    )
    peer.train_from_iterator([TEXT], trainer)
    peer.save(str(tmp_path / "peer.json"))
    ours = Tokenizer.from_parts(tokenizer_files.load_huggingface(tmp_path / "peer.json"))
    assert ours.encode(TEXT) == peer.encode(TEXT).ids


def test_another_model_of_hugging_face_is_refused(path):
    path.write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(ValueError, match="Unigram model; only byte-level BPE"):
        tokenizer_files.load_huggingface(path)


@pytest.mark.parametrize("first_line", ["", "#version: 0.2\n"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_gpt2_files_with_and_without_a_version_line(tokenizer, tmp_path, first_line, line_end):
    tokenizer.save(tmp_path / "ours.json")
    document = json.loads((tmp_path / "ours.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(document["vocab"]))
    merges = first_line + "\n".join(document["merges"]) + "\n"
    (tmp_path / "merges.txt").write_bytes(merges.replace("\n", line_end).encode())
    parts = tokenizer_files.load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt", [SEPARATOR])
    assert parts.merges == tokenizer.merges
    assert parts.special_tokens == {SEPARATOR: max(document["vocab"].values()) + 1}
    loaded = Tokenizer.from_parts(parts)
    assert loaded.encode("The café") == Tokenizer(
        tokenizer.vocab, tokenizer.merges, [SEPARATOR]
    ).encode("The café")


def test_tiktoken_reads_the_export_and_gives_the_same_ids(tokenizer, tmp_path):
    path = tmp_path / "ours.tiktoken"
    tokenizer_files.save_tiktoken(path, tokenizer.parts)
    peer = tiktoken.Encoding(
        "peer",
        pat_str=GPT2_PATTERN,
        mergeable_ranks=load_tiktoken_bpe(str(path)),
        special_tokens=tokenizer.special_tokens,
    )
    assert peer.encode(TEXT, allowed_special="all") == tokenizer.encode(TEXT)


def test_tiktoken_export_gives_the_merges_back(tokenizer, tmp_path):
    path = tmp_path / "ours.tiktoken"
    tokenizer_files.save_tiktoken(path, tokenizer.parts)
    parts = tokenizer_files.load_tiktoken(path, tokenizer.special_tokens)
    assert parts == tokenizer.parts


def test_a_file_that_is_not_of_tiktoken_is_refused(tmp_path):
    path = tmp_path / "no.tiktoken"
    path.write_text("hello there\n")
    with pytest.raises(ValueError, match="no tiktoken file: line b'hello there'"):
        tokenizer_files.load_tiktoken(path)


def test_ids_that_a_file_cannot_tell_apart_are_refused(tokenizer, path):
    twice = Tokenizer({**tokenizer.vocab, 5000: b"a"}, tokenizer.merges)
    with pytest.raises(ValueError, match="two ids have the same bytes"):
        twice.save(path)


def test_fingerprint_changes_with_anything_that_decides_about_ids(tokenizer):
    vocab, merges, special_tokens = tokenizer.parts
    prints = {
        tokenizer_files.fingerprint(parts)
        for parts in [
            tokenizer.parts,
            tokenizer.parts._replace(merges=merges[:-1]),
            tokenizer.parts._replace(special_tokens={**special_tokens, SEPARATOR: 5000}),
            tokenizer.parts._replace(vocab={**vocab, 5000: b"xyz"}),
        ]
    }
    assert len(prints) == 4
