"""Tokenizers as files: this project's own JSON, and the forms of Hugging Face and tiktoken.

A tokenizer is three things here: `vocab` (id -> bytes), `merges` (pairs of bytes, in order) and
`special_tokens` (text -> id).
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lib.files import write_atomically
from lib.pretokenize import GPT2_PATTERN

FORMAT = "byte-level-bpe"
Merges = list[tuple[bytes, bytes]]


class Parts(NamedTuple):
    """What a tokenizer is made of."""

    vocab: dict[int, bytes]
    merges: Merges
    special_tokens: dict[str, int]


def _printable_bytes() -> dict[int, str]:
    """GPT-2's way to write bytes in JSON: each as one printable character, most as themselves.

    >>> "".join(_printable_bytes()[byte] for byte in b" the")
    'Ġthe'
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + rank) for rank, byte in enumerate(hidden)
    }


_TO_PRINTABLE = str.maketrans(_printable_bytes())
_FROM_PRINTABLE = {char: byte for byte, char in _printable_bytes().items()}


def to_printable(token: bytes) -> str:
    """The bytes of a token in GPT-2's printable form; `from_printable` gives them back."""
    return token.decode("latin-1").translate(_TO_PRINTABLE)


def from_printable(text: str) -> bytes:
    """Raises ValueError for a character that stands for no byte."""
    try:
        return bytes(_FROM_PRINTABLE[char] for char in text)
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} in {text!r} stands for no byte") from None


def fingerprint(parts: Parts) -> str:
    """A SHA-256, in hexadecimal, of everything that decides about ids."""
    content = json.dumps(_document(parts), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _document(parts: Parts) -> dict:
    ordinary = {
        token_id: token
        for token_id, token in parts.vocab.items()
        if token_id not in parts.special_tokens.values()
    }
    if len(set(ordinary.values())) < len(ordinary):
        raise ValueError("two ids have the same bytes, so a file could not tell them apart")
    return {
        "format": FORMAT,
        "version": 1,
        "pattern": GPT2_PATTERN,
        "unicode": "16.0",
        "special_tokens": dict(parts.special_tokens),
        "vocab": {to_printable(token): token_id for token_id, token in sorted(ordinary.items())},
        "merges": [f"{to_printable(a)} {to_printable(b)}" for a, b in parts.merges],
    }


def save(path: str | os.PathLike, parts: Parts) -> None:
    """Write `parts` as JSON with their fingerprint; the file is whole or not there at all."""
    document = _document(parts) | {"sha256": fingerprint(parts)}
    write_atomically(path, json.dumps(document, ensure_ascii=False, indent=1))


def load(path: str | os.PathLike) -> Parts:
    """Read what `save` wrote.

    Raises:
        ValueError: it is not such a file, or it was altered since.
    """
    document = _read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a tokenizer of this library: no format {FORMAT!r}")
    if document.get("version") != 1:
        raise ValueError(f"{path} has version {document.get('version')}; this code reads 1")
    try:
        parts = _parts(document["vocab"], document["merges"], document["special_tokens"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if (actual := fingerprint(parts)) != document.get("sha256"):
        raise ValueError(
            f"{path} was altered: its content has SHA-256 {actual[:12]}…, "
            f"it says {str(document.get('sha256'))[:12]}…"
        )
    return parts


def _read_json(path: str | os.PathLike) -> object:
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _parts(
    vocab: Mapping[str, int], merges: Sequence[str | Sequence[str]], special_tokens: dict[str, int]
) -> Parts:
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    ordinary = {
        token_id: from_printable(token)
        for token, token_id in vocab.items()
        if special_tokens.get(token) != token_id
    }
    specials = {token_id: token.encode() for token, token_id in special_tokens.items()}
    return Parts(
        ordinary | specials,
        [(from_printable(left), from_printable(right)) for left, right in pairs],
        dict(special_tokens),
    )


def save_huggingface(path: str | os.PathLike, parts: Parts) -> None:
    """Write a `tokenizer.json` for Hugging Face's `tokenizers`.

    Raises:
        ValueError: a special token reads like an ordinary one, which that form cannot tell apart.
    """
    document = _document(parts)
    clashing = [token for token in parts.special_tokens if token in document["vocab"]]
    if clashing:
        raise ValueError(f"special token {clashing[0]!r} reads like an ordinary token")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    huggingface = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, **flags, "special": True}
            for token, token_id in parts.special_tokens.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": document["vocab"] | parts.special_tokens,
            "merges": [merge.split(" ") for merge in document["merges"]],
        },
    }
    write_atomically(path, json.dumps(huggingface, ensure_ascii=False, indent=1))


def load_huggingface(path: str | os.PathLike) -> Parts:
    """Read a byte-level BPE `tokenizer.json` of Hugging Face's `tokenizers`."""
    document = _read_json(path)
    model = document.get("model", {})
    if model.get("type") != "BPE":
        raise ValueError(f"{path} holds a {model.get('type')} model; only byte-level BPE is read")
    special_tokens = {token["content"]: token["id"] for token in document.get("added_tokens", [])}
    return _parts(model["vocab"], model["merges"], special_tokens)


def load_gpt2(
    vocab_path: str | os.PathLike,
    merges_path: str | os.PathLike,
    special_tokens: Sequence[str] = (),
) -> Parts:
    """Read GPT-2's `vocab.json` and `merges.txt`, with or without its first line `#version: …`."""
    vocab = _read_json(vocab_path)
    lines = Path(merges_path).read_text(encoding="utf-8").split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    merges = [line.rstrip("\r") for line in lines[first:] if line.strip()]
    absent = [token for token in special_tokens if token not in vocab]
    vocab |= {token: max(vocab.values()) + 1 + rank for rank, token in enumerate(absent)}
    return _parts(vocab, merges, {token: vocab[token] for token in special_tokens})


def save_tiktoken(path: str | os.PathLike, parts: Parts) -> None:
    """Write the ranks as tiktoken's `.tiktoken` file: base64 of the bytes, a space, the id."""
    lines = [
        b"%s %d\n" % (base64.b64encode(token), token_id)
        for token_id, token in sorted(parts.vocab.items())
        if token_id not in parts.special_tokens.values()
    ]
    write_atomically(path, b"".join(lines))


def load_tiktoken(
    path: str | os.PathLike, special_tokens: Mapping[str, int] | None = None
) -> Parts:
    """Read a `.tiktoken` file of a vocabulary with GPT-2's pattern.

    The file has no merges. Those of a token are found by encoding it with the tokens before it:
    what remains is the pair that was merged.
    """
    ranks = {}
    for line in Path(path).read_bytes().splitlines():
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{path} is no tiktoken file: line {line[:40]!r}") from error
    special_tokens = dict(special_tokens or {})
    specials = {token_id: token.encode() for token, token_id in special_tokens.items()}
    vocab = {rank: token for token, rank in ranks.items()} | specials
    longer = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    return Parts(vocab, [_last_pair(token, ranks) for token in longer], special_tokens)


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that the last merge of `token` joins."""
    pieces = [bytes([byte]) for byte in token]
    while len(pieces) > 2:
        joined = [left + right for left, right in pairwise(pieces)]
        best = min(range(len(joined)), key=lambda k: ranks.get(joined[k], len(ranks)))
        if ranks.get(joined[best], len(ranks)) >= ranks[token]:
            raise ValueError(f"{token!r} cannot be made by merging tokens of a lower rank")
        pieces[best : best + 2] = [joined[best]]
    return pieces[0], pieces[1]
