"""Token arrays on disk: made from text in one pass, complete or absent, verified.

A token array is a plain one-dimensional `.npy` file with a manifest `<array>.json` beside it, which
records the tokenizer and the text that made it. `tokenize_file` makes one, `load_token_array` maps
it into memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from lib.core.files import atomic_write, lock_folder, sha256_file, write_atomically
from lib.core.settings import from_json, settings, to_json
from lib.tokenizer.pretokenize import CHUNK_BYTES

if TYPE_CHECKING:
    from lib.tokenizer.bpe import Tokenizer

# length of the header of a one-dimensional .npy file, whatever its shape
HEADER_BYTES = 128
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

    Only reads the array if this tokenizer has already made it from this very text. `output_path`
    appears only once it is complete and on disk. A second process that writes the same array waits
    for the first.

    Args:
        output_path: must end in `.npy`.
        source_sha256: hash of the text, if the caller has it.
        workers: threads that encode; one per core by default.
        progress: called with the bytes of text that needed no work, then with those just encoded.

    Raises:
        ValueError: `output_path` does not end in `.npy`, or the text changed meanwhile.
        OSError: a file cannot be read or written, or the disk is full.
    """
    text_path, output_path = Path(text_path), Path(output_path)
    progress = progress or (lambda num_bytes: None)
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
                progress(0)
                encode = partial(tokenizer.encode_stream, chunk_bytes=CHUNK_BYTES, workers=workers)
                return _make(encode, text_path, before, output_path, key, progress)
    log.info("%s is up to date", output_path)
    progress(manifest.source_bytes)
    return manifest


def _make(
    encode: Callable[[BinaryIO], Iterator[tuple[int, np.ndarray]]],
    text_path: Path,
    before: os.stat_result,
    output_path: Path,
    key: dict[str, Any],
    progress: Callable[[int], None],
) -> Manifest:
    """Encode the text, write the array and its manifest; `before` is the text's state so far."""
    dtype = np.dtype(key["dtype"]).newbyteorder("<")
    num_tokens, digest = 0, hashlib.sha256()
    with atomic_write(output_path) as out, open(text_path, "rb") as text:
        out.write(bytes(HEADER_BYTES))
        for num_bytes, ids in encode(text):
            data = np.ascontiguousarray(ids, dtype).data
            out.write(data)
            digest.update(data)
            num_tokens += len(ids)
            progress(num_bytes)

        # the length is known now: write the header
        out.seek(0)
        fields = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
        np.lib.format.write_array_header_1_0(out, fields)
        after = text_path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ValueError(f"{text_path} changed while it was tokenized; run again")
        # an array that is there has its own manifest: it is renamed last
        totals: dict = {"num_tokens": num_tokens, "tokens_sha256": digest.hexdigest()}
        manifest = Manifest(**key, **totals, source=text_path.name)
        output_path.unlink(missing_ok=True)
        write_atomically(_manifest(output_path), to_json(manifest) + "\n")
    return manifest


def load_token_array(
    path: str | os.PathLike, *, tokenizer: Tokenizer | None = None, verify: bool = False
) -> np.ndarray:
    """Map the token array at `path` into memory, read-only: (num_tokens,) uint16 or uint32.

    Always checks that the length of the file matches its manifest.

    Args:
        tokenizer: the tokenizer that must have made it.
        verify: also read the whole array and compare its hash (about a second per gigabyte).

    Raises:
        FileNotFoundError: the array or its manifest is missing.
        ValueError: array, manifest and tokenizer do not match; says how they differ.
    """
    path = Path(path)
    manifest = read_manifest(path)
    size = path.stat().st_size
    expected = HEADER_BYTES + manifest.num_tokens * np.dtype(manifest.dtype).itemsize
    if size != expected:
        raise ValueError(
            f"{path} must have {expected:,} bytes by its manifest ({manifest.num_tokens:,} ids of "
            f"{manifest.dtype}), got {size:,} bytes"
        )
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


def _manifest(path: str | os.PathLike) -> Path:
    return Path(f"{path}.json")
