"""Training, encoding and decoding, in both implementations unless a test says otherwise."""

import io
import lzma
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers as tokenizers_of_huggingface
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lib.tokenizer import bpe, compiled_encoder
from lib.tokenizer import implementation as implementation_choice
from lib.tokenizer.bpe import (
    Tokenizer,
    count_pretokens,
    merge_pair,
    train_bpe,
    train_from_counts,
)
from lib.tokenizer.files import (
    Parts,
    from_printable,
    save_huggingface,
    to_printable,
)
from lib.tokenizer.implementation import CompiledCode
from lib.tokenizer.pretokenize import GPT2_PATTERN, SEPARATOR
from tests.texts import tricky_text

ROOT = Path(__file__).parents[2]
TEXT = (
    "The old cat sat on the mat. “Don't you want to play?” asked the cat's friend, the 3 mice.\n"
    f"They'd played all day!\r\n\r\n{SEPARATOR}\nÜber den Wolken, 日本語のテキスト, 42 €\t\n  \n"
) * 3
SPECIAL = [SEPARATOR, "<|a|>", "<|a|><|b|>", " <x>", "c\n"]


def train(tmp_path, text, vocab_size, special_tokens=(), **options):
    path = tmp_path / "text.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return train_bpe(path, vocab_size, special_tokens, **options)


@pytest.fixture(params=["python", "numba"], scope="module")
def implementation(request):
    return request.param


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), TEXT, 380, SPECIAL, implementation="python")


@pytest.fixture(scope="module")
def tokenizers(trained):
    return {name: Tokenizer(*trained, SPECIAL, implementation=name) for name in ("python", "numba")}


@pytest.fixture(scope="module")
def tokenizer(tokenizers, implementation):
    return tokenizers[implementation]


@pytest.fixture(scope="module")
def peer(trained):
    return tiktoken_with(trained[0], SPECIAL)


def tiktoken_with(vocab, special_tokens):
    """tiktoken's encoder with the tokens `vocab`, id -> bytes."""
    ids = {token: token_id for token_id, token in vocab.items()}
    special = {token: ids.pop(token.encode()) for token in special_tokens}
    return tiktoken.Encoding(
        "peer", pat_str=GPT2_PATTERN, mergeable_ranks=ids, special_tokens=special
    )


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2's tokenizer in both implementations."""
    with lzma.open(ROOT / "artifacts/gpt2/vocab.bpe.xz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()[1:]
    merges = [tuple(map(from_printable, line.split())) for line in lines]
    # the bytes in the order of their printable forms: those that print as themselves come first
    tokens = sorted((bytes([byte]) for byte in range(256)), key=to_printable)
    tokens += [*map(b"".join, merges), SEPARATOR.encode()]
    parts = Parts(dict(enumerate(tokens)), merges, {SEPARATOR: 50256})
    return {name: Tokenizer.from_parts(parts, implementation=name) for name in ("python", "numba")}


@pytest.fixture(scope="module")
def gpt2_peers(gpt2, tmp_path_factory):
    """Encoders of tiktoken and of Hugging Face's tokenizers with GPT-2's vocabulary."""
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    save_huggingface(path, gpt2["python"].parts)
    huggingface = tokenizers_of_huggingface.Tokenizer.from_file(str(path))
    parts = gpt2["python"].parts
    peer = tiktoken_with(parts.vocab, parts.special_tokens)
    return peer.encode, lambda text: huggingface.encode(text).ids


# Training


def simple_merges(counts, number):
    """Byte-pair encoding by its definition: count everything again for each merge."""
    words = {tuple(bytes([b]) for b in word): count for word, count in counts.items()}
    merges = []
    for _ in range(number):
        pairs = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        merged = Counter()
        for word, count in words.items():
            pieces = list(word)
            for i in range(len(pieces) - 1):
                if tuple(pieces[i : i + 2]) == best:
                    pieces[i : i + 2] = [b"".join(best), b""]
            merged[tuple(filter(None, pieces))] += count
        words = merged
    return merges


words = st.lists(st.sampled_from([b"a", b"b", b"ab", b"\x00", b"\xff", b"c"]), max_size=12)


@given(st.dictionaries(words.map(b"".join).filter(len), st.integers(1, 5), max_size=12))
@example({b"aaaa": 1, b"aaa": 1})
# of equally frequent pairs, the greater one
@example({b"ab": 1, b"ba": 1})
@example({b"low": 5, b"lower": 2, b"widest": 3, b"newest": 6})
def test_merges_equal_those_of_the_definition(counts):
    _, merges = train_from_counts(counts, 256 + 30)
    assert merges == simple_merges(counts, 30)


def test_one_long_word_takes_no_longer_than_many_short_ones():
    letters = bytes(random.Random(0).choices(b"abcdefgh", k=70_000))

    def seconds(words):
        start = time.process_time()
        train_from_counts(Counter(words), 456)
        return time.process_time() - start

    short = [letters[start : start + 7] for start in range(0, len(letters), 7)]
    assert min(seconds([letters]) for _ in range(2)) < 4 * seconds(short)


invalid = st.lists(st.sampled_from([b"a", b"\xff", b"\xc3", b"(", b"\xed\xa0\x80", b" "]))
contents = tricky_text(60).map(str.encode) | invalid.map(b"".join)


@settings(max_examples=60)
@given(contents, st.integers(0, 80), st.sampled_from([[], SPECIAL]))
@example(b"one\r\n\r\n\r\ntwo\r\n" * 20, 40, [])
def test_a_file_gives_the_merges_of_its_pretokens(tmp_path_factory, text, merges, special_tokens):
    folder = tmp_path_factory.mktemp("file")
    # invalid bytes count as replacement characters
    counts = count_pretokens(text.decode("utf-8", "replace"), special_tokens)
    expected = simple_merges(counts, merges)
    tokens = [*(bytes([byte]) for byte in range(256)), *map(b"".join, expected)]
    tokens += [token.encode() for token in special_tokens]
    size = 256 + merges + len(special_tokens)
    for name in ("python", "numba"):
        vocab, learned = train(folder, text, size, special_tokens, implementation=name)
        assert learned == expected
        assert vocab == dict(enumerate(tokens))


def test_merges_do_not_depend_on_workers_or_chunks(tmp_path, monkeypatch, implementation):
    text, done = TEXT * 10, []
    options = {"implementation": implementation, "progress": done.append}
    expected = train(tmp_path, text, 350, SPECIAL, workers=1, **options)
    monkeypatch.setattr(bpe, "CHUNK_BYTES", 100)
    for workers in (1, 2):
        done.clear()
        assert train(tmp_path, text, 350, SPECIAL, workers=workers, **options) == expected
        assert sum(done) == len(text.encode())
        assert len(done) > 10


def test_special_tokens_are_not_counted_nor_merged_across(tmp_path, implementation):
    text = f"ab{SEPARATOR}ab{SEPARATOR}" * 20
    # one that is given twice counts once
    for special_tokens in ([SEPARATOR], iter([SEPARATOR] * 2)):
        vocab, merges = train(tmp_path, text, 300, special_tokens, implementation=implementation)
        assert merges == [(b"a", b"b")]
        assert (len(vocab), vocab[257]) == (258, SEPARATOR.encode())


@pytest.mark.parametrize(("text", "learned"), [("abc", 2), ("", 0)])
def test_stops_when_the_text_gives_no_more(tmp_path, caplog, implementation, text, learned):
    vocab, merges = train(tmp_path, text, 1000, [SEPARATOR], implementation=implementation)
    assert (len(vocab), len(merges)) == (257 + learned, learned)
    assert f"stopped at {257 + learned} tokens" in caplog.text


@pytest.mark.parametrize(
    ("vocab_size", "special_tokens", "options", "message"),
    [
        (257, ["<|a|>", "<|b|>"], {}, r"256 bytes \+ 2 special tokens = 258, got 257"),
        (300, "<a>", {}, "special_tokens must be a list of texts, got '<a>'"),
        (300, [""], {}, "special_tokens must not hold an empty text"),
        ("300", [], {}, "vocab_size must be a whole number, at least 256, got '300'"),
        (300.0, [], {}, r"vocab_size must be a whole number, at least 256, got 300\.0"),
        (300, [], {"workers": -1}, "workers must be a whole number, at least 1, got -1"),
        (300, [], {"workers": True}, "workers must be a whole number, at least 1, got True"),
        (300, 5, {}, "special_tokens must be a list of texts, got 5"),
        (300, [], {"implementation": "rust"}, "one of auto, python, numba, got 'rust'"),
    ],
)
def test_wrong_arguments_are_rejected(tmp_path, vocab_size, special_tokens, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, TEXT, vocab_size, special_tokens, **options)


@pytest.mark.parametrize(
    ("size", "is_installed", "words"),
    [
        (10, True, "compiled implementation"),
        (1 << 30, True, "Python implementation .*small input"),
        (10, False, "Python implementation .*Numba is not installed"),
    ],
)
def test_the_choice_of_implementation_is_logged(
    tmp_path, monkeypatch, caplog, size, is_installed, words
):
    monkeypatch.setattr(bpe, "COMPILED_TRAINING_BYTES", size)
    monkeypatch.setattr(implementation_choice, "numba_installed", lambda: is_installed)
    with caplog.at_level("INFO"):
        train(tmp_path, TEXT, 300)
    assert re.search(words, caplog.text)
    if not is_installed:
        with pytest.raises(ImportError, match="numba"):
            train(tmp_path, TEXT, 300, implementation="numba")


LIMITED = """
import resource, sys
from pathlib import Path
from lib.tokenizer.bpe import Tokenizer
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
tokenizer.encode("a b")
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), -1))
print(len(tokenizer.encode("ab " * 500_000)), "numba" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_numba_is_not_loaded_where_the_address_space_is_limited():
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1500000", "False"]


@pytest.fixture
def loading(monkeypatch):
    """Compiled code that is not loaded yet; the test says with `set` when it may be."""
    allowed = threading.Event()
    code = CompiledCode()
    load = code._load
    monkeypatch.setattr(code, "_load", lambda first_use: allowed.wait() and load(first_use))
    monkeypatch.setattr(bpe, "COMPILED_CODE", code)
    monkeypatch.setattr(bpe, "COMPILED_ENCODING_BYTES", 10_000)
    monkeypatch.setattr(bpe, "PART_BYTES", 1_000)
    yield allowed, code
    allowed.set()


def test_the_readable_code_works_until_the_compiled_code_is_there(
    trained, tokenizers, loading, monkeypatch
):
    allowed, code = loading
    tokenizer, expected = Tokenizer(*trained, SPECIAL), tokenizers["numba"].encode(TEXT)
    assert tokenizer.encode(TEXT) == expected
    assert code._loaded is None
    for _ in range(20):
        assert tokenizer.encode(TEXT) == expected
    # asked for, but not there
    assert code._loaded is not None
    assert tokenizer._compiled is None
    # then it is, within a long text
    readably, parts = tokenizer._encode_readably, []

    def encode(text, allow_special):
        parts.append(text)
        if len(parts) == 5:
            allowed.set()
            code._loaded.result(timeout=120)
        return readably(text, allow_special)

    monkeypatch.setattr(tokenizer, "_encode_readably", encode)
    assert tokenizer.encode(TEXT * 50) == tokenizers["numba"].encode(TEXT * 50)
    assert len(parts) == 5


def test_without_numba_the_readable_code_goes_on(trained, tokenizers, loading, monkeypatch):
    monkeypatch.setattr(implementation_choice, "numba_installed", lambda: False)
    tokenizer = Tokenizer(*trained, SPECIAL)
    for _ in range(3):
        assert tokenizer.encode(TEXT * 20) == tokenizers["numba"].encode(TEXT * 20)
    assert tokenizer._compiled is None


# Encoding and decoding


@settings(max_examples=60)
@given(
    texts=st.lists(st.one_of(tricky_text(8), st.sampled_from(["", "<|a|", ">", "x", "'", "s"]))),
    allow_special=st.booleans(),
)
def test_a_batch_gives_the_ids_of_each_text(tokenizer, texts, allow_special):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_encoder, "BATCH_TEXTS", 3)
        patch.setattr(bpe, "STREAM_BYTES", 20)
        batch = tokenizer.encode_batch(iter(texts), allow_special=allow_special, workers=2)
    assert all(ids.dtype == tokenizer.dtype for ids in batch)
    expected = [tokenizer.encode(text, allow_special=allow_special) for text in texts]
    assert [ids.tolist() for ids in batch] == expected


def test_texts_longer_than_a_workspace(tokenizers):
    texts = ["ab " * 500_000, "x", "é" * 700_000, "", "a b" * 200_000, "ab é€ " * 200_000]
    expected = [tokenizers["python"].encode(text) for text in texts]
    numba = tokenizers["numba"]
    assert [numba.encode(text) for text in texts] == expected
    assert [numba.encode_array(text.encode()).tolist() for text in texts] == expected
    assert [ids.tolist() for ids in numba.encode_batch(texts)] == expected


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("foo  \n  bar", [21943, 220, 220, 198, 220, 2318]),
        ("don't DON'T don’t", [9099, 470, 23917, 6, 51, 836, 447, 247, 83]),
        (f"a\u00a0b{SEPARATOR}b", [64, 1849, 65, 50256, 65]),
    ],
)
def test_ids_of_gpt2(gpt2, implementation, text, ids):
    tokenizer = gpt2[implementation]
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.decode(ids) == text
    # half of a character
    assert tokenizer.decode([447, *ids]) == f"\ufffd{text}"
    with pytest.raises(UnicodeDecodeError):
        tokenizer.decode([447], errors="strict")


alphabets = st.sampled_from(
    ["etaoinsr", "a", " \n", " \t\r\n", "=-*", "0123", "日本語中文", "éß", "\0ÿ"]
)
repeated = st.tuples(
    alphabets.flatmap(lambda alphabet: st.text(alphabet, min_size=1)), st.integers(1, 60)
)
long_pretokens = st.lists(repeated.map(lambda t: t[0] * t[1]), min_size=1, max_size=3).map("".join)


@settings(max_examples=100)
@given(text=long_pretokens)
@example(" \n  \n" * 100)
def test_long_pretokens_have_the_ids_of_gpt2_and_its_peers(gpt2, gpt2_peers, text):
    ids = gpt2["python"].encode(text)
    assert gpt2["numba"].encode(text) == ids
    for encode in gpt2_peers:
        assert encode(text) == ids


@settings(max_examples=200)
@given(text=tricky_text())
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_array(text)) == text


def random_merges(draw, letters):
    """Merges in any order that a file may have, which training would not always learn."""
    tokens, merges = [letter.encode() for letter in letters], []
    for _ in range(draw.choice([3, 12, 60])):
        left, right = draw.choice(tokens), draw.choice(tokens)
        if left + right not in tokens and len(left + right) < draw.choice([4, 9, 40]):
            merges.append((left, right))
            tokens.append(left + right)
    return merges


@pytest.mark.parametrize("letters", ["a", "ab", "abcd", " \n"])
def test_ids_equal_those_of_the_definition(implementation, letters):
    """Apply each merge, in the order of learning, wherever it fits; long words have other code."""
    draw = random.Random(letters)
    for _ in range(80):
        merges = random_merges(draw, letters)
        vocab = dict(enumerate([*(bytes([byte]) for byte in range(256)), *map(b"".join, merges)]))
        tokenizer = Tokenizer(vocab, merges, implementation=implementation)
        for _ in range(5):
            random_word = "".join(draw.choices(letters, k=draw.randrange(1, 99)))
            word = draw.choice([random_word, letters * draw.randrange(1, 60)])
            pieces = [bytes([byte]) for byte in word.encode()]
            for pair in merges:
                pieces = merge_pair(pieces, pair, b"".join(pair))
            assert [vocab[i] for i in tokenizer.encode(word)] == pieces, (merges, word)


@settings(max_examples=300)
@given(text=tricky_text())
def test_both_implementations_give_the_ids_of_tiktoken(tokenizers, peer, text):
    ids = tokenizers["python"].encode(text)
    assert tokenizers["numba"].encode(text) == ids
    # tiktoken takes the special token that begins first, but does not promise the longest
    if "<|a|><|b|>" not in text:
        assert ids == peer.encode(text, allowed_special="all")


@settings(max_examples=100)
@given(pieces=st.lists(tricky_text(5), max_size=8))
def test_an_iterable_gives_the_ids_of_the_joined_text(tokenizer, pieces):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "ITERABLE_BYTES", 8)
        assert list(tokenizer.encode_iterable(pieces)) == tokenizer.encode("".join(pieces))


def test_an_iterable_is_read_only_as_far_as_needed(tokenizers):
    read = []

    def lines():
        for number in range(1000):
            read.append(number)
            yield "some words that fill a line, again and again and again\n"

    ids = tokenizers["python"].encode_iterable(lines())
    next(ids)
    assert len(read) < 300


@settings(max_examples=50)
@given(text=tricky_text(), chunk=st.integers(1, 50), workers=st.sampled_from([1, 2, 7]))
def test_a_stream_does_not_depend_on_chunks_or_workers(tokenizer, text, chunk, workers):
    stream = io.BytesIO(text.encode())
    results = list(tokenizer.encode_stream(stream, chunk_bytes=chunk, workers=workers))
    assert sum(length for length, _ in results) == len(text.encode())
    assert [i for _, ids in results for i in ids.tolist()] == tokenizer.encode(text)


@given(parts=st.lists(st.sampled_from([b"\xff", b"\xc3", b"\xa9", b"\xf0\x9f", b" ", b"a"])))
def test_invalid_utf8_encodes_as_replacement_characters(tokenizer, parts):
    data = b"".join(parts)
    expected = tokenizer.encode(data.decode("utf-8", "replace"))
    assert tokenizer.encode_array(data).tolist() == expected


def test_arrays_tensors_and_generators_decode(tokenizer):
    import torch

    ids = tokenizer.encode("Über 42 cats")
    for form in (np.array(ids), np.array(ids, np.uint16), torch.tensor(ids), iter(ids), tuple(ids)):
        assert tokenizer.decode(form) == "Über 42 cats"
    # lists of integers of other types
    for form in (list(torch.tensor(ids)), list(np.array(ids))):
        assert tokenizer.decode(form) == "Über 42 cats"
    assert tokenizer.decode(np.array([])) == tokenizer.decode([]) == ""


def test_what_is_no_row_of_known_ids_is_rejected(tokenizer):
    for wrong in ([-1], [0, 10**6], [1, 380], [2**70]):
        with pytest.raises(ValueError, match=rf"token id .*{wrong[-1]}"):
            tokenizer.decode(wrong)
    for ids in (np.array([[97]]), np.array([97.5])):
        with pytest.raises(ValueError, match=r"ids must be integers, \(n,\)"):
            tokenizer.decode(ids)
    for wrong in ([97.5], [1.0], ["1"], [None]):
        with pytest.raises(ValueError, match=rf"a token id must be .* got {wrong[0]!r}"):
            tokenizer.decode(wrong)
    for wrong in (5, None, "ab", b"ab"):
        with pytest.raises(ValueError, match=rf"ids must be a list, .* got {wrong!r}"):
            tokenizer.decode(wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (None, TypeError, "a str, got NoneType"),
        (5, TypeError, "a str, got int"),
        (b"ab", TypeError, "a str, got bytes"),
        (["a"], TypeError, "a str, got list"),
        ("ab \ud800", ValueError, "got half of a surrogate pair, '\\ud800', at index 3"),
        ("é x" * 500_000 + "\udc80", ValueError, "'\\udc80', at index 1500000"),
    ],
)
def test_what_is_no_text_is_named(tokenizer, wrong, error, message):
    for name, act in (
        ("text", lambda: tokenizer.encode(wrong)),
        # this one takes bytes
        *([("text", lambda: tokenizer.encode_array(wrong))] if wrong != b"ab" else []),
        ("texts[1]", lambda: tokenizer.encode_batch(["a", wrong, None])),
        ("iterable[1]", lambda: list(tokenizer.encode_iterable(["a", wrong]))),
        ("special_tokens[1]", lambda: Tokenizer(*tokenizer.parts[:2], ["a", wrong])),
    ):
        with pytest.raises(error, match=f"^{re.escape(name)} must be .*{re.escape(message)}"):
            act()


@pytest.mark.parametrize("texts", ["abc", 5])
def test_one_text_is_not_taken_for_several(tokenizer, texts):
    message = re.escape(f"texts must be several texts, such as a list, got {texts!r}")
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_batch(texts)


def test_special_tokens_that_the_vocabulary_lacks_get_the_next_ids(trained):
    tokenizer = Tokenizer(*trained, iter([*SPECIAL, "<|new|>", "<|new|>"]))
    assert list(tokenizer.special_tokens) == [*SPECIAL, "<|new|>"]
    assert tokenizer.special_tokens["<|new|>"] == max(trained[0]) + 1
    assert tokenizer.encode("<|new|>") == [max(trained[0]) + 1]


def test_a_huge_vocabulary_takes_no_more_memory_than_the_text_needs(tmp_path):
    vocab, _ = train(tmp_path, "abc abd", 2_000_000_000, implementation="numba")
    assert len(vocab) < 270


def test_the_readable_cache_is_bounded(trained, monkeypatch):
    monkeypatch.setattr(bpe, "MAX_CACHED_WORDS", 10)
    tokenizer = Tokenizer(*trained, implementation="python")
    tokenizer.encode(" ".join(map(str, range(1000))))
    assert len(tokenizer._spaced_words) <= 10


def test_a_special_token_may_look_like_an_ordinary_one(tmp_path):
    vocab, merges = train(tmp_path, "aab ab", 260, ["a"])
    tokenizer = Tokenizer(vocab, merges, ["a"])
    assert tokenizer.special_tokens == {"a": max(vocab)}
    assert tokenizer.encode("ab") == [max(vocab), ord("b")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vocab, merges: vocab.pop(65), r"all 256 bytes, but lacks \[65\]"),
        (lambda vocab, merges: vocab.update({500: b""}), "bytes for every id, got none for 500"),
        (lambda vocab, merges: vocab.update({500.0: b"ab"}), "whole numbers as ids, got 500.0"),
        (lambda vocab, merges: vocab.update({500: "ab"}), "map ids to bytes, got 'ab' for 500"),
        (lambda vocab, merges: vocab.update({1 << 24: b"x"}), "from 0 to 16777215, got 16777216"),
        (lambda vocab, merges: vocab.update({-1: b"x"}), "ids from 0 to 16777215, got -1"),
        (lambda vocab, merges: vocab.pop(256), "merge 0 makes .*, which is not in the vocabulary"),
        (lambda vocab, merges: merges.pop(0), "which no earlier merge has made"),
        (lambda vocab, merges: merges.append(merges[0]), "which an earlier merge has made"),
    ],
)
def test_parts_that_do_not_fit_together_are_rejected(trained, change, message):
    vocab, merges = dict(trained[0]), list(trained[1])
    change(vocab, merges)
    with pytest.raises(ValueError, match=message):
        Tokenizer(vocab, merges)


@given(text=tricky_text())
def test_special_tokens_are_ordinary_text_where_they_are_not_allowed(
    trained, tokenizer, implementation, text
):
    ordinary = Tokenizer(*trained, implementation=implementation)
    expected = ordinary.encode(text)
    assert tokenizer.encode(text, allow_special=False) == expected
    assert tokenizer.encode_array(text, allow_special=False).tolist() == expected


@pytest.mark.parametrize(
    "piece",
    # each is one pre-token of 160 kB, or as good as one
    [" \n  \n", " ", "\n", "  \n", "\t ", "a", "ab", "!", "'", "日", "\u3000 ", f"{SEPARATOR} "]
    + [
        "".join(random.Random(0).choices(kind, k=160_000 // 3))
        for kind in ("abcdefghthe", "日本語")
    ],
    ids=lambda piece: ascii(piece[:9]),
)
def test_no_text_takes_much_longer_than_words_that_are_all_different(trained, monkeypatch, piece):
    # as where Numba is missing
    monkeypatch.setattr(implementation_choice, "numba_installed", lambda: False)
    draw = random.Random(0)
    words = " ".join("".join(draw.choices("abcdefgh", k=7)) for _ in range(20_000))

    def seconds(text):
        tokenizer = Tokenizer(*trained, SPECIAL)
        tokenizer.encode("all that is done once")
        start = time.process_time()
        tokenizer.encode(text)
        return time.process_time() - start

    text = piece * (len(words) // len(piece.encode()))
    assert min(seconds(text) for _ in range(2)) < 4 * seconds(words)
