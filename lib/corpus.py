"""Corpora: generated stories, TinyStories from the Hugging Face hub, or the user's own text.

Each becomes two UTF-8 files, train and validation, with documents separated by `<|endoftext|>`, and
a `corpus.json` beside them that says what they were made from and holds the SHA-256 of each. Files
that are whole and up to date are left as they are; altered ones are noticed and made again.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lib.corpus_download import RemoteFile, download
from lib.corpus_text import find_text_files, split_own_text
from lib.files import atomic_write, sha256_file, write_atomically
from lib.stories import GENERATOR_VERSION, SEPARATOR, SPLITS, generate_stories

__all__ = ["SEPARATOR", "TINYSTORIES", "Corpus", "generate_stories", "prepare_corpus"]

Progress = Callable[[int], None]

# the revision is pinned, so that the bytes cannot change under the hashes
_TINYSTORIES_URL = (
    "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
    "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/"
)
TINYSTORIES = {
    "train": RemoteFile(
        url=_TINYSTORIES_URL + "TinyStoriesV2-GPT4-train.txt",
        num_bytes=2_227_753_162,
        sha256="6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
    ),
    "validation": RemoteFile(
        url=_TINYSTORIES_URL + "TinyStoriesV2-GPT4-valid.txt",
        num_bytes=22_502_601,
        sha256="6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
    ),
}


@dataclass(frozen=True)
class Corpus:
    """Two text files to train and to validate on."""

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
    """Make the train and validation files of a corpus below `data_dir`, unless they are there.

    Args:
        source: "stories" (generated, see `lib/stories.py`), "tinystories" (downloaded, 2.2 GB), or
            the path of a UTF-8 text file or of a folder of them (see `lib/corpus_text.py` for what
            counts as a document and what happens to invalid bytes). A file or folder that is named
            like one of the first two is meant by "./stories".
        data_dir: the folder to write to; a folder of the corpus's name is made inside.
        num_bytes: size of the training part of "stories"; the others are taken whole.
        seed: which stories.
        validation_fraction: size of the validation part: beside `num_bytes` for "stories", of the
            whole for the user's own text; TinyStories has a validation part of its own.
        progress: called with the number of bytes just written, downloaded or read.

    Raises:
        FileNotFoundError: `source` does not exist, or is a folder without text files.
        ValueError: an argument is out of range, or the text is empty or too short to split.
        OSError: `data_dir` cannot be written, the disk is full, or a download failed.
    """
    if not 0 < validation_fraction <= 0.5:
        raise ValueError(
            f"validation_fraction {validation_fraction} must be more than 0 and at most 0.5"
        )
    data_dir = Path(data_dir)
    progress = progress or (lambda num_bytes: None)
    if source == "tinystories":
        return _prepare_tinystories(data_dir, progress)
    if source == "stories":
        return _prepare_stories(data_dir, num_bytes, seed, validation_fraction, progress)
    return _prepare_own_text(Path(source), data_dir, validation_fraction, progress)


def _prepare_stories(
    data_dir: Path, num_bytes: int, seed: int, validation_fraction: float, progress: Progress
) -> Corpus:
    sizes = {"train": num_bytes, "validation": max(1, round(num_bytes * validation_fraction))}
    parts = {split: generate_stories(size, seed=seed, split=split) for split, size in sizes.items()}
    recipe = {"source": "stories", "version": GENERATOR_VERSION, "seed": seed, "num_bytes": sizes}
    # a folder for each recipe: two notebooks with other sizes do not overwrite each other's text
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
    recipe = {
        "source": str(source.resolve()),
        "validation_fraction": validation_fraction,
        "files": [[str(file), file.stat().st_size, sha256_file(file)] for file in files],
    }
    # the hash keeps apart files of the same name in different folders
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


def _prepare_tinystories(data_dir: Path, progress: Progress) -> Corpus:
    folder = _make_folder(data_dir / "tinystories")
    paths = {split: download(TINYSTORIES[split], folder, progress=progress) for split in SPLITS}
    hashes = {f"{split}_sha256": TINYSTORIES[split].sha256 for split in SPLITS}
    return Corpus(folder.name, **paths, **hashes)


def _make_unless_current(
    folder: Path, recipe: dict, write: Callable[[dict[str, Path]], None]
) -> Corpus:
    """Return the corpus in `folder`; `write` makes it when it is not what `recipe` asks for."""
    paths = {split: folder / f"{split}.txt" for split in SPLITS}
    record_path = folder / "corpus.json"
    record = {"recipe": recipe, "sha256": _hashes(paths)}
    if None in record["sha256"].values() or _read_json(record_path) != record:
        _make_folder(folder)
        record_path.unlink(missing_ok=True)
        write(paths)
        record["sha256"] = _hashes(paths)
        write_atomically(record_path, json.dumps(record, indent=2) + "\n")
    hashes = {f"{split}_sha256": record["sha256"][split] for split in SPLITS}
    return Corpus(folder.name, **paths, **hashes)


def _hashes(paths: dict[str, Path]) -> dict[str, str | None]:
    return {split: sha256_file(path) if path.is_file() else None for split, path in paths.items()}


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno, f"data_dir {folder.parent} cannot be written ({error.strerror})"
        ) from error
    return folder


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
