"""The user's own text: which files, what a document is, and how a part is held out.

Files: the file itself, or every `*.txt` and `*.md` below a folder, sorted by their paths.
Documents: a file that holds `<|endoftext|>` is split there; any other file is one document. Pieces
    of nothing but white space are dropped.
Bytes: UTF-8. A byte order mark at the start of a file is dropped, invalid bytes become U+FFFD and
    are counted in a warning. Line ends stay as they are.
Held out: with a fraction of 0.05, every 20th document. With fewer than 20, the end of the text: all
    documents in a row are cut where the fraction begins, at the nearest border of a document or a
    paragraph, else of a line, else (where lines are very long) at a space.
Both parts hold their documents joined by `<|endoftext|>`, with nothing else added.

Files are read twice in blocks of 1 MiB, so memory stays flat at any size.
"""

import codecs
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from lib.pretokenize import SEPARATOR

SUFFIXES = (".txt", ".md")

_BLOCK_BYTES = 1 << 20
# how far from the wanted place a document is cut at most, in bytes
_REACH_BYTES = 1 << 19
_PARAGRAPH = rb"\n\s*\n|" + re.escape(SEPARATOR.encode())
_LINE = rb"\n"
_SPACE = rb"[ \t]"
# Before any character; for text that is written without spaces. A single word is not cut.
_CHARACTER = rb"(?=[^\x80-\xbf])"
_LONGEST_WORD = 200


def find_text_files(source: Path, *, outside: Path) -> list[Path]:
    """Return the text files at `source`, a file or folder, except those below `outside`.

    Raises:
        FileNotFoundError: there is no such file or folder, or the folder holds no text files.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(
            f"corpus '{source}' is neither 'stories' nor 'tinystories' nor a file or folder"
        )
    files = [
        path
        for path in sorted(source.rglob("*"), key=lambda path: path.parts)
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and outside.resolve() not in path.resolve().parents
    ]
    if not files:
        raise FileNotFoundError(f"folder '{source}' holds no {' or '.join(SUFFIXES)} file")
    return files


def split_own_text(
    files: list[Path],
    train: BinaryIO,
    validation: BinaryIO,
    *,
    fraction: float,
    progress: Callable[[int], None],
) -> None:
    """Write the documents of `files` to `train` and, about `fraction` of them, to `validation`.

    `progress` is told the bytes just written. Invalid UTF-8 is reported by a `UserWarning`.

    Raises:
        ValueError: the files hold no text, or too little to be split.
    """
    num_documents, num_bytes = _measure(files)
    if not num_documents:
        raise ValueError(f"{_name(files)} holds no text")
    every = round(1 / fraction)
    if num_documents >= every:
        outputs = {False: train, True: validation}
        last = dict.fromkeys(outputs, -1)
        for index, piece in _documents(files):
            held_out = index % every == every - 1
            if last[held_out] not in (-1, index):
                outputs[held_out].write(SEPARATOR.encode())
            last[held_out] = index
            outputs[held_out].write(piece)
            progress(len(piece))
        return
    left = _find_cut(files, num_bytes, fraction)
    for piece in _joined(files):
        train.write(piece[:left])
        validation.write(piece[left:])
        left -= min(left, len(piece))
        progress(len(piece))


def _measure(files: list[Path]) -> tuple[int, int]:
    """Return the numbers of documents, and of bytes of all of them joined; warn of bad bytes."""
    num_documents = num_bytes = 0
    for index, piece in _documents(files, warn=True):
        num_documents = index + 1
        num_bytes += len(piece)
    return num_documents, num_bytes + max(0, num_documents - 1) * len(SEPARATOR)


def _find_cut(files: list[Path], num_bytes: int, fraction: float) -> int:
    """Return where to cut the joined documents: how many bytes go to the training part."""
    target = round(num_bytes * (1 - fraction))
    start, end = max(0, target - _REACH_BYTES), min(num_bytes, target + _REACH_BYTES)
    window = _read_window(files, start, end)
    # both parts must hold more than white space
    first = start or len(window) - len(window.lstrip())
    last = start + len(window.rstrip()) if end == num_bytes else end
    for pattern, largest_share in (
        *((_PARAGRAPH, 2 * fraction), (_LINE, 2 * fraction)),
        *((_PARAGRAPH, 0.5), (_LINE, 0.5), (_SPACE, 0.5)),
        *((_PARAGRAPH, 1), (_LINE, 1), (_SPACE, 1)),
        *([(_CHARACTER, 1)] if num_bytes > _LONGEST_WORD else []),
    ):
        first_cut = max(first, num_bytes * (1 - largest_share))
        cuts = (start + match.end() for match in re.finditer(pattern, window))
        good = (cut for cut in cuts if first_cut < cut < last)
        nearest = min(good, key=lambda cut: abs(cut - target), default=None)
        if nearest is not None:
            return nearest
    raise ValueError(
        f"{_name(files)} is too short to split: in its {num_bytes} bytes there is no paragraph, "
        f"line or space to cut at for a validation part of {fraction:.0%}"
    )


def _read_window(files: list[Path], start: int, end: int) -> bytes:
    pieces, position = [], 0
    for piece in _joined(files):
        pieces.append(piece[max(0, start - position) : max(0, end - position)])
        position += len(piece)
        if position >= end:
            break
    return b"".join(pieces)


def _joined(files: list[Path]) -> Iterator[bytes]:
    last = 0
    for index, piece in _documents(files):
        if index != last:
            yield SEPARATOR.encode()
        last = index
        yield piece


def _documents(files: list[Path], *, warn: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the documents in pieces of about 1 MiB, UTF-8, each with its document's index."""
    index = 0
    for path in files:
        blank, begun = "", False
        for piece in _split(_decode(path, warn=warn)):
            if piece is None:
                index, blank, begun = index + begun, "", False
            elif not begun and not piece.strip():
                # white space: part of the document if text follows
                blank += piece
            elif piece:
                yield index, (blank + piece).encode()
                blank, begun = "", True
        index += begun


def _split(blocks: Iterator[str]) -> Iterator[str | None]:
    """Yield the text of `blocks` with each separator replaced by None, however blocks cut it."""
    rest = ""
    for block in blocks:
        *whole, rest = (rest + block).split(SEPARATOR)
        for piece in whole:
            yield piece
            yield None
        # keep back what may be the beginning of a separator
        keep = len(SEPARATOR) - 1
        yield rest[:-keep]
        rest = rest[-keep:]
    yield rest


def _decode(path: Path, *, warn: bool) -> Iterator[str]:
    """Yield the text of `path` in blocks; with `warn`, warn of how much of it was no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    replacement = "\ufffd"
    num_invalid, tail = 0, b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            text = decoder.decode(block)
            # characters U+FFFD that were in the file already are no errors
            num_invalid += text.count(replacement) - (tail + block).count(replacement.encode())
            tail = (tail + block)[-2:]
            yield text
    text = decoder.decode(b"", final=True)
    num_invalid += text.count(replacement)
    yield text
    if warn and num_invalid:
        warnings.warn(f"{path}: {num_invalid} invalid UTF-8 sequences became U+FFFD", stacklevel=2)


def _name(files: list[Path]) -> str:
    return f"'{files[0]}'" if len(files) == 1 else f"folder '{os.path.commonpath(files)}'"
