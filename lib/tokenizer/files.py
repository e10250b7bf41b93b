"""Tokenizers as files: our own JSON, and Hugging Face's `tokenizer.json`.

A tokenizer is three things here: `vocab` (id -> bytes), `merges` (pairs of bytes, in order) and
`special_tokens` (text -> id), of which some end a text, by default `<|endoftext|>`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.core.files import write_atomically
from lib.tokenizer.pretokenize import GPT2_PATTERN, SEPARATOR, UNICODE

FORMAT = "byte-level-bpe"
# The same pattern as GPT-2's authors wrote it.
GPT2_PATTERN_SPELLED_OUT = GPT2_PATTERN.replace("'(?:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d")
# Our file in a folder of token arrays, or of a run. Older folders call it by the second name, which
# is the one that Hugging Face's tools give to theirs.
NAMES = ("bpe.json", "tokenizer.json")


class Parts(NamedTuple):
    """The parts that define a tokenizer."""

    vocab: dict[int, bytes]
    merges: list[tuple[bytes, bytes]]
    special_tokens: dict[str, int]
    end_tokens: tuple[str, ...] | None = None
    """Special tokens that end a text; None for `default_end_tokens`."""


def default_end_tokens(special_tokens: Iterable[str]) -> tuple[str, ...]:
    """`<|endoftext|>`, if it is among the special tokens."""
    return (SEPARATOR,) if SEPARATOR in special_tokens else ()


def find(folder: str | os.PathLike) -> Path:
    """The path of our file in `folder`: `bpe.json`, unless only an older name exists there."""
    paths = [Path(folder, name) for name in NAMES]
    return next((path for path in paths if path.is_file()), paths[0])


def save(path: str | os.PathLike, parts: Parts) -> None:
    """Write `parts` as JSON with their fingerprint, whole or not at all."""
    document = _document(parts) | {"sha256": fingerprint(parts)}
    write_atomically(path, json.dumps(document, ensure_ascii=False, indent=1))


def load(path: str | os.PathLike) -> Parts:
    """Read a file that `save` wrote, or the one in a folder.

    Raises:
        ValueError: it is not such a file, it splits text in another way than this library does, or
            it was altered since.
    """
    path = find(path) if Path(path).is_dir() else path
    document = _read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a tokenizer of this library: its format must be {FORMAT!r}"
        )
    for key, known in {"version": 1, "pattern": GPT2_PATTERN, "unicode": UNICODE}.items():
        if document.get(key) != known:
            raise ValueError(f"{path}: {key} must be {known!r}, got {document.get(key)!r}")
    try:
        parts = _parts(document["vocab"], document["merges"], document["special_tokens"])
        if "end_tokens" in document:
            parts = parts._replace(end_tokens=tuple(document["end_tokens"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if (actual := fingerprint(parts)) != document.get("sha256"):
        raise ValueError(
            f"{path} was altered: its content has SHA-256 {actual[:12]}…, "
            f"not the stored {str(document.get('sha256'))[:12]}…"
        )
    return parts


def fingerprint(parts: Parts) -> str:
    """Compute a SHA-256, in hex, of everything that determines the ids."""
    content = json.dumps(_document(parts), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _document(parts: Parts) -> dict:
    """Return `parts` as our JSON document, without the fingerprint."""
    ordinary = {
        token_id: token
        for token_id, token in parts.vocab.items()
        if token_id not in parts.special_tokens.values()
    }
    if len(set(ordinary.values())) < len(ordinary):
        raise ValueError("vocab must have different bytes for each id to be saved, got a duplicate")
    # only where it is not the default, as in files from before there was a choice
    end = {} if parts.end_tokens is None else {"end_tokens": list(parts.end_tokens)}
    return end | {
        "format": FORMAT,
        "version": 1,
        "pattern": GPT2_PATTERN,
        "unicode": UNICODE,
        "special_tokens": dict(parts.special_tokens),
        "vocab": {to_printable(token): token_id for token_id, token in sorted(ordinary.items())},
        "merges": [f"{to_printable(a)} {to_printable(b)}" for a, b in parts.merges],
    }


def _read_json(path: str | os.PathLike) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _parts(
    vocab: Mapping[str, int], merges: Sequence[str | Sequence[str]], special_tokens: dict[str, int]
) -> Parts:
    """Make `Parts` from a vocabulary and merges in printable form, as read from a file."""
    for token_id in (*vocab.values(), *special_tokens.values()):
        if type(token_id) is not int:
            raise TypeError(f"an id must be an integer, got {token_id!r}")
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
        ValueError: a special token reads like an ordinary one; that format cannot tell them apart.
    """
    document = _document(parts)
    clashing = [token for token in parts.special_tokens if token in document["vocab"]]
    if clashing:
        raise ValueError(
            f"special_tokens must differ from ordinary tokens in this format, got {clashing[0]!r}"
        )
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
    """Read a `tokenizer.json` of Hugging Face's `tokenizers` that holds a byte-level BPE.

    Raises:
        ValueError: it holds another model, or is not such a file.
    """
    document = _read_json(path)
    try:
        model = document["model"]
        if model["type"] != "BPE":
            raise ValueError(f"model must be a byte-level BPE, got {model['type']}")
        _check_huggingface(document)
        added = {token["content"]: token["id"] for token in document.get("added_tokens", [])}
        return _parts(model["vocab"], model["merges"], added)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no tokenizer.json of a byte-level BPE: {error!r}") from error


def _check_huggingface(document: dict) -> None:
    """Raise ValueError for a setting of Hugging Face's that would give other ids than ours."""
    model, before = document["model"], _pre_tokenizer(document.get("pre_tokenizer"))
    for name, value, expected in (
        ("normalizer", _steps(document.get("normalizer"), "normalizers") or None, None),
        ("pre_tokenizer", before.get("type"), "ByteLevel"),
        ("pre_tokenizer.add_prefix_space", before.get("add_prefix_space", True), False),
        ("pre_tokenizer.use_regex", before.get("use_regex", True), True),
        ("post_processor", _what_it_adds(document.get("post_processor")), None),
        ("model.dropout", model.get("dropout") or None, None),
        ("model.continuing_subword_prefix", model.get("continuing_subword_prefix") or None, None),
        ("model.end_of_word_suffix", model.get("end_of_word_suffix") or None, None),
        ("model.ignore_merges", model.get("ignore_merges", False), False),
    ):
        if value != expected:
            raise ValueError(f"{name} must be {expected!r}, got {value!r}")
    for token in document.get("added_tokens", []):
        if any(token.get(flag, False) for flag in ("single_word", "lstrip", "rstrip")):
            raise ValueError(f"added_tokens must not take in what is around them, got {token}")


def _steps(part: dict | None, items: str) -> list[dict]:
    """A setting of Hugging Face's step by step, with those of sequences inside."""
    if not part:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part.get(items, []) for step in _steps(inner, items)]


def _pre_tokenizer(part: dict | None) -> dict:
    """The pre-tokenizer as one ByteLevel step, if its steps have that effect."""
    steps = _steps(part, "pretokenizers")
    if len(steps) == 2 and steps[0]["type"] == "Split":
        split, last = steps
        is_ours = split["pattern"].get("Regex") in (GPT2_PATTERN, GPT2_PATTERN_SPELLED_OUT)
        is_ours &= split["behavior"] == "Isolated" and not split["invert"]
        if is_ours and last["type"] == "ByteLevel" and not last.get("use_regex", True):
            return last | {"use_regex": True}
    return steps[0] if len(steps) == 1 else {"type": [step["type"] for step in steps]}


def _what_it_adds(processor: dict | None) -> Any:
    """The tokens that a post-processor of Hugging Face's adds to a text's; None for none."""
    kind = processor["type"] if processor else "ByteLevel"
    if kind == "ByteLevel":
        # it changes offsets only
        return None
    if kind == "Sequence":
        added = map(_what_it_adds, processor["processors"])
        return next((what for what in added if what is not None), None)
    if kind == "TemplateProcessing":
        added = [piece for piece in processor["single"] if "Sequence" not in piece]
        return added[0] if added else None
    return kind


# GPT-2's printable bytes


def _printable_bytes() -> dict[int, str]:
    """Map each byte to the printable character that GPT-2 writes for it in JSON, mostly itself.

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
    """Write the bytes of a token in GPT-2's printable form; `from_printable` reverses it."""
    return token.decode("latin-1").translate(_TO_PRINTABLE)


def from_printable(text: str) -> bytes:
    """Read the bytes of a token from GPT-2's printable form.

    Raises:
        ValueError: a character encodes no byte.
    """
    try:
        return bytes(_FROM_PRINTABLE[char] for char in text)
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} in {text!r} encodes no byte") from None
