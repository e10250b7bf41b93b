"""The commands that train, and continue texts: what they print. Everything heavy is loaded late."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.data.prepare import TokenizeConfig
from lib.training.config import (
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    PipelineConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from lib.training.loop import TrainResult

BOLD, PLAIN = "\033[1m", "\033[0m"


def tokenize(config: TokenizeConfig) -> None:
    """Make tokenizer and token arrays, and print what of."""
    from lib.core.terminal import progress_bar
    from lib.data.prepare import tokenize_corpus

    _print_corpus(tokenize_corpus(config, progress_bar=progress_bar))


def pipeline(config: PipelineConfig) -> int:
    """Run all steps, and print what each made; return the exit code."""
    from lib.core.terminal import progress_bar
    from lib.training.pipeline import run_pipeline

    rows, result, texts = run_pipeline(config, progress_bar=progress_bar)
    if _is_first_rank():
        if rows:
            _print_corpus(rows)
        _print_training(result)
        if texts:
            print()
            print_stories(config.sample.prompts, texts)
    return exit_code(result)


def train(config: TrainConfig) -> int:
    """Train, and print how that ended; return the exit code."""
    from lib.training import loop

    result = loop.train(config)
    if _is_first_rank():
        _print_training(result)
    return exit_code(result)


def generate(config: GenerateConfig) -> None:
    """Print the prompts with their continuations; one alone token by token, on a terminal."""
    from lib.training.generation import generate_text, load_model, newest_run

    model, tokenizer, _ = load_model(config.checkpoint or newest_run(), config.device)
    prompts, options = config.sample.prompts, config.sample.options()
    if len(prompts) > 1 or not sys.stdout.isatty():
        texts = generate_text(model, tokenizer, prompts, **options)
        print_stories(prompts, [prompt + text for prompt, text in zip(prompts, texts)])
        return
    story = StoryPrinter(prompts[0])
    generate_text(model, tokenizer, prompts, on_text=lambda row, text: story.write(text), **options)
    story.close()


def export(config: ExportConfig) -> Path:
    from lib.training.interchange import export_run

    return export_run(config)


def import_(config: ImportConfig) -> Path:
    from lib.training.interchange import import_model

    return import_model(config)


class StoryPrinter:
    """Prints a story on the terminal as it comes: the prompt in bold, lines broken between words.

    A word is held back until the white space after it shows that it is whole.
    """

    def __init__(self, prompt: str, width: int | None = None) -> None:
        self.width = width or shutil.get_terminal_size().columns
        self.column, self.word = 0, ""
        sys.stdout.write(BOLD)
        self.write(prompt)
        self._end_word()
        sys.stdout.write(PLAIN)

    def write(self, text: str) -> None:
        """Print what is whole of the words so far."""
        for char in text:
            if not char.isspace():
                self.word += char
                continue
            self._end_word()
            self.column = 0 if char == "\n" else self.column + 1
            sys.stdout.write(char)
        sys.stdout.flush()

    def close(self) -> None:
        """Print what was held back, and end the line."""
        self._end_word()
        print(flush=True)

    def _end_word(self) -> None:
        if self.column and self.column + len(self.word) > self.width:
            sys.stdout.write("\n")
            self.column = 0
        sys.stdout.write(self.word)
        self.column, self.word = self.column + len(self.word), ""


def print_stories(prompts: tuple[str, ...], texts: list[str]) -> None:
    """Print `texts`, each beginning with its prompt; as they are where there is no terminal."""
    if not sys.stdout.isatty():
        print("\n\n".join(texts))
        return
    for index, (prompt, text) in enumerate(zip(prompts, texts)):
        print("\n" * (index > 0), end="")
        story = StoryPrinter(prompt)
        story.write(text.removeprefix(prompt))
        story.close()


def _print_corpus(rows: list[dict[str, Any]]) -> None:
    """Print the table of what was made of a corpus."""
    from lib.core.records import to_markdown

    names = {"bytes_per_token": "bytes/token", "MB_per_s": "MB/s"}
    print(to_markdown(rows, {key: names.get(key, key) for key in rows[0]}), end="")


def _print_training(result: TrainResult) -> None:
    """Print how a training run ended, and its last evaluation."""
    from lib.training.metrics import last_evaluation, read_metrics

    print(f"{result.status} at step {result.step}: {result.output}")
    last = last_evaluation(read_metrics(result.output / "metrics.jsonl"))
    if last is not None:
        print(
            f"validation loss {last['validation_loss']:.4f}, "
            f"perplexity {last['validation_perplexity']:.2f}, "
            f"{last['validation_bits_per_byte']:.4f} bits per byte"
        )
    if result.status == "stopped":
        print("the same command continues from here")
    # what `wandb sync` has uploaded has a mark
    stored = sorted((result.output / "wandb").glob("offline-run-*"))
    waiting = [str(folder) for folder in stored if not any(folder.glob("*.synced"))]
    if waiting:
        print(f"upload to W&B: wandb sync {' '.join(waiting)}")
    if (result.output / "tensorboard").exists():
        print(f"look at it: tensorboard --logdir {result.output / 'tensorboard'}")


def exit_code(result: TrainResult) -> int:
    """130, as after an interruption, if a training run was stopped.

    Under `torchrun` 0: it would take anything else for a failure and restart it.
    """
    return 130 if result.status == "stopped" and "RANK" not in os.environ else 0


def _is_first_rank() -> bool:
    """Whether this process is alone, or the first of those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"
