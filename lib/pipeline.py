"""The steps from text to a trained model, each skipped when its result is there already."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.config import TokenizeConfig, require
from lib.config_training import PipelineConfig
from lib.corpus import Corpus, prepare_corpus
from lib.files import make_folder, write_atomically
from lib.token_array import tokenize_file
from lib.tokenizer import SEPARATOR, Tokenizer, train_bpe

if TYPE_CHECKING:
    from lib.train import TrainResult

log = logging.getLogger(__name__)

Progress = Callable[[int], None]

# (what is done, bytes in all or None) -> a context that yields what is told the bytes just done
ProgressBar = Callable[[str, int | None], AbstractContextManager[Progress]]


def tokenize_corpus(config: TokenizeConfig, *, progress_bar: ProgressBar) -> list[dict[str, Any]]:
    """Corpus -> `tokenizer.json`, `train.npy` and `validation.npy` in `config.output_dir`.

    Each step is skipped when its result is there and was made from the same content.

    Returns:
        A row for each step, for a table: step, bytes of text, tokens, bytes_per_token, seconds,
        MB_per_s (None where nothing had to be done) and path.
    """
    with progress_bar("corpus", None) as progress:
        corpus = prepare_corpus(
            config.corpus,
            config.data_dir,
            num_bytes=config.corpus_bytes,
            seed=config.seed,
            validation_fraction=config.validation_fraction,
            progress=progress,
        )
    path = config.output_dir / "tokenizer.json"
    num_bytes = corpus.train.stat().st_size
    with progress_bar("tokenizer", num_bytes) as progress:
        meter = _Meter(progress)
        tokenizer = train_tokenizer(config, corpus, path, progress=meter)
        rows = [meter.row("tokenizer", num_bytes, tokenizer.vocab_size, path)]
    parts = {
        "train": (corpus.train, corpus.train_sha256),
        "validation": (corpus.validation, corpus.validation_sha256),
    }
    for part, (text_path, sha256) in parts.items():
        path = config.output_dir / f"{part}.npy"
        with progress_bar(part, text_path.stat().st_size) as progress:
            meter = _Meter(progress)
            manifest = tokenize_file(
                tokenizer,
                text_path,
                path,
                source_sha256=sha256,
                workers=config.workers,
                progress=meter,
            )
            rows.append(meter.row(part, manifest.source_bytes, manifest.num_tokens, path))
    return rows


def run_pipeline(
    config: PipelineConfig, *, progress_bar: ProgressBar
) -> tuple[list[dict[str, Any]], TrainResult, list[str]]:
    """Corpus -> tokenizer and token arrays -> training -> sampled text.

    Each step is skipped when its result is there and was made from the same content and settings.
    Ranks train together; rank 0 alone makes the data and the sample, which all ranks return.

    Returns:
        The rows of `tokenize_corpus` (none with `skip_data`), what became of the training, and each
        prompt with its continuation (none when the training was stopped).

    Raises:
        ValueError, OSError: as `tokenize_corpus`, `lib.train.train` and `lib.generate.load_model`;
            an empty prompt where the tokenizer has no `<|endoftext|>`.
    """
    from lib.generate import generate_sample, load_model
    from lib.ranks import on_each_rank, on_first_rank, patient_group
    from lib.train import train
    from lib.train_run import check_machine

    rows, training = [], config.train
    group = patient_group()
    # before a corpus is made, which may take long
    on_each_rank(lambda: check_machine(training))
    on_first_rank(lambda: make_folder(training.output or training.runs_dir))
    on_first_rank(lambda: _check_prompts(config))
    if not config.skip_data:
        make_data = partial(tokenize_corpus, config.corpus, progress_bar=progress_bar)
        rows = on_first_rank(make_data, group)
        training = dataclasses.replace(training, data=training.data or config.corpus.output_dir)
    result = train(training)
    if result.status == "stopped":
        return rows, result, []

    def sample() -> list[str]:
        model, tokenizer, _ = load_model(result.checkpoint, training.device)
        return generate_sample(model, tokenizer, config.sample)

    return rows, result, on_first_rank(sample, group)


def train_tokenizer(
    config: TokenizeConfig, corpus: Corpus, path: Path, *, progress: Progress
) -> Tokenizer:
    """The tokenizer at `path`, trained anew unless it was trained so from this very corpus.

    Raises:
        ValueError: the tokenizer at `path` was altered since it was trained.
        OSError: the folder of `path` cannot be written to; found out before the training.
    """
    source = {
        "corpus_sha256": corpus.train_sha256,
        "vocab_size": config.vocab_size,
        "special_tokens": list(config.special_tokens),
    }
    source_path = path.with_suffix(".source.json")
    if path.exists() and source_path.exists():
        tokenizer = Tokenizer.load(path, implementation=config.implementation)
        expected = json.dumps(source | {"tokenizer_sha256": tokenizer.sha256}, indent=2) + "\n"
        if source_path.read_bytes() == expected.encode():
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
    tokenizer.save(path)
    source |= {"tokenizer_sha256": tokenizer.sha256}
    write_atomically(source_path, json.dumps(source, indent=2) + "\n")
    return tokenizer


def _check_prompts(config: PipelineConfig) -> None:
    """Refuse an empty prompt where no `<|endoftext|>` can stand before the text to come."""
    special_tokens, data = config.corpus.special_tokens, config.train.data
    if all(config.sample.prompts):
        return
    if data is not None and (data / "tokenizer.json").exists():
        special_tokens = tuple(Tokenizer.load(data / "tokenizer.json").special_tokens)
    require(
        SEPARATOR in special_tokens,
        f"prompts has an empty text, but special_tokens is {special_tokens}; right is: texts that "
        f"are not empty, or {SEPARATOR} among the special tokens",
    )


class _Meter:
    """Passes progress on and times it; the first bytes told were done before and do not count."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.told, self.start = progress, [], time.perf_counter()

    def __call__(self, num_bytes: int) -> None:
        self.told.append(num_bytes)
        self.progress(num_bytes)

    def row(self, step: str, num_bytes: int, num_tokens: int, path: Path) -> dict[str, Any]:
        seconds = time.perf_counter() - self.start
        new_bytes = sum(self.told[1:])
        return {
            "step": step,
            "bytes": num_bytes,
            "tokens": num_tokens,
            "bytes_per_token": num_bytes / num_tokens
            if path.suffix == ".npy" and num_tokens
            else None,
            "seconds": seconds,
            "MB_per_s": new_bytes / 1e6 / seconds if new_bytes else None,
            "path": str(path),
        }
