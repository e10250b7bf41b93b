"""Token arrays on disk: made from text in one pass, resumed after an interruption, verified.

A token array is a plain one-dimensional `.npy` file with a manifest `<array>.json` beside it, which
records the tokenizer and the text that made it. `tokenize_file` makes one, `load_token_array` maps
it into memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np

from lib.core.files import (
    NO_SPACE,
    lock_folder,
    no_space_error,
    sha256_file,
    sync,
    sync_folder,
    write_atomically,
)
from lib.core.settings import from_json, settings, to_json
from lib.tokenizer.pretokenize import CHUNK_BYTES

if TYPE_CHECKING:
    from lib.tokenizer.bpe import Tokenizer

# length of the header of a one-dimensional .npy file, whatever its shape
HEADER_BYTES = 128
# how much text is encoded between two entries of the journal
JOURNAL_BYTES = 64 << 20
log = logging.getLogger(__name__)


@settings
class Manifest:
    """The content of a token array, and what it was made from."""

    tokenizer_sha256: str
    """`Tokenizer.sha256` of the tokenizer that made it."""

    source_sha256: str
    """Hash of the text file it was made from."""

    source_bytes: int
    """Length of that file."""

    dtype: Literal["uint16", "uint32"]
    """Type of one token id; little-endian."""

    source: str
    """Name of that file, for people."""

    num_tokens: int
    """Length of the array."""

    tokens_sha256: str
    """Hash of the token ids as stored, without the file's header."""


class _Progress(NamedTuple):
    """How much of a text is encoded: its bytes, and the ids that they gave."""

    bytes: int
    tokens: int


def tokenize_file(
    tokenizer: Tokenizer,
    text_path: str | os.PathLike,
    output_path: str | os.PathLike,
    *,
    source_sha256: str | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Encode the text file `text_path` into the token array `output_path`, streaming.

    Only reads the array if this tokenizer has already made it from this very text. Likewise, an
    interrupted call resumes where its journal last recorded the position. `output_path` appears
    only once it is complete and on disk; until then the ids are in `<output_path>.partial`. A
    second process that writes the same array waits for the first.

    Args:
        output_path: must end in `.npy`.
        source_sha256: hash of the text, if the caller has it.
        workers: threads that encode; one per core by default.
        progress: called with the bytes of text done by earlier calls, then with those just done.

    Raises:
        ValueError: `output_path` does not end in `.npy`, or the text changed meanwhile.
        OSError: a file cannot be read or written; on a full disk, says how much is needed.
    """
    text_path, output_path = Path(text_path), Path(output_path)
    if output_path.suffix != ".npy":
        raise ValueError(f"output_path must end in .npy, got {str(output_path)!r}")
    before = text_path.stat()
    key: dict = {
        "tokenizer_sha256": tokenizer.sha256,
        "source_sha256": source_sha256 or sha256_file(text_path),
        "source_bytes": before.st_size,
        "dtype": np.dtype(tokenizer.dtype).name,
    }
    # look before taking the lock, too: the folder of a finished array may be read-only
    manifest = _find_current(output_path, key)
    if manifest is None:
        with lock_folder(output_path.parent):
            manifest = _find_current(output_path, key)
            if manifest is None:
                encode = partial(tokenizer.encode_stream, chunk_bytes=CHUNK_BYTES, workers=workers)
                totals = _encode_rest(encode, text_path, output_path, key, progress)
                after = text_path.stat()
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    _partial(output_path).unlink()
                    raise ValueError(f"{text_path} changed while it was tokenized; run again")
                return _publish(output_path, Manifest(**key, **totals, source=text_path.name))
    log.info("%s is up to date", output_path)
    if progress:
        progress(manifest.source_bytes)
    return manifest


def load_token_array(
    path: str | os.PathLike, *, tokenizer: Tokenizer | None = None, verify: bool = False
) -> np.ndarray:
    """Map the token array at `path` into memory, read-only: (num_tokens,) uint16 or uint32.

    Always checks that length and dtype of the file match its manifest.

    Args:
        tokenizer: the tokenizer that must have made it.
        verify: also read the whole array and compare its hash (about a second per gigabyte).

    Raises:
        FileNotFoundError: the array or its manifest is missing.
        ValueError: array, manifest and tokenizer do not match; says how they differ.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_size(path, manifest)
    if tokenizer is not None and tokenizer.sha256 != manifest.tokenizer_sha256:
        raise ValueError(
            f"{path} was made by the tokenizer {manifest.tokenizer_sha256}, "
            f"not by the one given, {tokenizer.sha256}"
        )
    tokens = np.load(path, mmap_mode="r")
    if verify and hashlib.sha256(tokens).hexdigest() != manifest.tokens_sha256:
        raise ValueError(f"{path} was altered: its ids do not match the hash in its manifest")
    return tokens


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Read the manifest of the token array at `path`.

    Raises:
        FileNotFoundError: the array or its manifest is missing.
        ValueError: the manifest is damaged.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no token array {path}; `python -m lib tokenize` makes one")
    if not _manifest(path).exists():
        raise FileNotFoundError(
            f"{path} has no manifest {_manifest(path)}: it was not finished, or not made by "
            "lib.data.token_array.tokenize_file; `python -m lib tokenize` makes both"
        )
    return from_json(Manifest, _manifest(path))


def _find_current(output_path: Path, key: dict[str, Any]) -> Manifest | None:
    """Return the manifest of the finished array at `output_path` if made from `key`, else None."""
    try:
        manifest = read_manifest(output_path)
        if any(getattr(manifest, k) != v for k, v in key.items()):
            return None
        # as a training does, which would refuse an altered array
        load_token_array(output_path, verify=True)
    except (OSError, ValueError):
        return None
    return manifest


def _check_size(path: Path, manifest: Manifest) -> None:
    """Raise `ValueError` unless length and header of the file match its manifest."""
    size = path.stat().st_size
    expected = HEADER_BYTES + manifest.num_tokens * np.dtype(manifest.dtype).itemsize
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if size != expected or header != _header(_dtype(manifest.dtype), manifest.num_tokens):
        raise ValueError(
            f"{path} must have {expected:,} bytes by its manifest ({manifest.num_tokens:,} ids of "
            f"{manifest.dtype}), got {size:,} bytes or another header"
        )


def _encode_rest(
    encode: Callable[[BinaryIO], Iterator[tuple[int, np.ndarray]]],
    text_path: Path,
    output_path: Path,
    key: dict[str, Any],
    progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    """Complete the partial file of `output_path`; return its number of ids and their hash."""
    dtype = _dtype(key["dtype"])
    partial_path, journal_path = _partial(output_path), _journal(output_path)
    done, digest = _read_journal(output_path, key)
    journaled = done.bytes
    try:
        with (
            open(partial_path, "r+b" if done.bytes else "w+b") as out,
            open(text_path, "rb") as text,
        ):
            # keep what the journal vouches for; zeros for a header make the file unreadable so far
            out.truncate(HEADER_BYTES + done.tokens * dtype.itemsize)
            out.seek(0, os.SEEK_END)
            text.seek(done.bytes)
            if progress:
                progress(done.bytes)

            # encode chunk by chunk; an entry in the journal follows the ids to disk
            for num_bytes, ids in encode(text):
                data = np.ascontiguousarray(ids, dtype).data
                out.write(data)
                digest.update(data)
                done = _Progress(done.bytes + num_bytes, done.tokens + len(ids))
                if done.bytes - journaled >= JOURNAL_BYTES:
                    sync(out)
                    write_atomically(journal_path, _journal_text(key, done, digest))
                    journaled = done.bytes
                if progress:
                    progress(num_bytes)

            # the length is known now: write the header
            out.seek(0)
            out.write(_header(dtype, done.tokens))
            sync(out)
    except BaseException as error:
        can_resume = journal_path.exists()
        if not can_resume:
            partial_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            tokens_per_byte = done.tokens / done.bytes if done.bytes else 1
            bytes_left = key["source_bytes"] - (done.bytes if can_resume else 0)
            needed = bytes_left * tokens_per_byte * dtype.itemsize
            raise no_space_error(error, output_path, needed) from error
        raise
    return {"num_tokens": done.tokens, "tokens_sha256": digest.hexdigest()}


def _read_journal(output_path: Path, key: dict[str, Any]) -> tuple[_Progress, Any]:
    """Return how much of the partial file to keep, and the running SHA-256 of its ids.

    Nothing is kept unless it was begun for `key`, and journal and ids are as they were written.
    """
    try:
        text = _journal(output_path).read_text(encoding="utf-8")
        done = _Progress(*json.loads(text)["done"])
        num_bytes = done.tokens * _dtype(key["dtype"]).itemsize
        digest = _hash_ids(_partial(output_path), num_bytes)
        if text == _journal_text(key, done, digest):
            log.info("%s: resuming at byte %s of the text", output_path, f"{done.bytes:,}")
            return done, digest
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    # the old journal must never describe the partial file that begins now
    _journal(output_path).unlink(missing_ok=True)
    return _Progress(0, 0), hashlib.sha256()


def _journal_text(key: dict[str, Any], done: _Progress, digest: Any) -> str:
    """Return an entry of the journal: that `done` of the text was encoded for `key`.

    Its seal covers the entry and, through their running `digest`, the ids.
    """
    entry = {"key": key, "done": done}
    seal = hashlib.sha256(json.dumps([entry, digest.hexdigest()]).encode())
    return json.dumps(entry | {"seal": seal.hexdigest()})


def _publish(output_path: Path, manifest: Manifest) -> Manifest:
    """Rename the complete file, then write its manifest; without one an array is not trusted."""
    # the manifest of an earlier array must not vouch for this one
    _manifest(output_path).unlink(missing_ok=True)
    os.replace(_partial(output_path), output_path)
    sync_folder(output_path.parent)
    write_atomically(_manifest(output_path), to_json(manifest) + "\n")
    _journal(output_path).unlink(missing_ok=True)
    return manifest


def _header(dtype: np.dtype, length: int) -> bytes:
    """Return the header of a one-dimensional `.npy` file, `HEADER_BYTES` long."""
    header = io.BytesIO()
    fields = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


def _hash_ids(path: Path, num_bytes: int) -> Any:
    """Return the running SHA-256 of the first `num_bytes` of ids in a partial file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        while num_bytes > 0 and (block := file.read(min(num_bytes, 1 << 20))):
            digest.update(block)
            num_bytes -= len(block)
    return digest


def _dtype(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")


def _manifest(path: str | os.PathLike) -> Path:
    return Path(f"{path}.json")


def _partial(path: Path) -> Path:
    return Path(f"{path}.partial")


def _journal(path: Path) -> Path:
    return Path(f"{path}.partial.json")
