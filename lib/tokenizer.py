"""Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes, Radford et al. 2019).

Training starts from the 256 bytes and again and again joins the most frequent pair of neighbours
into a new token. Encoding replays those merges in the order in which they were learned.

This file is the readable implementation. `lib.tokenizer_fast` is the same compiled by Numba, with
identical results; it serves large texts where Numba is installed.
"""

import heapq
import importlib.util
import logging
import operator
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from lib import tokenizer_files
from lib.parallel import available_cpus, ordered_map
from lib.pretokenize import (
    CHUNK_BYTES,
    SEPARATOR,
    iter_chunks,
    safe_cut,
    special_token_pattern,
    split_at_spaces,
    split_pretokens,
    split_special,
)
from lib.tokenizer_files import Parts

__all__ = ["SEPARATOR", "Tokenizer", "count_pretokens", "train_bpe", "train_from_counts"]

Pair = tuple[int, int]
# An id, or the bytes of a token.
Token = TypeVar("Token", int, bytes)
IMPLEMENTATIONS = ("auto", "python", "numba")

# Below these sizes Numba's compilation, or even the loading of its cache, costs more than it saves.
FAST_TRAINING_BYTES = 8 << 20
FAST_ENCODING_BYTES = 1 << 20

# The address space that importing and compiling with Numba takes.
NUMBA_BYTES = 1 << 30

# The compiled path keeps an id in 24 bits.
MOST_IDS = 1 << 24

# Words that the readable path remembers; some 30 MB.
MAX_CACHED_WORDS = 1 << 17

# How much text `encode_iterable` gathers before it encodes: little, to keep memory small.
ITERABLE_BYTES = 1 << 13

log = logging.getLogger(__name__)


def count_pretokens(text: str, special_tokens: Sequence[str] = ()) -> Counter[bytes]:
    """How often each pre-token occurs in `text`; special tokens are left out."""
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
    """Learn merges from pre-token counts until there are `num_tokens` tokens (bytes included).

    Of equally frequent pairs the lexicographically greater pair of byte strings is merged. Stops
    early when no pair is left.

    Returns the vocabulary (token id -> bytes) and the merges in order.

    >>> train_from_counts({b"aaaa": 1, b"aaa": 1}, 259)[1]
    [(b'a', b'a'), (b'aa', b'aa'), (b'aa', b'a')]
    """
    vocab = {byte: bytes([byte]) for byte in range(256)}
    merges = []
    words = [list(pretoken) for pretoken in counts]
    word_counts = list(counts.values())
    pair_counts: Counter[Pair] = Counter()
    words_with_pair: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += word_counts[index]
            words_with_pair[pair].add(index)

    def priority(pair: Pair) -> tuple:
        left, right = pair
        return -pair_counts[pair], _reversed_order(vocab[left]), _reversed_order(vocab[right]), pair

    heap = [priority(pair) for pair in pair_counts]
    heapq.heapify(heap)
    while len(vocab) < num_tokens and heap:
        negative_count, *_, pair = heapq.heappop(heap)
        if pair_counts[pair] != -negative_count:
            # The count has changed since this entry was pushed; the newer entry counts.
            continue
        left, right = pair
        merged = vocab[left] + vocab[right]
        new_id = len(vocab)
        vocab[new_id] = merged
        merges.append((vocab[left], vocab[right]))
        changes: Counter[Pair] = Counter()
        # A word may have lost this pair since it was entered; then its changes cancel out.
        for index in words_with_pair.pop(pair):
            old, count = words[index], word_counts[index]
            words[index] = new = merge_pair(old, pair, new_id)
            for old_pair in pairwise(old):
                changes[old_pair] -= count
            for new_pair in pairwise(new):
                changes[new_pair] += count
                words_with_pair[new_pair].add(index)
        for changed, change in changes.items():
            pair_counts[changed] += change
            if change and pair_counts[changed]:
                heapq.heappush(heap, priority(changed))
    return vocab, merges


def merge_pair(ids: Sequence[Token], pair: tuple[Token, Token], new_id: Token) -> list[Token]:
    """Replace each `pair` of neighbours in `ids`, from left to right, by `new_id`.

    >>> merge_pair([1, 1, 1, 2], (1, 1), 256)
    [256, 1, 2]
    """
    left, right = pair
    merged, position, last = [], 0, len(ids) - 1
    while position <= last:
        if ids[position] == left and position < last and ids[position + 1] == right:
            merged.append(new_id)
            position += 2
        else:
            merged.append(ids[position])
            position += 1
    return merged


_COMPLEMENT = bytes(range(255, -1, -1))


def _reversed_order(token: bytes) -> str:
    """A key that sorts byte strings from the greatest to the least, longer before its prefix."""
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
        input_path: The text. Invalid bytes count as U+FFFD. It is read in chunks, never whole.
        vocab_size: Tokens in all: 256 bytes, merges, special tokens.
        special_tokens: Never merged across and never counted; their ids come last.
        implementation: "python", "numba" (identical results), or "auto": Numba for large files.
        workers: Processes (python) or threads (numba) that count; all cores by default.
        progress: Called with the number of bytes just counted.

    Returns:
        The vocabulary (id -> bytes) and the merges in the order in which they were learned. Ids are
        the bytes 0 to 255, then one for each merge, then the special tokens.

    Raises:
        ValueError: `vocab_size` has no room for the bytes and the special tokens, a special token
            is empty, `workers` is less than 1, or `implementation` is unknown.
    """
    if isinstance(special_tokens, str):
        raise ValueError(f"special_tokens is the text {special_tokens!r}; right: a list of texts")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; right: at least 1")
    special_tokens = list(dict.fromkeys(special_tokens or ()))
    special_token_pattern(special_tokens)
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: "
            f"256 bytes + {len(special_tokens)} special tokens = {smallest}"
        )
    path = Path(input_path)
    num_tokens = vocab_size - len(special_tokens)
    workers = workers or available_cpus()
    if choose_implementation(implementation, path.stat().st_size, FAST_TRAINING_BYTES) == "numba":
        from lib.tokenizer_fast import train_file

        vocab, merges = train_file(path, num_tokens, special_tokens, workers, progress)
    else:
        counts = _count_file(path, special_tokens, workers, progress)
        vocab, merges = train_from_counts(counts, num_tokens)
    if len(vocab) < num_tokens:
        log.warning(
            "vocab_size %d is more than the text can give: stopped at %d tokens, no pair is left",
            vocab_size,
            len(vocab) + len(special_tokens),
        )
    vocab.update(enumerate((token.encode() for token in special_tokens), start=len(vocab)))
    return vocab, merges


def _count_file(
    path: Path,
    special_tokens: Sequence[str],
    workers: int,
    progress: Callable[[int], None] | None,
) -> Counter[bytes]:
    counts = Counter()
    with open(path, "rb") as stream:
        chunks = iter_chunks(stream, CHUNK_BYTES, [token.encode() for token in special_tokens])
        jobs = ((chunk, special_tokens) for chunk in chunks)
        if workers == 1 or path.stat().st_size <= 2 * CHUNK_BYTES:
            results = map(_count_chunk, jobs)
            executor = nullcontext()
        else:
            # Not fork: the caller may have started CUDA or threads.
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


def check_implementation(implementation: str) -> None:
    """Raise ValueError for an unknown implementation, ImportError for one not installed."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is unknown; known are {', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "numba" and not numba_installed():
        raise ImportError("implementation 'numba' needs the package numba, which is not installed")


def numba_installed() -> bool:
    """Whether the compiled implementation can be had."""
    return importlib.util.find_spec("numba") is not None


def numba_fits() -> bool:
    """Whether a limit on this process's address space leaves Numba the room that it needs.

    An import that runs out of memory half-way can leave Python itself broken.
    """
    if "numba" in sys.modules or not Path("/proc/self/statm").exists():
        return True
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limit == resource.RLIM_INFINITY or limit - used > NUMBA_BYTES


def choose_implementation(implementation: str, num_bytes: int, fast_from: int) -> str:
    """Resolve "auto" for an input of `num_bytes`: "numba" from `fast_from` bytes on; log which."""
    check_implementation(implementation)
    if implementation != "auto":
        return implementation
    reason = None
    if num_bytes < fast_from:
        reason = "small input"
    elif not numba_installed():
        reason = "Numba is not installed"
    elif not numba_fits():
        reason = "the limit on address space leaves no room for Numba"
    if reason is None:
        log.info("tokenizer: compiled implementation (Numba) for %.1f MB", num_bytes / 1e6)
        return "numba"
    log.info("tokenizer: Python implementation for %.1f MB (%s)", num_bytes / 1e6, reason)
    return "python"


def rank_merges(
    merges: Sequence[tuple[bytes, bytes]], ids: Mapping[bytes, int]
) -> dict[Pair, tuple[int, int]]:
    """Pair of ids -> (rank, id of the merged token); the lower rank is merged first.

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


class Tokenizer:
    """Text to token ids and back.

    Args:
        vocab: Token id -> bytes. Holds every single byte.
        merges: Pairs of byte strings in the order in which they were learned.
        special_tokens: Encoded as one token each wherever they occur; the longest wins where
            several begin at the same place. Those that `vocab` lacks get the next free ids.
        implementation: "python", "numba" (identical results), or "auto": Numba for large texts.

    Raises:
        ValueError: `vocab` lacks a byte or the result of a merge or has an id of more than 24 bits,
            or a special token is empty.
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = None,
        *,
        implementation: str = "auto",
    ):
        check_implementation(implementation)
        self.implementation = implementation
        self.vocab = dict(vocab)
        self.merges = [(bytes(left), bytes(right)) for left, right in merges]
        # Where two ids have the same bytes, the lower one counts.
        ids = {token: token_id for token_id, token in sorted(vocab.items(), reverse=True)}
        if b"" in ids:
            raise ValueError(f"vocab has no bytes for the id {ids[b'']}")
        missing = [byte for byte in range(256) if bytes([byte]) not in ids]
        if missing:
            raise ValueError(f"vocab lacks the bytes {missing[:8]}: a byte-level one holds all 256")
        self._byte_ids = [ids[bytes([byte])] for byte in range(256)]
        self._ranks = rank_merges(self.merges, ids)
        if max(vocab) >= MOST_IDS:
            raise ValueError(
                f"vocab has the id {max(vocab)}; the largest allowed is {MOST_IDS - 1}"
            )
        self.special_tokens: dict[str, int] = {}
        ordinary = {*self._byte_ids, *(merged for _, merged in self._ranks.values())}
        special_ids = {token: i for i, token in sorted(vocab.items()) if i not in ordinary}
        for token in dict.fromkeys(special_tokens or ()):
            token_id = special_ids.get(token.encode(), max(self.vocab) + 1)
            self.vocab[token_id] = token.encode()
            self.special_tokens[token] = token_id
        self._special_pattern = special_token_pattern(list(self.special_tokens))
        self._special_bytes = [token.encode() for token in self.special_tokens]
        self._spaced_words: dict[str, list[int]] = {}

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
        """Vocabulary, merges and special tokens, as `lib.tokenizer_files` reads and writes them."""
        return Parts(self.vocab, self.merges, self.special_tokens)

    @cached_property
    def sha256(self) -> str:
        """A fingerprint: two tokenizers with the same one give the same ids."""
        return tokenizer_files.fingerprint(self.parts)

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokenizer to a JSON file. `lib.tokenizer_files` has the forms of others."""
        tokenizer_files.save(path, self.parts)

    @classmethod
    def load(cls, path: str | os.PathLike, *, implementation: str = "auto") -> "Tokenizer":
        """Read what `save` wrote. Raises ValueError if the file is damaged or was altered."""
        return cls.from_parts(tokenizer_files.load(path), implementation=implementation)

    @classmethod
    def from_parts(cls, parts: Parts, *, implementation: str = "auto") -> "Tokenizer":
        """Make a tokenizer from what a function of `lib.tokenizer_files` has read."""
        vocab, merges, special_tokens = parts
        tokenizer = cls(vocab, merges, list(special_tokens), implementation=implementation)
        if tokenizer.special_tokens != special_tokens:
            raise ValueError(f"special_tokens {special_tokens} do not have these ids in vocab")
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`.

        Raises:
            UnicodeEncodeError: `text` holds half of a surrogate pair, which UTF-8 cannot express.
        """
        if self._fast_pays(len(text)):
            return self._fast.encode(text.encode()).tolist()
        ids = []
        for ordinary, special in split_special(text, self._special_pattern):
            beginning, words = split_at_spaces(ordinary)
            ids += self._encode_piece(beginning)
            for word in words:
                ids += self._spaced_words.get(word) or self._encode_spaced_word(word)
            if special is not None:
                ids.append(self.special_tokens[special])
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        return [i for pretoken in split_pretokens(text) for i in self._merge(pretoken.encode())]

    def _encode_spaced_word(self, word: str) -> list[int]:
        """The ids of a space and `word`, which are remembered."""
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

    def encode_array(self, text: str | bytes) -> np.ndarray:
        """The token ids as an array of `dtype`. Bytes are UTF-8; invalid ones become U+FFFD."""
        if self._fast_pays(len(text)):
            data = text.encode() if isinstance(text, str) else text
            return self._fast.encode(data).astype(self.dtype)
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return np.array(self.encode(text), dtype=self.dtype)

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Yield the ids of the joined strings of `iterable`, such as a file's lines, one by one.

        Memory stays bounded: text is held back only as far as its tokens may still change.
        """
        pending, enough = bytearray(), ITERABLE_BYTES
        for text in iterable:
            pending += text.encode()
            if len(pending) >= enough:
                cut = safe_cut(pending, self._special_bytes)
                yield from self.encode(pending[:cut].decode())
                del pending[:cut]
                enough = max(ITERABLE_BYTES, 2 * len(pending))
        yield from self.encode(pending.decode())

    def encode_stream(
        self, stream: BinaryIO, *, chunk_bytes: int = CHUNK_BYTES, workers: int | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Encode a UTF-8 stream chunk by chunk, in order, with bounded memory.

        Yields (bytes read, ids of `dtype`) for each chunk. The result does not depend on
        `chunk_bytes` (about that many at a time) or `workers` (threads; all cores by default).
        """
        chunks = iter_chunks(stream, chunk_bytes, self._special_bytes)

        def encode(chunk: bytes) -> tuple[int, np.ndarray]:
            return len(chunk), self.encode_array(chunk)

        workers = workers or available_cpus()
        with ThreadPoolExecutor(workers) as executor:
            yield from ordered_map(executor, encode, chunks, workers + 1)

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of `ids` (a list, array or tensor); `errors` as in `bytes.decode`."""
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids` (a list, array or tensor).

        Raises:
            ValueError: an id is not in the vocabulary; the message names it.
        """
        ids = np.asarray(ids) if hasattr(ids, "__array__") else list(ids)
        is_other = isinstance(ids, np.ndarray) and (ids.ndim != 1 or ids.dtype.kind not in "iu")
        if is_other and ids.size:
            raise ValueError(f"ids are {ids.dtype} of shape {ids.shape}; right: integers, (n,)")
        if not len(ids):
            return b""
        try:
            if self._fast_pays(len(ids)):
                return self._fast.decode(ids)
            ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
            return b"".join(map(self.vocab.__getitem__, ids))
        except (KeyError, OverflowError):
            ids = [operator.index(token_id) for token_id in ids]
            unknown = next((token_id for token_id in ids if token_id not in self.vocab), None)
            if unknown is None:
                # They were integers of another kind, such as tensors of one element.
                return self.decode_bytes(ids)
            raise ValueError(
                f"token id {unknown} is not in the vocabulary (0 to {self.vocab_size - 1})"
            ) from None

    def _fast_pays(self, size: int) -> bool:
        if self.implementation != "auto":
            return self.implementation == "numba"
        if "_fast" in self.__dict__:
            return size >= 1 << 12
        return size >= FAST_ENCODING_BYTES and (
            choose_implementation("auto", size, FAST_ENCODING_BYTES) == "numba"
        )

    @cached_property
    def _fast(self):
        from lib.tokenizer_fast import FastEncoder

        return FastEncoder(self.vocab, self._byte_ids, self._ranks, self.special_tokens)
