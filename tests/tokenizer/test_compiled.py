"""The compiled implementation: kernels against plain Python, full tables, threads, its cache."""

import copy
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
from hypothesis import example, given, settings
from numba import njit

from lib.tokenizer.bpe import Tokenizer, count_pretokens, train_bpe, train_from_counts
from lib.tokenizer.compiled_encoder import BATCH, Cache, CompiledEncoder
from lib.tokenizer.compiled_merges import Learner, learn_merges, new_learner
from lib.tokenizer.compiled_scan import (
    PADDING,
    WINDOW,
    class_table,
    is_valid_utf8,
    new_special,
    next_pretoken,
    padded,
    valid_utf8,
)
from lib.tokenizer.compiled_words import ENTRY, WordCounts, new_table
from lib.tokenizer.pretokenize import SEPARATOR, split_pretokens
from tests.texts import every_character, tricky_text

LIB = Path(__file__).parents[2] / "lib"


@njit
def scan(data, length, classes, found):
    """Write the ends of all pre-tokens to `found`; return their number."""
    number = i = base = 0
    ends = np.uint64(0)
    while i < length:
        i, base, ends = next_pretoken(data, i, length, classes, base, ends)
        found[number] = i
        number += 1
    return number


def scanned(text: str) -> list[str]:
    """The pre-tokens that the scanner finds."""
    content = text.encode()
    data, length = padded(content), len(content)
    ends = np.empty(length, np.int64)
    ends = ends[: scan(data, length, class_table(), ends)].tolist()
    return [content[start:end].decode() for start, end in zip([0, *ends], ends)]


@settings(max_examples=500)
@given(text=tricky_text())
@example("it's")
@example("we'll  see\r\n ")
def test_the_scanner_splits_as_the_pattern_does(text):
    assert scanned(text) == split_pretokens(text)


@pytest.mark.parametrize("filler", ["x", " x", "1", "!", "'", "é", " 日", "²", "€", "\n", "\u3000"])
@pytest.mark.parametrize(
    "tail", ["'ll", "'s's", " \u3000\u3000x", "\u2028é", "  ", "\n\n y", "😀'"]
)
def test_nothing_changes_at_the_border_of_a_window(filler, tail):
    for length in range(40, 2 * WINDOW + 4):
        text = (filler * length)[:length] + tail
        assert scanned(text) == split_pretokens(text)
        assert scanned(text + "z") == split_pretokens(text + "z")


def test_the_scanner_splits_every_character_by_its_pinned_class():
    text, pretokens = every_character()
    assert scanned(text) == pretokens


well_formed = [b"a" * 8, b"abc", "é".encode(), "日".encode(), "😀".encode()]
# overlong forms, surrogates, beyond the last code point, parts of characters
malformed = "ff c080 c3 80 e08080 eda080 f0808080 f4908080 f5808080"
utf8_pieces = [b"a" * 64, *well_formed, *map(bytes.fromhex, malformed.split())]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_utf8_is_checked_as_python_checks_it(number):
    for pieces in product(utf8_pieces, repeat=number):
        text = b"".join(pieces)
        data = np.frombuffer(text + bytes(PADDING), np.uint8)
        replaced = text.decode("utf-8", "replace").encode()
        assert is_valid_utf8(data, len(text)) == (replaced == text)
        assert valid_utf8(text) == replaced


@pytest.mark.parametrize("rows", [1, 64, 1 << 15, 1 << 19])
def test_no_entry_of_a_table_crosses_a_line_of_the_cache(rows):
    table = new_table(rows)
    assert (len(table), table.ctypes.data % (8 * ENTRY)) == (rows * ENTRY, 0)


def as_dictionary(words: WordCounts) -> dict[bytes, int]:
    starts = words.starts
    return {
        words.kept[starts[w] : starts[w + 1]].tobytes(): int(words.counts[w])
        for w in range(words.num_words)
    }


def counted(text: str, special_tokens: Sequence[str] = ()) -> WordCounts:
    words = WordCounts(new_special(dict.fromkeys(special_tokens, 0)))
    words.count(text.encode())
    return words


@given(text=tricky_text())
def test_counts_equal_those_of_the_readable_path(text):
    special_tokens = ["<|a|>", "<|a|><|b|>", " <x>"]
    found = as_dictionary(counted(text, special_tokens))
    assert found == count_pretokens(text, special_tokens)


def test_counts_survive_full_tables_and_threads(monkeypatch):
    monkeypatch.setattr(WordCounts, "SMALL_TABLE_ROWS", 64)
    generator = random.Random(1)
    words = [str(generator.randrange(100_000)) for _ in range(60_000)]
    words += ["long" * generator.randrange(20) for _ in range(5_000)]
    chunks = [" ".join(words[i : i + 1000]) for i in range(0, len(words), 1000)]
    gathered = WordCounts(new_special({}))
    threads = [
        threading.Thread(target=lambda k=k: [gathered.count(c.encode()) for c in chunks[k::4]])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sum((count_pretokens(chunk) for chunk in chunks), Counter())
    assert as_dictionary(gathered) == expected


def small_arrays(learner: Learner) -> Learner:
    """The same learner with every array that can grow as small as possible."""
    return learner._replace(
        sites=learner.sites[: len(learner.cells)].copy(),
        heap=learner.heap[:4].copy(),
        pairs=learner.pairs[: 1 << 14].copy(),
        token_bytes=learner.token_bytes[:260].copy(),
    )


@pytest.mark.parametrize("alphabet", ["ab", "abcdefgh ", "the quick brown fox 日本語é "])
def test_arrays_that_grow_do_not_change_the_merges(alphabet):
    generator = random.Random(alphabet)
    text = "".join(generator.choice(alphabet) for _ in range(20_000))
    rows = learn_merges(small_arrays(new_learner(counted(text), 500)))
    vocab, merges = train_from_counts(count_pretokens(text), 256 + 500)
    assert [(vocab[left], vocab[right]) for left, right in rows] == merges


@pytest.mark.slow
def test_counts_beyond_32_bits():
    """Slow, since all kernels are compiled again for cells of 64 bits."""
    words = counted("ab ab cd")
    expected = learn_merges(new_learner(words, 3))
    words.counts[: words.num_words] *= 1 << 40
    assert learn_merges(new_learner(words, 3)) == expected


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("fast") / "text.txt"
    generator = random.Random(0)
    syllables = ["ba", "de", "fi", "go", "lu", "né", "ра", "日本"]
    words = [
        "".join(generator.choices(syllables, k=generator.randrange(1, 9))) for _ in range(4000)
    ]
    path.write_text(" ".join(words) + SEPARATOR)
    return path.read_text(), train_bpe(path, 700, [SEPARATOR], implementation="python")


def use_cache(
    monkeypatch, rows: int = 1 << 16, first_rows: int = 0, ids: int = 1 << 20, kept: int = 1 << 20
) -> Cache:
    """Give encoders a cache of this size, whose table begins with `first_rows`, or all.

    Behind what overflows is a megabyte of sevens.
    """
    first = (first_rows or rows) * ENTRY
    table = np.full(rows * ENTRY, 7, np.uint64)
    table[:first] = 0
    used, batch = np.array([0, 0, 0, first]), np.empty(BATCH * 4, np.uint64)
    own_ids = np.full(ids + (1 << 20), 7, np.uint32)[:ids]
    own_kept = np.full(kept + (1 << 20), 7, np.uint8)[:kept]
    cache = Cache(table, own_ids, own_kept, used, batch)
    monkeypatch.setattr("lib.tokenizer.compiled_encoder.new_cache", lambda: cache)
    return cache


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 64},
        {"ids": 300},
        {"kept": 300},
        # the table grows
        {"first_rows": 64},
        {"rows": 1 << 10, "first_rows": 1 << 8},
    ],
    ids=str,
)
def test_a_cache_that_overflows_or_grows_does_not_change_the_ids(trained, monkeypatch, sizes):
    text, parts = trained
    expected = Tokenizer(*parts, [SEPARATOR], implementation="python").encode(text)
    cache = use_cache(monkeypatch, **sizes)
    tokenizer = Tokenizer(*parts, [SEPARATOR], implementation="numba")
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode(text) == expected
    for array in (cache.ids, cache.kept):
        assert (array.base[len(array) :] == 7).all()


def test_a_cache_keeps_as_many_pretokens_as_fill_four_fifths_of_its_table(trained, monkeypatch):
    """Cleared at one half, it would never have what a text of that many comes back to."""
    rows, words = 1 << 10, 800
    cache = use_cache(monkeypatch, rows)
    tokenizer = Tokenizer(*trained[1], [SEPARATOR], implementation="numba")
    tokenizer.encode("".join(f" {n}" for n in range(words)))
    # and the "a" that an encoder begins with
    assert cache.used[0] == words + 1


@pytest.mark.parametrize("last_id", [300, 70_000])
def test_words_of_every_length_have_the_ids_of_the_python_code(last_id):
    """Lengths around those where another way begins, with ids of 16 and of 32 bits."""
    merges = [(b"a", b"b"), (b"ab", b"a"), (b"b", b"b"), (b"ab", b"bb"), (b"aba", b"ab")]
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    vocab = dict(enumerate(tokens)) | {last_id: b"last"}
    lengths = [*range(1, 20), 31, 32, 61, 62, 63, 64, 254, 255, 256, 257, 700]
    draw = random.Random(0)
    words = ["".join(draw.choices("ab", k=length)) for length in lengths for _ in range(20)]
    text = " ".join(words)
    python, compiled = (Tokenizer(vocab, merges, implementation=i) for i in ("python", "numba"))
    for _ in range(2):  # first anew, then from the cache
        assert compiled.encode(text) == python.encode(text)
    assert compiled.dtype.itemsize == (2 if last_id < 1 << 16 else 4)


def test_a_copy_of_a_tokenizer_that_was_used_encodes(trained):
    tokenizer = Tokenizer(*trained[1], [SEPARATOR], implementation="numba")
    expected = tokenizer.encode(trained[0])
    for made in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert made.encode(trained[0]) == expected


def test_arrays_live_as_long_as_a_thread_may_read_them(trained):
    """Two threads that begin at once may each make a table of characters; one is cached."""
    tokenizer = Tokenizer(*trained[1], [SEPARATOR], implementation="numba")
    expected = tokenizer.encode(trained[0])
    (work,) = tokenizer._compiled.idle
    kept = {array.ctypes.data for array in work.arrays}
    assert set(work.with_special[:10:2].tolist()) == kept
    class_table.cache_clear()
    gc.collect()
    assert tokenizer.encode(trained[0]) == expected


def test_threads_share_an_encoder(trained):
    text, parts = trained
    tokenizer = Tokenizer(*parts, [SEPARATOR], implementation="numba")
    expected = tokenizer.encode(text)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(tokenizer.encode(text))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8
    assert isinstance(tokenizer._compiled, CompiledEncoder)


@pytest.mark.slow
def test_a_change_in_one_file_recompiles_the_kernels_of_the_others(tmp_path):
    """Numba looks only at a kernel's own file; an edit to the scanner must reach the encoder."""
    copytree(LIB, tmp_path / "lib", ignore=ignore_patterns("__pycache__"))
    program = """
from lib.tokenizer.bpe import Tokenizer
vocab = {i: bytes([i]) for i in range(256)} | {256: b" b"}
tokenizer = Tokenizer(vocab, [(b" ", b"b")], implementation="numba")
print(tokenizer.encode("a b"))
"""

    def encoded() -> str:
        # the program imports `lib` from its working folder
        command = [sys.executable, "-c", program]
        environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
        options = {"capture_output": True, "text": True, "check": True}
        done = subprocess.run(command, cwd=tmp_path, env=environment, **options)
        return done.stdout.strip()

    assert encoded() == "[97, 256]"
    scan = tmp_path / "lib" / "tokenizer" / "compiled_scan.py"
    # a scanner that does not keep a space with its word
    changed = scan.read_text().replace("& ~(blank << ONE)", "")
    assert changed != scan.read_text()
    scan.write_text(changed)
    assert encoded() == "[97, 32, 98]"
