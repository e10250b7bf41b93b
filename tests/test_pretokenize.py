"""Cutting text: GPT-2's pattern with pinned classes, special tokens, safe places to cut."""

import io
import sys
from itertools import product

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from lib.pretokenize import (
    GPT2_PATTERN,
    iter_chunks,
    safe_cut,
    special_token_pattern,
    split_at_spaces,
    split_pretokens,
    split_special,
)
from lib.unicode_classes import LETTERS, NUMBERS, WHITESPACE, parse_ranges
from tests.texts import tricky_text

SPECIAL = ["<|a|>", "<|a|><|b|>", " <x>", "b", "c\n"]


@pytest.mark.parametrize(
    ("text", "pretokens"),
    [
        ("", []),
        ("We'll see 42 cats!", ["We", "'ll", " see", " 42", " cats", "!"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),
        ("foo  \n  bar", ["foo", "  \n ", " bar"]),
        ("a\r\n\r\nb", ["a", "\r\n\r", "\n", "b"]),
        ("tail   ", ["tail", "   "]),
        ("\tx", ["\t", "x"]),
        ("don't DON'T don’t", ["don", "'t", " DON", "'", "T", " don", "’", "t"]),
        # \x1c is white space to Python's str.isspace, but not to the pattern
        ("a\x1cb a\x85b", ["a", "\x1c", "b", " a", "\x85", "b"]),
        ("a\u00a0b \u3000c", ["a", "\u00a0", "b", " ", "\u3000", "c"]),
        ("१२ ٣", ["१२", " ٣"]),
        # a combining mark is neither letter nor number
        ("e\u0301", ["e", "\u0301"]),
        ("👩‍👩‍👧 ok", ["👩‍👩‍👧", " ok"]),
        ("日本語 text", ["日本語", " text"]),
    ],
)
def test_known_cuts(text, pretokens):
    assert split_pretokens(text) == pretokens


@given(tricky_text())
def test_pretokens_join_to_the_text(text):
    assert "".join(split_pretokens(text)) == text


def test_cuts_at_spaces_of_all_short_texts():
    for length in range(6):
        for characters in product("ab' \t\n", repeat=length):
            text = "".join(characters)
            first, words = split_at_spaces(text)
            pieces = [first, *(" " + word for word in words)]
            found = [part for piece in pieces for part in split_pretokens(piece)]
            assert found == split_pretokens(text), text


@given(tricky_text())
def test_cuts_at_spaces_are_where_a_pretoken_starts(text):
    first, words = split_at_spaces(text)
    pieces = [first, *(" " + word for word in words)]
    assert "".join(pieces) == text
    assert [part for piece in pieces for part in split_pretokens(piece)] == split_pretokens(text)


@pytest.mark.parametrize(
    ("category", "table"), [(r"\p{L}", LETTERS), (r"\p{N}", NUMBERS), (r"\s", WHITESPACE)]
)
def test_class_table_is_the_one_that_tiktoken_follows(category, table):
    everything = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    finder = tiktoken.Encoding(
        "finder", pat_str=category, mergeable_ranks=single_bytes, special_tokens={}
    )
    # tiktoken drops what the pattern does not match
    found = finder.decode(finder.encode_ordinary("".join(map(chr, everything))))
    pinned = [code for lo, hi in parse_ranges(table) for code in range(lo, hi + 1)]
    assert sorted(map(ord, found)) == pinned


def test_every_character_is_cut_as_tiktoken_cuts_it():
    """Also those that the `regex` module knows and Unicode 16.0 does not."""
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    for start in range(0, sys.maxunicode + 1, 1 << 12):
        codes = [c for c in range(start, start + (1 << 12)) if not 0xD800 <= c <= 0xDFFF]
        text = "".join(f"a{chr(code)}1{chr(code)} " for code in codes)
        pieces = [piece.encode() for piece in split_pretokens(text)]
        whole = {piece: 256 + i for i, piece in enumerate(dict.fromkeys(pieces)) if len(piece) > 1}
        encoding = tiktoken.Encoding(
            "cuts", pat_str=GPT2_PATTERN, mergeable_ranks=single_bytes | whole, special_tokens={}
        )
        assert encoding.decode_tokens_bytes(encoding.encode_ordinary(text)) == pieces


def test_the_longest_special_token_wins():
    pattern = special_token_pattern(SPECIAL)
    parts = list(split_special("x<|a|><|b|>y<|a|>", pattern))
    assert parts == [("x", "<|a|><|b|>"), ("y", "<|a|>"), ("", None)]


def test_no_special_tokens_leaves_the_text_whole():
    assert list(split_special("text", special_token_pattern([]))) == [("text", None)]


def test_a_special_token_must_not_look_like_invalid_bytes():
    with pytest.raises(ValueError, match=r"holds U\+FFFD"):
        special_token_pattern(["<|a|>", "x\ufffd"])


def test_empty_special_token_is_refused():
    with pytest.raises(ValueError, match=r"special_tokens .* holds an empty string"):
        special_token_pattern(["<|a|>", ""])


def pieces_of(data: bytes) -> list:
    """Pre-tokens and special tokens; invalid UTF-8 becomes U+FFFD."""
    pieces = []
    pattern = special_token_pattern(SPECIAL)
    for ordinary, special in split_special(data.decode("utf-8", "replace"), pattern):
        pieces += split_pretokens(ordinary)
        pieces.append(("special", special))
    return [piece for piece in pieces if piece != ("special", None)]


@given(tricky_text(), st.integers(1, 40))
def test_chunks_never_change_the_pieces(text, chunk_bytes):
    data = text.encode()
    special = [token.encode() for token in SPECIAL]
    chunks = list(iter_chunks(io.BytesIO(data), chunk_bytes, special))
    assert b"".join(chunks) == data
    assert [piece for chunk in chunks for piece in pieces_of(chunk)] == pieces_of(data)


@given(st.lists(st.sampled_from([b"\xff", b"\xc3", b"\xa9", b"\xe3\x80", b" ", b"a", b"\n"])))
def test_chunks_of_invalid_utf8_never_change_the_pieces(parts):
    data = b"".join(parts)
    chunks = list(iter_chunks(io.BytesIO(data), 3))
    assert [piece for chunk in chunks for piece in pieces_of(chunk)] == pieces_of(data)


def test_chunks_are_about_as_long_as_asked():
    data = b"some words and more of them " * 1000
    chunks = list(iter_chunks(io.BytesIO(data), 500))
    assert len(chunks) > 40
    assert max(map(len, chunks)) <= 600


def test_text_without_a_place_to_cut_comes_whole():
    data = "漢字".encode() * 1000
    assert list(iter_chunks(io.BytesIO(data), 100)) == [data]


def test_no_cut_within_the_white_space_before_a_special_token():
    # It is cut as at the end of a text: both spaces are one pre-token.
    data = b"word  <|a|>" + b"x" * 20
    assert safe_cut(data) == len("word ")
    assert safe_cut(data, [b"<|a|>"]) == 0


def test_no_cut_before_a_character_that_is_not_whole_yet():
    data = "word \u3000".encode()
    assert safe_cut(data[:-1]) == safe_cut(data) == 0


def test_chunk_bytes_must_be_positive():
    with pytest.raises(ValueError, match="chunk_bytes 0"):
        list(iter_chunks(io.BytesIO(b"x"), 0))
