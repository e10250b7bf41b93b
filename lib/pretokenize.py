"""What happens to a text before byte-pair encoding: special tokens, pre-tokens, safe places to cut.

Byte-pair encoding never merges across a pre-token's border, so everything that follows (counting,
merging, encoding) can treat the pre-tokens of a text one by one.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import AnyStr, BinaryIO

import regex

from lib.unicode_classes import LETTERS, NUMBERS, WHITESPACE, parse_ranges, to_ranges

SEPARATOR = "<|endoftext|>"

# How much of a file is worked on at a time.
CHUNK_BYTES = 4 << 20

# The pattern of GPT-2 (Radford et al. 2019, `encoder.py`), in the grouped form that tiktoken uses.
# In words: an English contraction; or letters, or digits, or other signs, each with at most one
# space before; or white space, which leaves its last character to the word that follows.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_SPACE_BEFORE_WORD = regex.compile(r" (?=\S)")
_SPACE_BEFORE_SPACE_OR_END = re.compile(r" (?:\s|\Z)")


def _code_points(table: str) -> Iterator[int]:
    for first, last in parse_ranges(table):
        yield from range(first, last + 1)


@lru_cache(maxsize=1)
def pretoken_pattern() -> regex.Pattern:
    """GPT-2's pattern, with letters and numbers pinned to Unicode 16.0.

    The `regex` module follows the newest Unicode. Characters that it calls letters or numbers and
    the table does not are taken out again, so that the cuts do not depend on its version.
    """
    everything = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))

    def pinned(ascii_range: str, category: str, table: str) -> str:
        pinned_codes = set(_code_points(table))
        younger = [
            c for c in map(ord, regex.findall(category, everything)) if c not in pinned_codes
        ]
        if not younger:
            return category
        escaped = "".join(f"\\U{lo:08x}-\\U{hi:08x}" for lo, hi in to_ranges(younger))
        # ASCII first: the members of a set are tried from left to right.
        return rf"[{ascii_range}[{category}--[{escaped}]]]"

    letter = pinned("a-zA-Z", r"\p{L}", LETTERS)
    number = pinned("0-9", r"\p{N}", NUMBERS)
    pattern = GPT2_PATTERN.replace(r"\p{L}", letter).replace(r"\p{N}", number)
    return regex.compile(pattern, regex.VERSION1)


def split_pretokens(text: str) -> list[str]:
    """The pre-tokens of `text`, which must hold no special token. Joined, they give it back.

    >>> split_pretokens("We'll  see 42!")
    ['We', "'ll", ' ', ' see', ' 42', '!']
    """
    return pretoken_pattern().findall(text)


def split_at_spaces(text: str) -> tuple[str, list[str]]:
    """Cut `text` before every space that a non-space follows.

    Returns what stands before the first cut, and the pieces after it, each without its space. A
    pre-token starts at each of those spaces, so every piece can be pre-tokenized on its own. A long
    text repeats its pieces, so that the slow pattern need only see each distinct one.

    >>> split_at_spaces("two  words")
    ('two ', ['words'])
    """
    if _SPACE_BEFORE_SPACE_OR_END.search(text):
        pieces = _SPACE_BEFORE_WORD.split(text)
    else:
        # Several times faster.
        pieces = text.split(" ")
    return pieces[0], pieces[1:]


def special_token_pattern(special_tokens: Sequence[AnyStr]) -> re.Pattern[AnyStr] | None:
    """A pattern for the leftmost special token, the longest where several start together."""
    if not special_tokens:
        return None
    if not all(special_tokens):
        raise ValueError(f"special_tokens {list(special_tokens)!r} holds an empty string")
    replacement = "\ufffd" if isinstance(special_tokens[0], str) else "\ufffd".encode()
    if any(replacement in token for token in special_tokens):
        raise ValueError(
            f"special_tokens {list(special_tokens)!r} holds U+FFFD, which stands for invalid bytes"
        )
    longest_first = sorted(special_tokens, key=len, reverse=True)
    bar = "|" if isinstance(longest_first[0], str) else b"|"
    return re.compile(bar.join(map(re.escape, longest_first)))


def split_special(
    text: AnyStr, pattern: re.Pattern[AnyStr] | None
) -> Iterator[tuple[AnyStr, AnyStr | None]]:
    """Yield `(ordinary text, the special token after it)` in order; the last has None after it."""
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        yield text[start : match.start()], match.group()
        start = match.end()
    yield text[start:], None


_SPACES = b"|".join(chr(code).encode() for code in _code_points(WHITESPACE))
# `(?r)` searches from the end backwards.
_CUT = regex.compile(rb"(?r)[ \t\n\r](?!" + _SPACES + rb")(?=.)", regex.DOTALL)


def _reach(special_tokens: Sequence[bytes]) -> int:
    """How many bytes after a cut decide whether it is safe: a character or a special token."""
    return max(map(len, special_tokens), default=0) + 4


def safe_cut(data: bytes, special_tokens: Sequence[bytes] = (), start: int = 0) -> int:
    """The last position after `start` where UTF-8 `data` can be cut without changing its tokens.

    A cut is safe before an ASCII white-space character that a non-space follows: a pre-token begins
    there whatever stands on either side. It stays clear of special tokens: none may reach across
    the cut, and none may be that following non-space, since white space before a special token is
    cut as at the end of a text. More bytes may follow `data` and complete a character or a special
    token, so the cut keeps that distance from its end.

    Returns 0 where there is no such position.
    """
    margin = _reach(special_tokens)
    for match in _CUT.finditer(data, max(start, 1)):
        cut = match.start()
        if cut + 1 + margin > len(data):
            continue
        near = (data[max(0, cut + 1 - len(t)) : cut + 1 + len(t)] for t in special_tokens)
        if not any(token in window for token, window in zip(special_tokens, near)):
            return cut
    return 0


def iter_chunks(
    stream: BinaryIO, chunk_bytes: int, special_tokens: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """Read `stream` in pieces of about `chunk_bytes` whose tokens, joined, are those of the whole.

    Memory stays at a few chunks, unless the text has no place to cut: then a chunk grows until
    there is one, since a single pre-token has to be held whole.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes {chunk_bytes} is not positive")
    pending, searched = bytearray(), 0
    while block := stream.read(chunk_bytes):
        pending += block
        cut = safe_cut(pending, special_tokens, searched)
        if cut:
            yield bytes(pending[:cut])
            del pending[:cut]
            searched = 0
        else:
            searched = max(0, len(pending) - 1 - _reach(special_tokens))
    if pending:
        yield bytes(pending)
