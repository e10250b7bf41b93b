"""Splitting text: GPT-2's pattern with pinned classes, special tokens, safe cuts."""

import io
from itertools import product

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from lib.tokenizer.pretokenize import (
    LETTERS,
    NUMBERS,
    WHITESPACE,
    iter_chunks,
    safe_cut,
    special_token_pattern,
    split_at_safe_cuts,
    split_at_spaces,
    split_pretokens,
    split_special,
)
from tests.texts import EVERY_CODE, codes_of, every_character, tricky_text

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
        ("don't DON'T don’t", ["don", "'t", " DON", "'", "T", " don", "’", "t"]),
        # \x1c is white space to Python's str.isspace, but not to the pattern
        ("a\x1cb a\x85b", ["a", "\x1c", "b", " a", "\x85", "b"]),
        ("a\u00a0b \u3000c", ["a", "\u00a0", "b", " ", "\u3000", "c"]),
        ("१२ ٣", ["१२", " ٣"]),
        # a combining mark is neither letter nor number
        ("e\u0301", ["e", "\u0301"]),
        ("日本語 text", ["日本語", " text"]),
    ],
)
def test_known_splits(text, pretokens):
    assert split_pretokens(text) == pretokens


def check_pieces_at_spaces(text: str) -> None:
    first, words = split_at_spaces(text)
    pieces = [first, *(" " + word for word in words)]
    pretokens = [part for piece in pieces for part in split_pretokens(piece)]
    assert pretokens == split_pretokens(text), text
    assert "".join(pretokens) == text


def test_pieces_at_spaces_of_all_short_texts_have_the_same_pretokens():
    for length in range(6):
        for characters in product("ab' \t\n", repeat=length):
            check_pieces_at_spaces("".join(characters))


@given(tricky_text())
def test_pieces_at_spaces_have_the_same_pretokens_and_join_to_the_text(text):
    check_pieces_at_spaces(text)


@pytest.mark.parametrize(
    ("category", "table"), [(r"\p{L}", LETTERS), (r"\p{N}", NUMBERS), (r"\s", WHITESPACE)]
)
def test_the_pinned_classes_are_those_of_tiktoken(category, table):
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    finder = tiktoken.Encoding(
        "finder", pat_str=category, mergeable_ranks=single_bytes, special_tokens={}
    )
    # tiktoken drops text that the pattern does not match
    found = finder.decode(finder.encode_ordinary("".join(map(chr, EVERY_CODE))))
    assert list(map(ord, found)) == sorted(codes_of(table))


def test_every_character_is_split_by_its_pinned_class():
    """Also those that the `regex` module knows and Unicode 16.0 does not."""
    text, pretokens = every_character()
    assert split_pretokens(text) == pretokens


def test_the_longest_special_token_wins():
    pattern = special_token_pattern(SPECIAL)
    parts = list(split_special("x<|a|><|b|>y<|a|>", pattern))
    assert parts == [("x", "<|a|><|b|>"), ("y", "<|a|>"), ("", None)]
    assert list(split_special("text", special_token_pattern([]))) == [("text", None)]


@pytest.mark.parametrize(("wrong", "message"), [("", "an empty text"), ("x\ufffd", r"U\+FFFD")])
def test_impossible_special_tokens_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=f"special_tokens must not hold {message}"):
        special_token_pattern(["<|a|>", wrong])


def pieces_of(data: bytes) -> list:
    """Pre-tokens and special tokens; invalid UTF-8 becomes U+FFFD."""
    pieces = []
    pattern = special_token_pattern(SPECIAL)
    for ordinary, special in split_special(data.decode("utf-8", "replace"), pattern):
        pieces += split_pretokens(ordinary)
        pieces.append(("special", special))
    return [piece for piece in pieces if piece != ("special", None)]


broken = st.lists(st.sampled_from([b"\xff", b"\xc3", b"\xa9", b"\xe3\x80", b" ", b"a", b"\n"]))


@given(st.one_of(tricky_text().map(str.encode), broken.map(b"".join)), st.integers(1, 40))
def test_chunks_never_change_the_pieces(data, chunk_bytes):
    special = [token.encode() for token in SPECIAL]
    for chunks in (
        list(iter_chunks(io.BytesIO(data), chunk_bytes, special)),
        list(split_at_safe_cuts(data, chunk_bytes, special)),
    ):
        assert b"".join(chunks) == data
        assert [piece for chunk in chunks for piece in pieces_of(chunk)] == pieces_of(data)


def test_chunks_of_all_short_texts_have_the_same_pieces():
    for characters in product("a \n\u3000", repeat=5):
        data = ("".join(characters) + "word").encode()
        # the first safe cuts, and the last one
        for chunk_bytes in (1, len(data) - 1):
            chunks = split_at_safe_cuts(data, chunk_bytes)
            assert [piece for chunk in chunks for piece in pieces_of(chunk)] == pieces_of(data)


def test_a_cut_too_near_the_end_of_a_block_is_found_with_the_next():
    for cut in range(480, 520):
        data = b"a" * cut + b" " + b"a" * 2000
        for chunks in (iter_chunks(io.BytesIO(data), 500), split_at_safe_cuts(data, 500)):
            assert list(map(len, chunks)) == [cut, 2001]


def test_chunks_are_about_as_long_as_asked_for():
    data = b"some words and more of them " * 1000
    chunks = list(iter_chunks(io.BytesIO(data), 500))
    assert len(chunks) > 40
    assert max(map(len, chunks)) <= 600
    # a long word is in a chunk of its own, also where a block is shorter than what decides on a cut
    for chunk_bytes in (1, 3, 500):
        chunks = list(iter_chunks(io.BytesIO(b"x" * 1000 + data), chunk_bytes, [b"<|a|>"]))
        assert max(map(len, chunks[1:])) <= len(chunks[0]) / 2 <= 1000
    with pytest.raises(ValueError, match="chunk_bytes must be a whole number, at least 1"):
        list(iter_chunks(io.BytesIO(b"x"), 0))


def test_no_cut_within_the_white_space_before_a_special_token():
    # it is split as at the end of a text: both spaces are one pre-token
    data = b"word  <|a|>" + b"x" * 20
    assert safe_cut(data) == len("word ")
    assert safe_cut(data, [b"<|a|>"]) == 0


def test_no_cut_within_a_special_token_that_holds_spaces():
    token = b"<| two words |>"
    data = (b"word " + token) * 3
    for chunk_bytes in range(1, 40):
        chunks = list(iter_chunks(io.BytesIO(data), chunk_bytes, [b"b", token]))
        assert b"".join(chunks) == data
        assert sum(chunk.count(token) for chunk in chunks) == 3


def test_no_cut_within_a_special_token_wherever_the_search_begins():
    token = b"<| " + b"two words " * 150 + b"|>"
    for before in range(1000, 3200, 29):
        data = b"a " + b"x" * before + token + b"y" * (5000 - before)
        assert sum(c.count(token) for c in split_at_safe_cuts(data, 4000, [token])) == 1


def test_no_cut_before_a_character_that_is_not_complete_yet():
    data = "word \u3000".encode()
    assert safe_cut(data[:-1]) == safe_cut(data) == 0
