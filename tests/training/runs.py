"""Small training runs: their data and settings, what they leave, and what is done to them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from lib.core.settings import to_json
from lib.data.prepare import TokenizeConfig, tokenize_corpus
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.pretokenize import SEPARATOR
from lib.training.checkpoint import load_checkpoint, save_checkpoint
from lib.training.config import OptimizerConfig, PipelineConfig, SampleConfig, TrainConfig
from lib.training.metrics import read_metrics
from lib.training.step import TrainStep
from tests.data.books import book_config, silent

ROOT = Path(__file__).resolve().parents[2]
# A tokenizer without merges.
BYTES = Tokenizer({i: bytes([i]) for i in range(256)}, [], [SEPARATOR])
# What a clock decides.
CLOCK = ("seconds", "tokens_per_s", "mfu")
MODEL = ModelConfig(context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=4)
# None of the intervals divides another, so that a checkpoint falls between two lines of metrics.
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    steps=26,
    batch_size=4,
    device="cpu",
    deterministic=True,
    log_interval=4,
    eval_interval=10,
    eval_tokens=200,
    checkpointing_interval=3,
)


def tokenized(folder: Path, **changes) -> Path:
    """The folder of 200 kB of stories as tokens."""
    settings = {
        "corpus_bytes": 200_000,
        "vocab_size": 300,
        "validation_fraction": 0.1,
        "workers": 1,
        "implementation": "python",
    }
    output = folder / "tokens"
    config = TokenizeConfig(data_dir=folder, output=output, **(settings | changes))
    tokenize_corpus(config, progress_bar=silent)
    return output


def small_pipeline(folder: Path, *prompts: str, **training) -> PipelineConfig:
    """A pipeline of a second, from a book in `folder` to texts after these prompts."""
    settings = {"steps": 8, "batch_size": 2, "device": "cpu", "eval_tokens": 50}
    settings |= {"model": MODEL, "optimizer": OptimizerConfig(warmup_steps=2)}
    return PipelineConfig(
        corpus=book_config(folder),
        train=TrainConfig(**(settings | training)),
        sample=SampleConfig(prompts=prompts, max_new_tokens=6),
    )


def saved_run(folder: Path, models: dict[int, TransformerLM]) -> Path:
    """The folder of a run, with a checkpoint of each model at its step and the tokenizer BYTES."""
    for step, model in models.items():
        save_checkpoint(folder / "checkpoints", step=step, model=model)
    (folder / "config.json").write_text(to_json(TrainConfig(model=model.config)))
    BYTES.save(folder / "bpe.json")
    return folder


def signals_at(step: int, *numbers: int) -> Callable[[dict], None]:
    """A callback that sends this process signals with the first line of metrics from `step` on."""
    numbers = list(numbers)

    def on_metrics(record):
        while record["step"] >= step and numbers:
            os.kill(os.getpid(), numbers.pop(0))

    return on_metrics


@contextlib.contextmanager
def before_step(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before the optimizer step of that number."""
    call, taken = TrainStep.__call__, []

    def step(self, *args):
        taken.append(1)
        if len(taken) == number:
            act()
        call(self, *args)

    with mock.patch.object(TrainStep, "__call__", step):
        yield


def lines(folder: Path) -> list[dict]:
    """The lines of metrics, without what a clock decides."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def final_state(folder: Path, step: int) -> list:
    """The bytes of the last checkpoint's weights and optimizer, and what else a step depends on."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    names = "model.safetensors", "shard-00000-of-00001.safetensors"
    tensors = load_checkpoint(path).tensors
    return [
        *((path / name).read_bytes() for name in names),
        *(float(tensors[name]) for name in ("loss_scale", "good_steps")),
    ]


def assert_same_run(folder: Path, expected: Path, step: int = CONFIG.steps) -> None:
    """Weights and optimizer have the same bits, and the metrics the same lines."""
    # not compared by pytest, which would show the bytes
    assert (final_state(folder, step) == final_state(expected, step)) is True
    assert lines(folder) == lines(expected)


def assert_close_run(folder: Path, expected: Path) -> None:
    """Weights and metrics are equal up to rounding."""
    weights, others = (
        load_file(load_checkpoint(path / "checkpoints").path / "model.safetensors")
        for path in (folder, expected)
    )
    for name, weight in weights.items():
        assert_close(weight, others[name], rtol=1e-3, atol=1e-5)
    for one, other in zip(lines(folder), lines(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
