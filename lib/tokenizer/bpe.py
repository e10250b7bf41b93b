"""Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes, Radford et al. 2019).

Training starts from the 256 bytes and repeatedly merges the most frequent pair of neighbors into a
new token. Encoding replays those merges in the order in which they were learned.

This file is the version to read: first training (`train_bpe`), then the `Tokenizer`.
`lib.tokenizer.compiled_encoder` is the same compiled by Numba, with identical results; it serves
large texts where Numba is installed.
"""

import heapq
import logging
import operator
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import compress, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from lib.core.hardware import available_cpus, ordered_map
from lib.core.settings import whole_number
from lib.tokenizer import files as tokenizer_files
from lib.tokenizer.files import Parts
from lib.tokenizer.implementation import (
    COMPILED_AGAIN_BYTES,
    COMPILED_CODE,
    COMPILED_ENCODING_BYTES,
    COMPILED_TRAINING_BYTES,
    check_implementation,
    choose_implementation,
)
from lib.tokenizer.pretokenize import (
    CHUNK_BYTES,
    check_text,
    distinct_special_tokens,
    iter_chunks,
    join_blocks,
    special_token_pattern,
    split_at_safe_cuts,
    split_at_spaces,
    split_pretokens,
    split_special,
    utf8_texts,
)

if TYPE_CHECKING:
    from lib.tokenizer.compiled_encoder import CompiledEncoder

Pair = tuple[int, int]
# in cells: between words, and between the first and the last cell of a token
BORDER, DEAD = -1, -2
# an id, or the bytes of a token
Token = TypeVar("Token", int, bytes)
# how much of a stream is encoded at a time: what fits the cache of a core
STREAM_BYTES = 1 << 20
# the readable encoder looks after so much text if the compiled one is ready
PART_BYTES = 1 << 16
# the compiled encoder keeps an id in 24 bits
MAX_IDS = 1 << 24
# a longer pre-token, in bytes, is merged a pair at a time, as in training
LONG_PRETOKEN = 32
# words that the readable encoder caches; some 30 MB
MAX_CACHED_WORDS = 1 << 17
# how much text `encode_iterable` gathers before it encodes: little, to keep memory small
ITERABLE_BYTES = 1 << 13
log = logging.getLogger(__name__)


# Training


def count_pretokens(text: str, special_tokens: Sequence[str] = ()) -> Counter[bytes]:
    """Count how often each pre-token occurs in `text`, leaving special tokens out."""
    # split at spaces first, so that the slow pattern sees each distinct word only once
    pattern = special_token_pattern(special_tokens)
    beginnings, spaced_words = Counter(), Counter()
    for ordinary, _ in split_special(text, pattern):
        beginning, words = split_at_spaces(ordinary)
        beginnings[beginning] += 1
        spaced_words.update(words)

    counts = Counter()
    for words, space in ((beginnings, ""), (spaced_words, " ")):
        for word, count in words.items():
            for pretoken in split_pretokens(space + word):
                counts[pretoken.encode()] += count
    return counts


def train_from_counts(
    counts: Mapping[bytes, int], num_tokens: int
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Learn merges from pre-token counts until there are `num_tokens` tokens, bytes included.

    Among equally frequent pairs, merges the lexicographically greatest pair of byte strings. Stops
    early if no pair is left.

    Returns the vocabulary (token id -> bytes) and the merges in order.

    >>> train_from_counts({b"aaaa": 1, b"aaa": 1}, 259)[1]
    [(b'a', b'a'), (b'aa', b'aa'), (b'aa', b'a')]
    """
    num_tokens = whole_number("num_tokens", num_tokens, least=256)
    vocab = {byte: bytes([byte]) for byte in range(256)}
    merges = []

    # lay all words out in a row, a cell for each byte, with BORDER around each word
    cells, weights = [BORDER], [0]
    for word, count in counts.items():
        cells += [*word, BORDER]
        weights += [count] * (len(word) + 1)

    # count the pairs, and remember the first cell of each, in order
    pair_counts: Counter[Pair] = Counter()
    sites: defaultdict[Pair, list[int]] = defaultdict(list)
    for cell, pair in enumerate(pairwise(cells)):
        if BORDER not in pair:
            pair_counts[pair] += weights[cell]
            sites[pair].append(cell)

    def priority(pair: Pair) -> tuple:
        left, right = pair
        return -pair_counts[pair], _reversed_order(vocab[left]), _reversed_order(vocab[right]), pair

    heap = [priority(pair) for pair in pair_counts]
    heapq.heapify(heap)
    while len(vocab) < num_tokens and heap:
        # the most frequent pair; skip an entry whose count has changed since, a newer one is there
        negative_count, *_, pair = heapq.heappop(heap)
        if pair_counts[pair] != -negative_count:
            continue
        left, right = pair
        new = len(vocab)
        vocab[new] = vocab[left] + vocab[right]
        merges.append((vocab[left], vocab[right]))

        # merge it everywhere, and push the new counts
        merged = _merge_everywhere(pair, new, vocab, cells, sites)
        for changed, change in _count_changes(pair, new, merged, weights).items():
            pair_counts[changed] += change
            if change and pair_counts[changed]:
                heapq.heappush(heap, priority(changed))
    return vocab, merges


def _merge_everywhere(
    pair: Pair,
    new: int,
    vocab: Mapping[int, bytes],
    cells: list[int],
    sites: defaultdict[Pair, list[int]],
) -> Iterator[tuple[int, int, int]]:
    """Merge `pair` into the token `new`; yield each first cell, and the tokens on both sides.

    `cells` has the id of a token in the first and the last of its bytes' cells, so the neighbors of
    any token are one step away. The word `lower`, before and after `er` has become token 300 and
    `low` token 310:

        BORDER   l    o    w    e    r   BORDER
        BORDER  310 DEAD  310  300  300  BORDER

    `sites` has the first cell of each pair, from left to right; some are out of date.
    """
    left, right = pair
    left_length, length = len(vocab[left]), len(vocab[new])
    for first in sites.pop(pair):
        second, end = first + left_length, first + length
        if cells[first] != left or cells[second] != right:
            # a merge beside it has taken one of the two
            continue
        cells[second - 1] = cells[second] = DEAD
        cells[first] = cells[end - 1] = new

        # note the new pairs with its neighbors
        before, after = cells[first - 1], cells[end]
        if before != BORDER:
            sites[before, new].append(first - len(vocab[before]))
        if after != BORDER:
            sites[new, after].append(first)
        yield first, before, after


def _count_changes(
    pair: Pair, new: int, merged: Iterable[tuple[int, int, int]], weights: Sequence[int]
) -> Counter[Pair]:
    """Return how the count of each pair changes where `_merge_everywhere` merges `pair`."""
    left, right = pair
    changes: Counter[Pair] = Counter()
    for first, before, after in merged:
        # two pairs with the neighbors are gone, and two are new
        count = weights[first]
        changes[pair] -= count
        if before != BORDER:
            changes[before, left] -= count
            changes[before, new] += count
        if after != BORDER:
            changes[right, after] -= count
            changes[new, after] += count
    return changes


def merge_pair(ids: Sequence[Token], pair: tuple[Token, Token], new_id: Token) -> list[Token]:
    """Replace each `pair` of neighbors in `ids`, from left to right, by `new_id`.

    >>> merge_pair([1, 1, 1, 2], (1, 1), 256)
    [256, 1, 2]
    """
    left, right = pair
    merged, index, last = [], 0, len(ids) - 1
    while index <= last:
        if ids[index] == left and index < last and ids[index + 1] == right:
            merged.append(new_id)
            index += 2
        else:
            merged.append(ids[index])
            index += 1
    return merged


_COMPLEMENT = bytes(range(255, -1, -1))


def _reversed_order(token: bytes) -> str:
    """Return a key that sorts byte strings from greatest to least, longer before their prefixes."""
    return token.translate(_COMPLEMENT).decode("latin-1") + "\u0100"


def train_bpe(
    input_path: str | os.PathLike,
    vocab_size: int,
    special_tokens: Sequence[str] | None = (),
    *,
    implementation: str = "auto",
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Train a byte-level BPE vocabulary on a UTF-8 text file.

    Args:
        input_path: the text; read in chunks, never whole. Invalid bytes count as U+FFFD.
        vocab_size: number of tokens: 256 bytes, merges, special tokens.
        special_tokens: never merged across and never counted; their ids come last.
        implementation: "python", "numba" (identical results), or "auto": Numba for large files.
        workers: processes (python) or threads (numba) that count; one per core by default.
        progress: called with the number of bytes just counted.

    Returns:
        The vocabulary (id -> bytes) and the merges in the order in which they were learned. Ids are
        the bytes 0 to 255, then one for each merge, then the special tokens.

    Raises:
        ValueError: `vocab_size` is too small for the bytes and the special tokens, a special token
            is empty, `workers` is less than 1, an argument is no whole number that must be one, or
            `implementation` is unknown.
    """
    # check the arguments
    special_tokens = distinct_special_tokens(special_tokens)
    special_token_pattern(special_tokens)
    workers = _num_workers(workers)
    smallest = 256 + len(special_tokens)
    vocab_size = whole_number("vocab_size", vocab_size, least=256)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size must be at least 256 bytes + {len(special_tokens)} special tokens = "
            f"{smallest}, got {vocab_size}"
        )

    num_tokens = vocab_size - len(special_tokens)
    options = implementation, workers, progress
    vocab, merges = _count_and_merge(Path(input_path), num_tokens, special_tokens, *options)
    if len(vocab) < num_tokens:
        log.warning(
            "vocab_size %d is more than the text can give: stopped at %d tokens, no pair is left",
            vocab_size,
            len(vocab) + len(special_tokens),
        )
    # special tokens get the last ids
    vocab.update(enumerate((token.encode() for token in special_tokens), start=len(vocab)))
    return vocab, merges


def _count_and_merge(
    path: Path,
    num_tokens: int,
    special_tokens: Sequence[str],
    implementation: str,
    workers: int,
    progress: Callable[[int], None] | None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Train on the file at `path`: the vocabulary without special tokens, and the merges."""
    num_bytes, special_bytes = path.stat().st_size, [token.encode() for token in special_tokens]
    with open(path, "rb") as stream:
        chunks = iter_chunks(stream, CHUNK_BYTES, special_bytes)
        if choose_implementation(implementation, num_bytes, COMPILED_TRAINING_BYTES) == "numba":
            from lib.tokenizer.compiled_encoder import train_compiled

            return train_compiled(chunks, num_tokens, special_tokens, workers, progress)
        few = num_bytes <= 2 * CHUNK_BYTES
        counts = _count_chunks(chunks, special_tokens, 1 if few else workers, progress)
    return train_from_counts(counts, num_tokens)


def _num_workers(workers: int | None) -> int:
    return available_cpus() if workers is None else whole_number("workers", workers, least=1)


def _count_chunks(
    chunks: Iterable[bytes],
    special_tokens: Sequence[str],
    workers: int,
    progress: Callable[[int], None] | None,
) -> Counter[bytes]:
    """Count the pre-tokens of all chunks, in as many processes as `workers`."""
    counts = Counter()
    jobs = ((chunk, special_tokens) for chunk in chunks)
    if workers == 1:
        results = map(_count_chunk, jobs)
        executor = nullcontext()
    else:
        # spawn, not fork: the caller may have started CUDA or threads
        executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        results = ordered_map(executor, _count_chunk, jobs, workers + 1)
    with executor:
        for num_bytes, chunk_counts in results:
            counts.update(chunk_counts)
            if progress:
                progress(num_bytes)
    return counts


def _count_chunk(job: tuple[bytes, Sequence[str]]) -> tuple[int, Counter[bytes]]:
    chunk, special_tokens = job
    return len(chunk), count_pretokens(chunk.decode("utf-8", "replace"), special_tokens)


# Encoding and decoding


class Tokenizer:
    """Converts text to token ids and back.

    Args:
        vocab: token id -> bytes; holds every single byte.
        merges: pairs of byte strings in the order in which they were learned.
        special_tokens: encoded as one token each wherever they occur; if several begin at the same
            index, the longest wins. Those that `vocab` lacks get the next free ids.
        implementation: "python", "numba" (identical results), or "auto": Numba once this tokenizer
            has encoded a megabyte. Its code loads in a thread; the readable code works meanwhile.
        end_tokens: the special tokens that end a text; by default `<|endoftext|>`, if it is one.

    Raises:
        ValueError: `vocab` lacks a byte or the result of a merge or has an id that is negative or
            of more than 24 bits, a special token is empty, or `special_tokens` is one text.
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = None,
        *,
        implementation: str = "auto",
        end_tokens: Sequence[str] | None = None,
    ):
        check_implementation(implementation)
        self.implementation = implementation
        self.vocab = dict(vocab)
        self.merges = [(bytes(left), bytes(right)) for left, right in merges]

        for token_id, token in self.vocab.items():
            if type(token_id) is not int and not isinstance(token_id, np.integer):
                raise ValueError(f"vocab must have whole numbers as ids, got {token_id!r}")
            if not isinstance(token, (bytes, bytearray)):
                raise ValueError(f"vocab must map ids to bytes, got {token!r} for {token_id}")
        # bytes -> id; of two ids with the same bytes, the lower one counts
        ids = {token: token_id for token_id, token in sorted(vocab.items(), reverse=True)}
        missing = [byte for byte in range(256) if bytes([byte]) not in ids]
        if missing:
            raise ValueError(f"vocab must hold all 256 bytes, but lacks {missing[:8]}")
        if b"" in ids:
            raise ValueError(f"vocab must have bytes for every id, got none for {ids[b'']}")
        for token_id in (min(vocab), max(vocab)):
            if not 0 <= token_id < MAX_IDS:
                raise ValueError(f"vocab must have ids from 0 to {MAX_IDS - 1}, got {token_id}")
        self._byte_ids = [ids[bytes([byte])] for byte in range(256)]
        self._ranks = rank_merges(self.merges, ids)

        # a special token may read like an ordinary one: only ids that no merge makes are its own
        self.special_tokens: dict[str, int] = {}
        ordinary = {*self._byte_ids, *(merged for _, merged in self._ranks.values())}
        special_ids = {token: i for i, token in sorted(vocab.items()) if i not in ordinary}
        for token in distinct_special_tokens(special_tokens):
            token_id = special_ids.get(token.encode(), max(self.vocab) + 1)
            self.vocab[token_id] = token.encode()
            self.special_tokens[token] = token_id
        default = tokenizer_files.default_end_tokens(self.special_tokens)
        self.end_tokens = default if end_tokens is None else tuple(end_tokens)
        for token in self.end_tokens:
            if token not in self.special_tokens:
                raise ValueError(f"end_tokens must be special tokens, got {token!r}")
        self._special_pattern = special_token_pattern(list(self.special_tokens))
        self._special_bytes = [token.encode() for token in self.special_tokens]
        # bytes and ids that this tokenizer was given while it had no compiled code
        self._given = 0
        self._compiled: CompiledEncoder | None = None
        # word -> the ids of a space and the word
        self._spaced_words: dict[str, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # the compiled code works on addresses of this process; a copy makes its own
        return self.__dict__ | {"_compiled": None}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: the rows that an embedding needs."""
        return max(self.vocab) + 1

    @cached_property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type of at least 16 bits that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @cached_property
    def parts(self) -> Parts:
        """Vocabulary, merges and special tokens, as `lib.tokenizer.files` reads and writes them."""
        default = tokenizer_files.default_end_tokens(self.special_tokens)
        end_tokens = None if self.end_tokens == default else self.end_tokens
        return Parts(self.vocab, self.merges, self.special_tokens, end_tokens)

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a text; the first one also stands before an empty prompt."""
        return [self.special_tokens[token] for token in self.end_tokens]

    @cached_property
    def sha256(self) -> str:
        """A fingerprint: two tokenizers with the same one give the same ids."""
        return tokenizer_files.fingerprint(self.parts)

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokenizer to a JSON file. `lib.tokenizer.files` has other formats."""
        tokenizer_files.save(path, self.parts)

    @classmethod
    def load(cls, path: str | os.PathLike, *, implementation: str = "auto") -> "Tokenizer":
        """Read a file that `save` wrote, or the one in a folder that `tokenize` or `train` made.

        Raises `ValueError` if it is damaged or was altered.
        """
        return cls.from_parts(tokenizer_files.load(path), implementation=implementation)

    @classmethod
    def from_parts(cls, parts: Parts, *, implementation: str = "auto") -> "Tokenizer":
        """Make a tokenizer from parts that `lib.tokenizer.files` has read."""
        vocab, merges, special_tokens, end_tokens = parts
        options: dict[str, Any] = {"implementation": implementation, "end_tokens": end_tokens}
        tokenizer = cls(vocab, merges, list(special_tokens), **options)
        if tokenizer.special_tokens != special_tokens:
            raise ValueError(f"special_tokens must have their ids in vocab, got {special_tokens}")
        return tokenizer

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Convert `text` to token ids.

        Without `allow_special`, special tokens are encoded as ordinary text, as befits text from
        strangers.

        Raises:
            TypeError: `text` is no str.
            ValueError: it holds half of a surrogate pair, which UTF-8 cannot express.
        """
        if not isinstance(text, str):
            check_text(text, "text")
        try:
            if compiled := self._compiled or self._compiled_for(len(text)):
                return compiled.encode_list(text, allow_special)
            if self.implementation == "python" or len(text) <= PART_BYTES:
                return self._encode_readably(text, allow_special)
            ids, special_bytes = [], self._special_bytes if allow_special else ()
            for part in split_at_safe_cuts(text.encode(), PART_BYTES, special_bytes):
                if compiled := self._compiled_for(0):
                    ids += compiled.encode_list(part, allow_special)
                else:
                    ids += self._encode_readably(part.decode(), allow_special)
            return ids
        except UnicodeEncodeError:
            check_text(text, "text")
            raise

    def _encode_readably(self, text: str, allow_special: bool) -> list[int]:
        ids = []
        pattern = self._special_pattern if allow_special else None
        for ordinary, special in split_special(text, pattern):
            beginning, words = split_at_spaces(ordinary)
            ids += self._encode_piece(beginning)
            for word in words:
                ids += self._spaced_words.get(word) or self._encode_spaced_word(word)
            if special is not None:
                ids.append(self.special_tokens[special])
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        ids = []
        for pretoken in map(str.encode, split_pretokens(text)):
            is_long = len(pretoken) > LONG_PRETOKEN
            ids += self._merge_long(pretoken) if is_long else self._merge(pretoken)
        return ids

    def _encode_spaced_word(self, word: str) -> list[int]:
        """Encode a space and `word`, and cache the ids."""
        if len(self._spaced_words) >= MAX_CACHED_WORDS:
            self._spaced_words.clear()
        ids = self._spaced_words[word] = self._encode_piece(" " + word)
        return ids

    def _merge(self, pretoken: bytes) -> list[int]:
        """Apply the merges to one pre-token, the earliest learned first."""
        ids = [self._byte_ids[byte] for byte in pretoken]
        while known := [pair for pair in pairwise(ids) if pair in self._ranks]:
            pair = min(known, key=self._ranks.__getitem__)
            ids = merge_pair(ids, pair, self._ranks[pair][1])
        return ids

    def _merge_long(self, pretoken: bytes) -> list[int]:
        """Do the same as training does: a pair at all its sites at a time, in O(n log n)."""
        cells = [BORDER, *map(self._byte_ids.__getitem__, pretoken), BORDER]
        begins_token = bytearray(b"\1" * len(cells))
        sites: defaultdict[Pair, list[int]] = defaultdict(list)
        is_known = map(self._ranks.__contains__, pairwise(cells))
        for cell in compress(range(len(cells)), is_known):
            sites[cells[cell], cells[cell + 1]].append(cell)

        # the earliest learned first; a merge makes only pairs that were learned after it
        heap = [(self._ranks[pair], pair) for pair in sites]
        heapq.heapify(heap)
        while heap:
            (_, new), pair = heapq.heappop(heap)
            left_length, made = len(self.vocab[pair[0]]), set()
            for first, before, after in _merge_everywhere(pair, new, self.vocab, cells, sites):
                begins_token[first + left_length] = False
                made.update(((before, new), (new, after)))
            for pair in made:
                if pair in self._ranks:
                    heapq.heappush(heap, (self._ranks[pair], pair))
        return list(compress(cells, begins_token))[1:-1]

    def encode_array(self, text: str | bytes, *, allow_special: bool = True) -> np.ndarray:
        """Convert text to ids of `dtype`, (num_tokens,). Bytes are UTF-8; invalid ones U+FFFD.

        Raises what `encode` does.
        """
        try:
            if compiled := self._compiled or self._compiled_for(len(text)):
                return compiled.encode(text, allow_special)
            text = text if isinstance(text, str) else text.decode("utf-8", "replace")
            return np.array(self.encode(text, allow_special=allow_special), dtype=self.dtype)
        except (AttributeError, TypeError, UnicodeEncodeError):
            check_text(text, "text")
            raise

    def encode_batch(
        self, texts: Iterable[str], *, allow_special: bool = True, workers: int | None = None
    ) -> list[np.ndarray]:
        """Convert each text to an array of ids, as `encode_array` does, faster for many short ones.

        `workers` is the number of threads; one per core by default. Raises what `encode` does, with
        the index of the text.
        """
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
            raise ValueError(f"texts must be several texts, such as a list, got {texts!r:.20}")
        texts, workers = list(texts), _num_workers(workers)
        try:
            return self._encode_batch(texts, allow_special, workers)
        except (TypeError, ValueError):
            # only now: looking at a short text takes as long as encoding it
            for index, text in enumerate(texts):
                check_text(text, f"texts[{index}]")
            raise

    def _encode_batch(
        self, texts: list[str], allow_special: bool, workers: int
    ) -> list[np.ndarray]:
        # refuses what is no str, also bytes
        size = sum(map(str.__len__, texts))
        compiled = self._compiled_for(size)
        if compiled is None:
            return [self.encode_array(text, allow_special=allow_special) for text in texts]
        encode = partial(compiled.encode_batch, allow_special=allow_special)
        batches = compiled.batches(texts)
        if workers == 1 or size <= STREAM_BYTES:
            return [ids for batch in batches for ids in encode(batch)]
        with ThreadPoolExecutor(workers) as executor:
            results = ordered_map(executor, encode, batches, workers + 1)
            return [ids for arrays in results for ids in arrays]

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Yield the ids of the joined strings of `iterable`, such as a file's lines, one by one.

        Memory stays bounded: text is held back only while its tokens may still change. Raises what
        `encode` does, with the index of the string.
        """
        texts = utf8_texts(iterable, "iterable")
        for chunk in join_blocks(texts, ITERABLE_BYTES, self._special_bytes):
            yield from self.encode(chunk.decode())

    def encode_stream(
        self, stream: BinaryIO, *, chunk_bytes: int = STREAM_BYTES, workers: int | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Encode a UTF-8 stream chunk by chunk, in order, with bounded memory.

        Yields (bytes read, ids of `dtype`) for each chunk. The result depends neither on
        `chunk_bytes` (about that many at a time) nor on `workers` (threads; one per core by
        default).
        """
        chunks = iter_chunks(stream, chunk_bytes, self._special_bytes)

        def encode(chunk: bytes) -> tuple[int, np.ndarray]:
            return len(chunk), self.encode_array(chunk)

        workers = _num_workers(workers)
        with ThreadPoolExecutor(workers) as executor:
            yield from ordered_map(executor, encode, chunks, workers + 1)

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """Convert ids (a list, array or tensor) to text; `errors` as in `bytes.decode`."""
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Convert ids (a list, array or tensor) to bytes.

        Raises:
            ValueError: an id is no whole number or not in the vocabulary; the message names it.
        """
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            raise ValueError(f"ids must be a list, array or tensor of token ids, got {ids!r:.20}")
        ids = np.asarray(ids) if hasattr(ids, "__array__") else list(ids)
        if (
            isinstance(ids, np.ndarray)
            and ids.size
            and (ids.ndim != 1 or ids.dtype.kind not in "iu")
        ):
            raise ValueError(f"ids must be integers, (n,), got {ids.dtype} of shape {ids.shape}")
        if not len(ids):
            return b""
        given = ids
        try:
            if compiled := self._compiled_for(len(ids)):
                return compiled.decode(ids)
            # index() takes no fractions, which a dictionary would find: 1.0 equals 1
            ids = ids.tolist() if isinstance(ids, np.ndarray) else map(operator.index, ids)
            return b"".join(map(self.vocab.__getitem__, ids))
        except (KeyError, OverflowError, TypeError):
            ids = [whole_number("a token id", token_id, least=0) for token_id in given]
            unknown = next((token_id for token_id in ids if token_id not in self.vocab), None)
            if unknown is None:
                # they were integers of another type, such as tensors of one element
                return self.decode_bytes(ids)
            raise ValueError(
                f"token id {unknown} is not in the vocabulary (0 to {self.vocab_size - 1})"
            ) from None

    def _compiled_for(self, size: int) -> "CompiledEncoder | None":
        """Return the compiled code if it is to serve `size` more bytes or ids.

        If not, it may begin to load.
        """
        if self._compiled is None and self._is_worth_compiling(size):
            from lib.tokenizer.compiled_encoder import CompiledEncoder

            self._compiled = CompiledEncoder(
                self.vocab, self._byte_ids, self._ranks, self.special_tokens, self.dtype
            )
        return self._compiled

    def _is_worth_compiling(self, size: int) -> bool:
        if self.implementation != "auto":
            return self.implementation == "numba"
        self._given += size
        if self._given >= COMPILED_ENCODING_BYTES:
            COMPILED_CODE.load(_use_compiled_once)
        return self._given >= COMPILED_AGAIN_BYTES and COMPILED_CODE.is_ready()


def _use_compiled_once() -> None:
    """Encode and decode a letter, in each way that the compiled code offers."""
    every_byte = {byte: bytes([byte]) for byte in range(256)}
    tokenizer = Tokenizer(every_byte, [], implementation="numba")
    tokenizer.decode(tokenizer.encode("a"))
    tokenizer.decode(tokenizer.encode_array("a"))


def rank_merges(
    merges: Sequence[tuple[bytes, bytes]], ids: Mapping[bytes, int]
) -> dict[Pair, tuple[int, int]]:
    """Map each pair of ids to (rank, id of the merged token); lower ranks are merged first.

    Raises:
        ValueError: a merge joins or makes a token that is not in `ids`, or one out of order.
            Training makes a token before it is joined to others, and no token twice.
    """
    ranks, made = {}, {bytes([byte]) for byte in range(256)}
    for rank, (left, right) in enumerate(merges):
        merged = left + right
        if merged not in ids:
            raise ValueError(f"merge {rank} makes {merged!r}, which is not in the vocabulary")
        for part in (left, right):
            if part not in made:
                raise ValueError(f"merge {rank} joins {part!r}, which no earlier merge has made")
        if merged in made:
            raise ValueError(f"merge {rank} makes {merged!r}, which an earlier merge has made")
        made.add(merged)
        ranks[ids[left], ids[right]] = (rank, ids[merged])
    return ranks
