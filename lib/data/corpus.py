"""Corpora: generated stories, TinyStories from the Hugging Face hub, or the user's own text.

Each becomes two UTF-8 files, train and validation, with documents separated by `<|endoftext|>`, and
a `corpus.json` beside them with what they were made from and their SHA-256. Complete and current
files are left as they are; altered ones are noticed and made again.

How the user's own text is read:

Files: the file itself, or every `*.txt` and `*.md` below a folder, sorted by path.
Documents: a file that holds `<|endoftext|>` is split there; any other file is one document. Pieces
    of nothing but white space are dropped.
Bytes: UTF-8. A byte order mark at the start of a file is dropped, invalid bytes become U+FFFD and
    are counted in a warning. Line endings are kept.
Validation: with a fraction of 0.05, every 20th document. With fewer than 20, the end of the text:
    all documents in a row are cut where the fraction begins, at the nearest end of a document or a
    paragraph, else of a line, else (where lines are very long) at a space.
Both parts hold their documents joined by `<|endoftext|>`, with nothing else added. Files are read
twice in blocks of 1 MiB, so memory stays flat at any size.
"""

import codecs
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lib.core.files import (
    NO_SPACE,
    atomic_write,
    make_folder,
    no_space_error,
    sha256_file,
    write_atomically,
)
from lib.core.settings import whole_number
from lib.data.stories import GENERATOR_VERSION, SPLITS, generate_stories
from lib.tokenizer.pretokenize import SEPARATOR

Progress = Callable[[int], None]
TEXT_SUFFIXES = (".txt", ".md")
BLOCK_BYTES = 1 << 20
# how much of a file tells its encoding
FIRST_BYTES = 1 << 13
# how far from the ideal cut between train and validation to look for a better one
CUT_SEARCH_BYTES = 1 << 19
DOWNLOAD_BYTES = 1 << 18
TIMEOUT_S = 30
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """A file on the web, with its expected length and hash."""

    url: str
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


# the revision is pinned, so that the bytes cannot change under the hashes
TINYSTORIES_URL = (
    "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
    "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/"
)
TINYSTORIES = {
    "train": RemoteFile(
        url=TINYSTORIES_URL + "TinyStoriesV2-GPT4-train.txt",
        num_bytes=2_227_753_162,
        sha256="6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
    ),
    "validation": RemoteFile(
        url=TINYSTORIES_URL + "TinyStoriesV2-GPT4-valid.txt",
        num_bytes=22_502_601,
        sha256="6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
    ),
}


@dataclass(frozen=True)
class Corpus:
    """Two text files, to train on and to validate on."""

    name: str
    """The name of the folder below `data_dir` that holds them."""

    train: Path
    """UTF-8 text, documents separated by `<|endoftext|>`."""

    validation: Path
    """The same, of documents that are not in `train`."""

    train_sha256: str
    """SHA-256 of the file `train`, in hex."""

    validation_sha256: str
    """SHA-256 of the file `validation`, in hex."""


def prepare_corpus(
    source: str,
    data_dir: Path,
    *,
    num_bytes: int = 20_000_000,
    seed: int = 0,
    validation_fraction: float = 0.05,
    progress: Progress | None = None,
) -> Corpus:
    """Make the train and validation files of a corpus below `data_dir`, unless they exist.

    Args:
        source: "stories" (generated, see `lib/data/stories.py`), "tinystories" (downloaded, 2.2
            GB), or the path of a UTF-8 text file or of a folder of them (read as described at the
            top of this file). Write "./stories" for a file or folder of that name.
        data_dir: the folder to write to; the corpus gets a folder of its name inside.
        num_bytes: size of the training part of "stories"; the others are taken whole.
        seed: selects the stories.
        validation_fraction: size of the validation part: relative to `num_bytes` for "stories", to
            the whole for the user's own text; TinyStories comes with a validation part.
        progress: called with the number of bytes just written, downloaded or read.

    Raises:
        FileNotFoundError: `source` does not exist, or is a folder without text files.
        ValueError: an argument is out of range, or the text is empty or too short to split.
        OSError: `data_dir` cannot be written, the disk is full, or a download failed.
    """
    if not 0 < validation_fraction <= 0.5:
        raise ValueError(
            f"validation_fraction must be more than 0 and at most 0.5, got {validation_fraction}"
        )
    num_bytes, seed = whole_number("num_bytes", num_bytes, 1), whole_number("seed", seed, 0)
    data_dir = Path(data_dir)
    progress = progress or (lambda num_bytes: None)
    if source == "tinystories":
        return _prepare_tinystories(data_dir, progress)
    if source == "stories":
        return _prepare_stories(data_dir, num_bytes, seed, validation_fraction, progress)
    return _prepare_own_text(Path(source), data_dir, validation_fraction, progress)


def _prepare_tinystories(data_dir: Path, progress: Progress) -> Corpus:
    folder = data_dir / "tinystories"
    # complete files may be in a folder that is read-only
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict = {
        split: download(TINYSTORIES[split], folder, progress=progress) for split in SPLITS
    }
    hashes: dict = {f"{split}_sha256": TINYSTORIES[split].sha256 for split in SPLITS}
    return Corpus(folder.name, **paths, **hashes)


def _prepare_stories(
    data_dir: Path, num_bytes: int, seed: int, validation_fraction: float, progress: Progress
) -> Corpus:
    sizes = {"train": num_bytes, "validation": max(1, round(num_bytes * validation_fraction))}
    parts = {split: generate_stories(size, seed=seed, split=split) for split, size in sizes.items()}
    recipe = {"source": "stories", "version": GENERATOR_VERSION, "seed": seed, "num_bytes": sizes}
    # a folder for each recipe: notebooks with other sizes do not overwrite each other's text
    folder = data_dir / f"stories-{num_bytes}-bytes-{_short_hash(json.dumps(recipe))}"

    def write(paths: dict[str, Path]) -> None:
        for split, blocks in parts.items():
            with atomic_write(paths[split]) as file:
                for block in blocks:
                    file.write(block.encode())
                    progress(len(block))

    return _make_unless_current(folder, recipe, write)


def _prepare_own_text(
    source: Path, data_dir: Path, validation_fraction: float, progress: Progress
) -> Corpus:
    files = find_text_files(source, outside=data_dir)
    recipe: dict[str, Any] = {
        "source": str(source.resolve()),
        "validation_fraction": validation_fraction,
        "files": [[str(file), file.stat().st_size, sha256_file(file)] for file in files],
    }
    # the hash tells apart files of the same name in different folders
    stem = re.sub(r"[^\w.-]+", "-", source.resolve().stem) or "text"
    folder = data_dir / f"{stem}-{_short_hash(recipe['source'])}"

    def write(paths: dict[str, Path]) -> None:
        with (
            atomic_write(paths["train"]) as train,
            atomic_write(paths["validation"]) as validation,
        ):
            split_own_text(
                files, train, validation, fraction=validation_fraction, progress=progress
            )

    return _make_unless_current(folder, recipe, write)


def _make_unless_current(
    folder: Path, recipe: dict, write: Callable[[dict[str, Path]], None]
) -> Corpus:
    """Return the corpus in `folder`; `write` makes it first if it does not match `recipe`."""
    paths: dict = {split: folder / f"{split}.txt" for split in SPLITS}
    record_path = folder / "corpus.json"
    record = {"recipe": recipe, "sha256": _hashes(paths)}
    if None in record["sha256"].values() or _read_json(record_path) != record:
        make_folder(folder)
        record_path.unlink(missing_ok=True)
        write(paths)
        record["sha256"] = _hashes(paths)
        write_atomically(record_path, json.dumps(record, indent=2) + "\n")
    hashes: dict = {f"{split}_sha256": record["sha256"][split] for split in SPLITS}
    return Corpus(folder.name, **paths, **hashes)


def _hashes(paths: dict[str, Path]) -> dict[str, str | None]:
    return {split: sha256_file(path) if path.is_file() else None for split, path in paths.items()}


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _short_hash(text: str) -> str:
    # names of files may be bytes that are not UTF-8
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


# The user's own text

# where to cut a text in two, best first
_PARAGRAPH = rb"\n\s*\n|" + re.escape(SEPARATOR.encode())
_LINE = rb"\n"
_SPACE = rb"[ \t]"
# before any character, for text written without spaces; a text of a single word is not cut
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
            f"corpus must be 'stories', 'tinystories', or an existing file or folder, "
            f"got '{source}'"
        )
    files = [
        path
        for path in sorted(source.rglob("*"), key=lambda path: path.parts)
        if path.suffix.lower() in TEXT_SUFFIXES
        and path.is_file()
        and outside.resolve() not in path.resolve().parents
    ]
    if not files:
        raise FileNotFoundError(f"folder '{source}' holds no {' or '.join(TEXT_SUFFIXES)} file")
    return files


def split_own_text(
    files: list[Path],
    train: BinaryIO,
    validation: BinaryIO,
    *,
    fraction: float,
    progress: Progress,
) -> None:
    """Write the documents of `files` to `train` and, about `fraction` of them, to `validation`.

    `progress` is called with the bytes just written. A line of the log counts invalid UTF-8.

    Raises:
        ValueError: the files hold no text, too little to split, or UTF-16.
    """
    num_documents, num_bytes = _measure(files)
    if not num_documents:
        raise ValueError(f"{_name(files)} holds no text")
    every = round(1 / fraction)

    # many documents: hold out whole ones
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

    # few documents: hold out the end of the text
    bytes_left = _find_cut(files, num_bytes, fraction)
    for piece in _joined(files):
        train.write(piece[:bytes_left])
        validation.write(piece[bytes_left:])
        bytes_left -= min(bytes_left, len(piece))
        progress(len(piece))


def _measure(files: list[Path]) -> tuple[int, int]:
    """Count the documents, and the bytes of all of them joined; warn about invalid bytes."""
    num_documents = num_bytes = 0
    for index, piece in _documents(files, warn=True):
        num_documents = index + 1
        num_bytes += len(piece)
    return num_documents, num_bytes + max(0, num_documents - 1) * len(SEPARATOR)


def _find_cut(files: list[Path], num_bytes: int, fraction: float) -> int:
    """Return where to cut the joined documents: how many bytes go to the training part."""
    target = round(num_bytes * (1 - fraction))
    start, end = max(0, target - CUT_SEARCH_BYTES), min(num_bytes, target + CUT_SEARCH_BYTES)
    region = _read_region(files, start, end)
    # both parts must hold more than white space
    first = start or len(region) - len(region.lstrip())
    last = start + len(region.rstrip()) if end == num_bytes else end
    # a good cut that keeps the validation part small comes before a better one that does not
    for pattern, largest_share in (
        *((_PARAGRAPH, 2 * fraction), (_LINE, 2 * fraction)),
        *((_PARAGRAPH, 0.5), (_LINE, 0.5), (_SPACE, 0.5)),
        *((_PARAGRAPH, 1), (_LINE, 1), (_SPACE, 1)),
        *([(_CHARACTER, 1)] if num_bytes > _LONGEST_WORD else []),
    ):
        first_cut = max(first, num_bytes * (1 - largest_share))
        cuts = (start + match.end() for match in re.finditer(pattern, region))
        allowed = (cut for cut in cuts if first_cut < cut < last)
        nearest = min(allowed, key=lambda cut: abs(cut - target), default=None)
        if nearest is not None:
            return nearest
    raise ValueError(
        f"{_name(files)} is too short to split: its {num_bytes} bytes have no paragraph, line or "
        f"space to cut at for a validation part of {fraction:.0%}"
    )


def _read_region(files: list[Path], start: int, end: int) -> bytes:
    """Return bytes `start` to `end` of the joined documents."""
    pieces, position = [], 0
    for piece in _joined(files):
        pieces.append(piece[max(0, start - position) : max(0, end - position)])
        position += len(piece)
        if position >= end:
            break
    return b"".join(pieces)


def _joined(files: list[Path]) -> Iterator[bytes]:
    """Yield the documents with separators between them, in pieces."""
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
        blank, has_begun = "", False
        for piece in _split(_decode(path, warn=warn)):
            if piece is None:
                index, blank, has_begun = index + has_begun, "", False
            elif not has_begun and not piece.strip():
                # white space is part of the document if text follows
                blank += piece
            elif piece:
                yield index, (blank + piece).encode()
                blank, has_begun = "", True
        index += has_begun


def _split(blocks: Iterator[str]) -> Iterator[str | None]:
    """Yield the text of `blocks` with each separator replaced by None, even one across blocks."""
    rest = ""
    for block in blocks:
        *whole, rest = (rest + block).split(SEPARATOR)
        for piece in whole:
            yield piece
            yield None
        # hold back what may be the beginning of a separator
        keep = len(SEPARATOR) - 1
        yield rest[:-keep]
        rest = rest[-keep:]
    yield rest


def _decode(path: Path, *, warn: bool) -> Iterator[str]:
    """Yield the text of `path` in blocks; with `warn`, warn about invalid UTF-8 at the end."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    replacement = "\ufffd"
    num_invalid, tail = 0, b""
    with open(path, "rb") as file:
        start = file.read(FIRST_BYTES)
        # without a mark, UTF-16 and UTF-32 have zeros: in every letter of English, in line ends
        marks = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE
        if start.startswith(marks) or b"\0" in start:
            raise ValueError(
                f"{path} must be UTF-8 text, but begins as UTF-16, UTF-32 or no text at all"
            )
        file.seek(0)
        while block := file.read(BLOCK_BYTES):
            text = decoder.decode(block)
            # U+FFFD that was in the file already is no error
            num_invalid += text.count(replacement) - (tail + block).count(replacement.encode())
            tail = (tail + block)[-2:]
            yield text
    text = decoder.decode(b"", final=True)
    num_invalid += text.count(replacement)
    yield text
    if warn and num_invalid:
        log.warning("%s: %s invalid UTF-8 sequences became U+FFFD", path, num_invalid)


def _name(files: list[Path]) -> str:
    return f"'{files[0]}'" if len(files) == 1 else f"folder '{os.path.commonpath(files)}'"


# Downloads that resume, checked against a known SHA-256


def download(file: RemoteFile, folder: Path, *, progress: Progress) -> Path:
    """Return the path of `file` in `folder`; download it with pooch unless it is there and intact.

    Received bytes are kept in `folder` under the file's name with ".part" until complete, so a
    broken download resumes there, at once or in the next call. `progress` is called with the bytes
    just received, those of an earlier part first.

    Raises:
        ConnectionError: the download failed; says where to put a copy by hand.
        ValueError: the received file has another SHA-256; it is deleted.
        OSError: the disk is full, or `folder` cannot be written.
    """
    # a third of a second to import, and most runs need no network
    import pooch
    import requests

    path, part = folder / file.name, folder / f"{file.name}.part"

    def fetch(url: str, output_path: str, _: object) -> None:
        _fetch(url, part, progress)
        os.replace(part, output_path)

    try:
        pooch.retrieve(
            file.url,
            known_hash=f"sha256:{file.sha256}",
            fname=file.name,
            path=folder,
            downloader=fetch,
        )
    except requests.RequestException as error:
        wrong = " The file that is there now is not the right one." if path.exists() else ""
        raise ConnectionError(
            f"cannot download {file.url} ({error}). Try again to resume, or get {file.name} on "
            f"another machine and put it into {folder.resolve()} ({file.num_bytes:,} bytes, "
            f"SHA-256 {file.sha256}).{wrong}"
        ) from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise no_space_error(error, part, file.num_bytes - _size(part)) from error
        raise
    return path


def _fetch(url: str, part: Path, progress: Progress) -> None:
    """Download the rest of `url` to `part`; retry as long as each attempt makes progress."""
    import requests

    progress(_size(part))
    while True:
        before = _size(part)
        try:
            return _append_rest(url, part, progress)
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            if _size(part) <= before:
                raise


def _append_rest(url: str, part: Path, progress: Progress) -> None:
    """Request what `part` lacks (HTTP range request, RFC 9110 section 14) and append it."""
    import requests

    have = _size(part)
    # a range counts bytes as sent: they must be those of the file, not compressed
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        if have and response.status_code == requests.codes.range_not_satisfiable:
            # nothing is left; if `part` is not the right file, its hash will show it
            return
        response.raise_for_status()
        resumed = response.status_code == requests.codes.partial_content
        if have and not resumed:
            progress(-have)
        with open(part, "ab" if resumed else "wb") as output:
            for block in response.iter_content(DOWNLOAD_BYTES):
                output.write(block)
                progress(len(block))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
