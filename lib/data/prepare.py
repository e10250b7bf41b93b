"""From a corpus to a tokenizer and token arrays; each step is skipped if its result is current."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le

from lib.core.files import lock_file, make_folder, write_atomically
from lib.core.settings import NonNegativeInt, PositiveInt, check, settings
from lib.data.corpus import Corpus, Progress, prepare_corpus
from lib.data.token_array import tokenize_file
from lib.tokenizer import files as tokenizer_files
from lib.tokenizer.bpe import Tokenizer, train_bpe
from lib.tokenizer.pretokenize import SEPARATOR

log = logging.getLogger(__name__)
# (step, total bytes or None) -> a context that yields a function to call with the bytes just done
ProgressBar = Callable[[str, int | None], AbstractContextManager[Progress]]


@settings
class TokenizeConfig:
    """From a corpus to a tokenizer and the token arrays that a model trains on."""

    corpus: str = "stories"
    """`stories` (generated here), `tinystories` (downloaded), or a UTF-8 text file or folder."""

    corpus_bytes: PositiveInt = 20_000_000
    """Bytes of `stories` to generate for training; other corpora are taken whole."""

    validation_fraction: Annotated[float, Gt(0), Le(0.5)] = 0.05
    """Fraction of the text held out for validation; `tinystories` has a validation part."""

    vocab_size: int = 4096
    """Number of token ids: 256 bytes, the merges, and the special tokens."""

    special_tokens: tuple[str, ...] = (SEPARATOR,)
    """Texts with a token id of their own, `<|endoftext|>` among them; merges never cross them."""

    seed: NonNegativeInt = 0
    """Seed of the generated stories."""

    data_dir: Path = Path("data")
    """Folder for generated and downloaded corpora."""

    output: Path | None = None
    """Folder for the tokenizer and the arrays (default: `DATA_DIR/CORPUS-VOCAB_SIZE`, and a hash
    for stories of another size or seed)."""

    workers: PositiveInt | None = None
    """Parallel workers (default: one per core). Any number gives the same result."""

    implementation: Literal["auto", "python", "numba"] = "auto"
    """`python` (readable), `numba` (compiled), or `auto`, which picks by size. Same result."""

    def __post_init__(self) -> None:
        num_special = len(self.special_tokens)
        smallest = 256 + num_special
        fits = f"at least 256 bytes + {num_special} special tokens = {smallest}"
        check(self, "corpus", self.corpus, "a corpus name, a text file or a folder")
        is_distinct = all(self.special_tokens) and len({*self.special_tokens}) == num_special
        check(self, "special_tokens", is_distinct, "distinct texts, none of them empty")
        check(self, "vocab_size", self.vocab_size >= smallest, fits)

    @property
    def output_dir(self) -> Path:
        """The folder that the tokenizer and the arrays go to."""
        name = f"{Path(self.corpus).resolve().stem or 'corpus'}-{self.vocab_size}"
        if self.corpus == "stories" and self._recipe() != TokenizeConfig()._recipe():
            # a folder for each recipe: notebooks of other sizes keep their arrays
            name += f"-{hashlib.sha256(repr(self._recipe()).encode()).hexdigest()[:8]}"
        return self.output or self.data_dir / name

    def _recipe(self) -> tuple[int, int, float]:
        """The settings that generated stories depend on."""
        return self.corpus_bytes, self.seed, self.validation_fraction


def tokenize_corpus(config: TokenizeConfig, *, progress_bar: ProgressBar) -> list[dict[str, Any]]:
    """Make `bpe.json`, `train.npy` and `validation.npy` in `config.output_dir`.

    A step is skipped if its result exists and was made from the same content. Where the folder has
    its default name and holds the results of another corpus or other settings, these are kept: it
    is renamed to `NAME-earlier`, `NAME-earlier-2`, …

    Returns:
        A table row for each step: step, bytes of text, tokens, bytes_per_token, seconds, MB_per_s
        (None if nothing had to be done) and path.

    Raises:
        ValueError: `<|endoftext|>` is not among the special tokens: it would be encoded as ordinary
            text. Or `config.output` is the folder of a model, or has a tokenizer or array that this
            function did not make, which would be replaced.
    """
    # a run has run.json from its first step on, an exported model config.json
    is_model = any((config.output_dir / name).exists() for name in ("run.json", "config.json"))
    check(config, "output", not is_model, "a folder that holds no model")
    expected = f"a list with {SEPARATOR!r}, which stands between documents"
    check(config, "special_tokens", SEPARATOR in config.special_tokens, expected)
    with progress_bar("corpus", None) as progress:
        corpus = prepare_corpus(
            config.corpus,
            config.data_dir,
            num_bytes=config.corpus_bytes,
            seed=config.seed,
            validation_fraction=config.validation_fraction,
            progress=progress,
        )

    num_bytes = corpus.train.stat().st_size
    # notebooks that run at the same time make it once
    with progress_bar("tokenizer", num_bytes) as progress, lock_file(config.output_dir):
        timer = _Timer(progress)
        if config.output is None:
            keep_earlier(config, corpus)
        else:
            check_made_here(config.output)
        path = tokenizer_files.find(config.output_dir)
        tokenizer = train_tokenizer(config, corpus, path, progress=timer)
        rows = [timer.row("tokenizer", num_bytes, tokenizer.vocab_size, path)]

    for part in ("train", "validation"):
        text_path, sha256 = getattr(corpus, part), getattr(corpus, f"{part}_sha256")
        path = config.output_dir / f"{part}.npy"
        with progress_bar(part, text_path.stat().st_size) as progress:
            timer = _Timer(progress)
            manifest = tokenize_file(
                tokenizer,
                text_path,
                path,
                source_sha256=sha256,
                workers=config.workers,
                progress=timer,
            )
            row = timer.row(part, manifest.source_bytes, manifest.num_tokens, path)
            if manifest.num_tokens:
                row["bytes_per_token"] = manifest.source_bytes / manifest.num_tokens
            rows.append(row)
    return rows


def keep_earlier(config: TokenizeConfig, corpus: Corpus) -> None:
    """Rename the output folder if its contents come from another corpus or other settings."""
    folder = config.output_dir
    path = tokenizer_files.find(folder)
    if not path.exists() and not any(folder.glob("*.npy")):
        return
    if _source(config, corpus).items() <= _made_from(path).items():
        return
    for number in itertools.count(1):
        earlier = folder.with_name(f"{folder.name}-earlier" + (f"-{number}" if number > 1 else ""))
        if not earlier.exists():
            folder.rename(earlier)
            log.warning("%s held results of another text; they are now in %s", folder, earlier)
            return


def check_made_here(folder: Path) -> None:
    """Refuse a folder with a tokenizer or arrays that have no record of how they were made."""
    path = tokenizer_files.find(folder)
    unknown = [path] if path.exists() and not _made_from(path) else []
    for part in ("train", "validation"):
        array = folder / f"{part}.npy"
        if array.exists() and not array.with_suffix(".npy.json").exists():
            unknown.append(array)
    if unknown:
        raise ValueError(
            f"output must be a folder that `tokenize` made, or a new one, got {folder}: nothing "
            f"says how {unknown[0].name} was made"
        )


def _made_from(path: Path) -> dict[str, Any]:
    """The source of the tokenizer at `path`; {} without a record, or with another's."""
    try:
        record = json.loads(path.with_suffix(".source.json").read_bytes())
        is_its_own = record["tokenizer_sha256"] == json.loads(path.read_bytes())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return record if is_its_own else {}


def train_tokenizer(
    config: TokenizeConfig, corpus: Corpus, path: Path, *, progress: Progress
) -> Tokenizer:
    """Return the tokenizer at `path`; train it first unless it came from this corpus and config.

    Raises:
        ValueError: the tokenizer at `path` was altered since it was trained.
        OSError: the folder of `path` cannot be written to; raised before the training.
    """
    source = _source(config, corpus)
    if path.exists():
        tokenizer = Tokenizer.load(path, implementation=config.implementation)
        if source.items() <= _made_from(path).items():
            log.info("%s is up to date", path)
            progress(corpus.train.stat().st_size)
            return tokenizer

    make_folder(path.parent)
    progress(0)
    vocab, merges = train_bpe(
        corpus.train,
        config.vocab_size,
        config.special_tokens,
        implementation=config.implementation,
        workers=config.workers,
        progress=progress,
    )
    tokenizer = Tokenizer(
        vocab, merges, config.special_tokens, implementation=config.implementation
    )
    # first its record: a tokenizer without one is not replaced
    record = source | {"tokenizer_sha256": tokenizer.sha256}
    write_atomically(path.with_suffix(".source.json"), json.dumps(record, indent=2) + "\n")
    tokenizer.save(path)
    return tokenizer


def _source(config: TokenizeConfig, corpus: Corpus) -> dict[str, Any]:
    """Return the facts that determine a tokenizer: text, size and special tokens.

    With the tokenizer's own hash, this is the content of `bpe.source.json`.
    """
    return {
        "corpus_sha256": corpus.train_sha256,
        "vocab_size": config.vocab_size,
        "special_tokens": list(config.special_tokens),
    }


class _Timer:
    """Passes progress on and times it; the first call reports bytes done earlier, not counted."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.calls, self.start = progress, [], time.perf_counter()

    def __call__(self, num_bytes: int) -> None:
        self.calls.append(num_bytes)
        self.progress(num_bytes)

    def row(self, step: str, num_bytes: int, num_tokens: int, path: Path) -> dict[str, Any]:
        """Return the table row of a step that has just ended."""
        seconds = time.perf_counter() - self.start
        new_bytes = sum(self.calls[1:])
        return {
            "step": step,
            "bytes": num_bytes,
            "tokens": num_tokens,
            "bytes_per_token": None,
            "seconds": seconds,
            "MB_per_s": new_bytes / 1e6 / seconds if new_bytes else None,
            "path": str(path),
        }
