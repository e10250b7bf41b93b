"""The commands that train, and continue texts: what they print. Everything heavy is loaded late."""

from __future__ import annotations

import os
import shlex
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
            prompts = config.sample.prompts
            stories = [text.removeprefix(prompt) for prompt, text in zip(prompts, texts)]
            print_stories(prompts, stories)
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
        print_stories(prompts, generate_text(model, tokenizer, prompts, **options))
        return
    show = lambda row, text: print(text, end="", flush=True)  # noqa: E731
    show(0, _bold(prompts[0]))
    generate_text(model, tokenizer, prompts, on_text=show, **options)
    print()


def export(config: ExportConfig) -> Path:
    from lib.training.interchange import export_run

    return export_run(config)


def import_(config: ImportConfig) -> Path:
    from lib.training.interchange import import_model

    return import_model(config)


def print_stories(prompts: tuple[str, ...], texts: list[str]) -> None:
    """Print each prompt with the text that continues it; on a terminal the prompts are bold."""
    print("\n\n".join(_bold(prompt) + text for prompt, text in zip(prompts, texts)))


def _bold(text: str) -> str:
    return f"{BOLD}{text}{PLAIN}" if sys.stdout.isatty() else text


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
        print(f"upload to W&B: wandb sync {shlex.join(waiting)}")
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
