"""Token arrays on disk: made from text in one pass, taken up after an interruption, verified.

A token array is a plain one-dimensional `.npy` file beside a manifest `<array>.json`, which says
which tokenizer and which text made it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np

from lib.files import (
    NO_SPACE,
    lock_folder,
    no_space_error,
    sha256_file,
    sync,
    sync_folder,
    write_atomically,
)
from lib.pretokenize import CHUNK_BYTES
from lib.strict_json import from_json, to_json

if TYPE_CHECKING:
    from lib.tokenizer import Tokenizer

HEADER_BYTES = 128
JOURNAL_BYTES = 64 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """What a token array holds and what it was made from."""

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


class _Done(NamedTuple):
    """How far a text is encoded: its bytes, and the ids they gave."""

    bytes: int
    tokens: int


def tokenize_file(
    tokenizer: Tokenizer,
    text_path: str | os.PathLike,
    output_path: str | os.PathLike,
    *,
    source_sha256: str | None = None,
    workers: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    journal_bytes: int = JOURNAL_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Encode the text file `text_path` into the token array `output_path`, streaming.

    Returns at once when the array is there already, made by this tokenizer from this very text.
    An interrupted call is taken up again where it last saved its position, under the same
    condition. `output_path` appears only when it is whole and on disk; until then the ids stand in
    `<output_path>.partial`. A second process that writes the same array waits for the first.

    Args:
        output_path: must end in `.npy`.
        source_sha256: hash of the text, where the caller has just computed it.
        workers: threads that encode; one for each core by default.
        chunk_bytes: how much text is encoded at a time.
        journal_bytes: how much text is encoded between two savings of the position.
        progress: told first the bytes of text done by earlier calls, then those just done.

    Raises:
        ValueError: `output_path` does not end in `.npy`, or the text changed meanwhile.
        OSError: a file cannot be read or written; when the disk is full, says what is needed.
    """
    text_path, output_path = Path(text_path), Path(output_path)
    if output_path.suffix != ".npy":
        raise ValueError(f"output_path is {str(output_path)!r}; right is: a name ending in .npy")
    before = text_path.stat()
    key = {
        "tokenizer_sha256": tokenizer.sha256,
        "source_sha256": source_sha256 or sha256_file(text_path),
        "source_bytes": before.st_size,
        "dtype": np.dtype(tokenizer.dtype).name,
    }
    # asked before the lock as well, since a folder that holds a whole array may be read-only
    manifest = up_to_date(output_path, key)
    if not manifest:
        with lock_folder(output_path.parent):
            manifest = up_to_date(output_path, key)
            if not manifest:
                encode = partial(tokenizer.encode_stream, chunk_bytes=chunk_bytes, workers=workers)
                totals = _encode_rest(encode, text_path, output_path, key, journal_bytes, progress)
                after = text_path.stat()
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    _partial(output_path).unlink()
                    raise ValueError(f"{text_path} changed while it was tokenized; run again")
                return _publish(output_path, Manifest(**key, **totals, source=text_path.name))
    log.info("%s is up to date", output_path)
    if progress:
        progress(manifest.source_bytes)
    return manifest


def up_to_date(output_path: Path, key: dict[str, Any]) -> Manifest | None:
    """The manifest of the whole array at `output_path` if it was made from `key`, else None."""
    try:
        manifest = read_manifest(output_path)
        _check_size(output_path, manifest)
    except (OSError, ValueError):
        return None
    return manifest if all(getattr(manifest, k) == v for k, v in key.items()) else None


def read_manifest(path: str | os.PathLike) -> Manifest:
    """The manifest of the token array at `path`.

    Raises:
        FileNotFoundError: there is no array, or no manifest beside it.
        ValueError: the manifest is not one.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no token array {path}; `python -m lib tokenize` makes one")
    if not _manifest(path).exists():
        raise FileNotFoundError(
            f"{path} has no manifest {_manifest(path)}: it was not finished, or not made by "
            "lib.data.tokenize_file; `python -m lib tokenize` makes both"
        )
    return from_json(Manifest, _manifest(path))


def load_token_array(
    path: str | os.PathLike, *, tokenizer: Tokenizer | None = None, verify: bool = False
) -> np.ndarray:
    """Map the token array at `path` into memory, read-only: (num_tokens,) uint16 or uint32.

    Always checks that the file has the length and dtype that its manifest tells.

    Args:
        tokenizer: the tokenizer that must have made it.
        verify: read the whole array and compare its hash as well (about a second a gigabyte).

    Raises:
        FileNotFoundError: the array or its manifest is missing.
        ValueError: array, manifest and tokenizer do not belong together; says how they differ.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_size(path, manifest)
    if tokenizer is not None and tokenizer.sha256 != manifest.tokenizer_sha256:
        raise ValueError(
            f"{path} was made by the tokenizer {manifest.tokenizer_sha256}, "
            f"and not by the one given, {tokenizer.sha256}"
        )
    tokens = np.load(path, mmap_mode="r")
    if verify and hashlib.sha256(tokens).hexdigest() != manifest.tokens_sha256:
        raise ValueError(f"{path} was altered: its ids do not have the hash in its manifest")
    return tokens


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """The header of a one-dimensional `.npy` file, version 1.0, in `HEADER_BYTES` bytes.

    NumPy's own grows with the shape; this one can be filled in when the length is known.
    """
    fields = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    size = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + f"{fields:<{size - 1}}\n".encode()


def _encode_rest(
    encode: Callable[[BinaryIO], Iterator[tuple[int, np.ndarray]]],
    text_path: Path,
    output_path: Path,
    key: dict[str, Any],
    journal_bytes: int,
    progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    """Complete the partial file of `output_path`; how many ids it holds, and their hash.

    The journal beside it says up to which byte of the text it is surely on disk.
    """
    dtype = _dtype(key["dtype"])
    partial_path, journal_path = _partial(output_path), _journal(output_path)
    done = _read_journal(output_path, key)
    journaled = done.bytes
    try:
        with (
            open(partial_path, "r+b" if done.bytes else "w+b") as out,
            open(text_path, "rb") as text,
        ):
            # the header stays zero until the end, so that nobody can load the file before
            out.truncate(HEADER_BYTES + done.tokens * dtype.itemsize)
            digest = _hash_from(out, HEADER_BYTES)
            text.seek(done.bytes)
            if progress:
                progress(done.bytes)
            for num_bytes, ids in encode(text):
                data = np.ascontiguousarray(ids, dtype).data
                out.write(data)
                digest.update(data)
                done = _Done(done.bytes + num_bytes, done.tokens + len(ids))
                if done.bytes - journaled >= journal_bytes:
                    sync(out)
                    write_atomically(journal_path, json.dumps({"key": key, "done": done}))
                    journaled = done.bytes
                if progress:
                    progress(num_bytes)
            out.seek(0)
            out.write(npy_header(dtype, done.tokens))
            sync(out)
    except BaseException as error:
        is_kept = journal_path.exists()
        if not is_kept:
            partial_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            tokens_per_byte = done.tokens / done.bytes if done.bytes else 1
            bytes_to_come = key["source_bytes"] - (done.bytes if is_kept else 0)
            needed = bytes_to_come * tokens_per_byte * dtype.itemsize
            raise no_space_error(error, output_path, needed) from error
        raise
    return {"num_tokens": done.tokens, "tokens_sha256": digest.hexdigest()}


def _publish(output_path: Path, manifest: Manifest) -> Manifest:
    """Give the whole file its name, then the manifest; without one an array is not trusted."""
    # the manifest of an array that stood here before must not vouch for this one
    _manifest(output_path).unlink(missing_ok=True)
    os.replace(_partial(output_path), output_path)
    sync_folder(output_path.parent)
    write_atomically(_manifest(output_path), to_json(manifest) + "\n")
    _journal(output_path).unlink(missing_ok=True)
    return manifest


def _read_journal(output_path: Path, key: dict[str, Any]) -> _Done:
    """How much of the partial file can be kept: nothing unless it was begun for the same `key`."""
    try:
        journal = json.loads(_journal(output_path).read_bytes())
        done = _Done(*journal["done"])
        size = HEADER_BYTES + done.tokens * _dtype(key["dtype"]).itemsize
        if journal["key"] == key and _partial(output_path).stat().st_size >= size:
            log.info("%s: going on at byte %s of the text", output_path, f"{done.bytes:,}")
            return done
    except (OSError, ValueError, KeyError, TypeError):
        pass
    # the old journal must never describe the partial file that is now begun
    _journal(output_path).unlink(missing_ok=True)
    return _Done(0, 0)


def _check_size(path: Path, manifest: Manifest) -> None:
    size = path.stat().st_size
    expected = HEADER_BYTES + manifest.num_tokens * np.dtype(manifest.dtype).itemsize
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if size != expected or header != npy_header(_dtype(manifest.dtype), manifest.num_tokens):
        raise ValueError(
            f"{path} has {size:,} bytes; its manifest tells of {manifest.num_tokens:,} ids of "
            f"{manifest.dtype}, which is {expected:,} bytes"
        )


def _hash_from(file: BinaryIO, position: int) -> Any:
    """The running SHA-256 of `file` from `position` to its end, where it is left."""
    digest = hashlib.sha256()
    file.seek(position)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def _dtype(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")


def _manifest(path: str | os.PathLike) -> Path:
    return Path(f"{path}.json")


def _partial(path: Path) -> Path:
    return Path(f"{path}.partial")


def _journal(path: Path) -> Path:
    return Path(f"{path}.partial.json")
