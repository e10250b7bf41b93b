"""Tokenizers as files: read back as written, rejected when altered, the same ids elsewhere."""

import json

import pytest
import tokenizers
from hypothesis import given, settings

from lib.tokenizer import files
from lib.tokenizer.bpe import Tokenizer, train_bpe
from lib.tokenizer.pretokenize import GPT2_PATTERN, SEPARATOR
from tests.texts import tricky_text

PARTS = {"format": "byte-level-bpe", "version": 1, "pattern": GPT2_PATTERN, "unicode": "16.0"}
TEXT = "The cat's hat, the café and 42 日本 cats. " * 5 + SEPARATOR


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    # one special token looks like an ordinary one, one has a space
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


def test_a_loaded_tokenizer_is_the_saved_one(tokenizer, path):
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.parts == tokenizer.parts
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)


def test_a_folder_stands_for_its_tokenizer_also_under_the_older_name(tokenizer, tmp_path):
    assert files.find(tmp_path) == tmp_path / "bpe.json"
    tokenizer.save(tmp_path / "tokenizer.json")
    assert files.find(tmp_path) == tmp_path / "tokenizer.json"
    assert Tokenizer.load(tmp_path).parts == tokenizer.parts
    Tokenizer({i: bytes([i]) for i in range(256)}, []).save(tmp_path / "bpe.json")
    assert Tokenizer.load(tmp_path).merges == []


def test_every_byte_has_a_printable_form():
    everything = bytes(range(256))
    assert files.from_printable(files.to_printable(everything)) == everything
    assert files.to_printable(b" the\n") == "ĠtheĊ"
    with pytest.raises(ValueError, match=r"'日' .* encodes no byte"):
        files.from_printable("日")


def test_an_altered_file_is_rejected(tokenizer, path):
    tokenizer.save(path)
    document = json.loads(path.read_text())
    document["merges"][:2] = reversed(document["merges"][:2])
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"tokenizer\.json was altered"):
        Tokenizer.load(path)


@pytest.mark.parametrize("load", [files.load, files.load_huggingface])
@pytest.mark.parametrize("content", ["[]", "7", "null", "{}", b"\xff", '{"model": 7}'])
def test_what_is_no_tokenizer_is_rejected(path, load, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load(path)


@pytest.mark.parametrize("load", [files.load, files.load_huggingface])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"vocab": []}, {"vocab": {"a": [1]}}, {"vocab": {"a": True}}),
        *({"merges": 7}, {"merges": [7]}, {"merges": [["a"]]}),
        {"special_tokens": {"a": None}, "added_tokens": [{}]},
        {"special_tokens": [], "added_tokens": 7},
    ],
    ids=str,
)
def test_malformed_parts_are_rejected(path, load, wrong):
    # one document in both formats, in which all else is as it should be
    parts = {"vocab": {}, "merges": [], "special_tokens": {}, "added_tokens": []} | wrong
    before = {"type": "ByteLevel", "add_prefix_space": False}
    document = PARTS | parts | {"pre_tokenizer": before, "model": {"type": "BPE"} | parts}
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"tokenizer\.json.*: \w+Error\((?!.*pre_tokenizer)"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "byte-level-bpe", "vocab": {', "is not JSON"),
        ("[]", "not a tokenizer of this library"),
        ('{"format": "byte-level-bpe", "version": 2}', "version must be 1, got 2"),
        ('{"format": "byte-level-bpe", "version": 1}', "pattern must be .*, got None"),
        (json.dumps(PARTS), "is damaged: KeyError"),
        (json.dumps(PARTS | {"pattern": r"\w+"}), r"pattern must be .*, got '\\\\w\+'"),
        (json.dumps(PARTS | {"unicode": "17.0"}), "unicode must be '16.0', got '17.0'"),
    ],
)
def test_other_files_are_rejected(path, content, message):
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json.*{message}"):
        Tokenizer.load(path)


@pytest.fixture(scope="module")
def huggingface(plain, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "tokenizer.json"
    files.save_huggingface(path, plain.parts)
    return tokenizers.Tokenizer.from_file(str(path))


@settings(max_examples=50)
@given(text=tricky_text())
def test_hugging_face_reads_the_export_and_gives_the_same_ids(plain, huggingface, text):
    # it follows another version of Unicode, so only ASCII is sure to be split the same way
    text = text.encode("ascii", "ignore").decode()
    assert huggingface.encode(text).ids == plain.encode(text)


def test_the_hugging_face_export_is_imported_again(plain, path):
    files.save_huggingface(path, plain.parts)
    loaded = Tokenizer.from_parts(files.load_huggingface(path))
    assert loaded.parts == plain.parts


def test_a_special_token_that_hugging_face_cannot_express_is_rejected(tokenizer, path):
    with pytest.raises(ValueError, match=r"special_tokens must differ .* got 'a'"):
        files.save_huggingface(path, tokenizer.parts)


def test_a_tokenizer_trained_by_hugging_face_is_imported(tmp_path):
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=[SEPARATOR], show_progress=False
    )
    peer.train_from_iterator([TEXT], trainer)
    peer.save(str(tmp_path / "peer.json"))
    ours = Tokenizer.from_parts(files.load_huggingface(tmp_path / "peer.json"))
    assert ours.encode(TEXT) == peer.encode(TEXT).ids


@pytest.mark.parametrize("pattern", [files.GPT2_PATTERN, files.GPT2_PATTERN_SPELLED_OUT])
def test_settings_of_the_same_effect_are_taken(plain, path, pattern):
    files.save_huggingface(path, plain.parts)
    peer = tokenizers.Tokenizer.from_file(str(path))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    peer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    peer.normalizer = tokenizers.normalizers.Sequence([])
    peer.save(str(path))
    ours = Tokenizer.from_parts(files.load_huggingface(path))
    assert ours.encode(TEXT) == peer.encode(TEXT).ids == plain.encode(TEXT)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("model", {"type": "Unigram"}, "must be a byte-level BPE, got Unigram"),
        ("model", {"dropout": 0.1}, "dropout must be None, got 0.1"),
        ("model", {"continuing_subword_prefix": "##"}, "continuing_subword_prefix must be None"),
        ("model", {"end_of_word_suffix": "</w>"}, "end_of_word_suffix must be None"),
        ("model", {"ignore_merges": True}, "ignore_merges must be False"),
        ("pre_tokenizer", {"add_prefix_space": True}, "add_prefix_space must be False"),
        ("pre_tokenizer", {"use_regex": False}, "use_regex must be True"),
    ],
)
def test_what_gives_other_ids_in_hugging_face_is_rejected(plain, path, section, change, message):
    files.save_huggingface(path, plain.parts)
    document = json.loads(path.read_text())
    document[section] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        files.load_huggingface(path)


def test_ids_that_a_file_cannot_tell_apart_are_rejected(tokenizer, path):
    twice = Tokenizer({**tokenizer.vocab, 5000: b"a"}, tokenizer.merges)
    with pytest.raises(ValueError, match="different bytes for each id"):
        twice.save(path)


def test_the_fingerprint_changes_with_anything_that_determines_ids(tokenizer):
    vocab, merges, special_tokens, _ = tokenizer.parts
    prints = {
        files.fingerprint(parts)
        for parts in [
            tokenizer.parts,
            tokenizer.parts._replace(merges=merges[:-1]),
            tokenizer.parts._replace(special_tokens={**special_tokens, SEPARATOR: 5000}),
            tokenizer.parts._replace(vocab={**vocab, 5000: b"xyz"}),
        ]
    }
    assert len(prints) == 4


def test_what_ends_a_text_is_kept_and_the_usual_token_needs_no_word(tokenizer, path):
    tokenizer.save(path)
    assert "end_tokens" not in json.loads(path.read_text(encoding="utf-8"))
    assert Tokenizer.load(path).end_tokens == (SEPARATOR,)
    vocab = {token_id: token for token_id, token in tokenizer.vocab.items() if token_id < 256}
    other = Tokenizer(vocab, [], [SEPARATOR, "<end>"], end_tokens=["<end>"])
    other.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.end_tokens == ("<end>",)
    assert loaded.end_ids == [loaded.special_tokens["<end>"]]
    with pytest.raises(ValueError, match="end_tokens must be special tokens, got 'the'"):
        Tokenizer(tokenizer.vocab, tokenizer.merges, end_tokens=["the"])
