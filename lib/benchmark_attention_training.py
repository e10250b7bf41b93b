"""The same training with different attention kernels: how far apart the losses come to lie.

Kernels add in another order, so no two runs stay equal to the last bit. What separates them must
be small beside what separates two seeds. `python -m lib.benchmark_attention_training` trains a
model of 4 layers on the embedded stories and writes `artifacts/attention_training.jsonl`, .md and
.png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.benchmark import run_sweep
from lib.config import TokenizeConfig
from lib.config_training import ModelConfig, OptimizerConfig, TrainConfig
from lib.files import write_atomically
from lib.hardware import pick_device
from lib.metrics import read_metrics
from lib.pipeline import tokenize_corpus
from lib.plots import house_figure, save_figure
from lib.report import Record, to_markdown
from lib.train import train

KERNELS = ("sdpa", "flash_attention_triton")
SEEDS = (0, 1)
MODEL = ModelConfig(context_length=256, d_model=512, num_layers=4, num_heads=8, d_ff=1344)
OPTIMIZER = OptimizerConfig(learning_rate=0.003, min_learning_rate=0.0003, warmup_steps=50)
# The curves are compared where the loss no longer falls fast.
SETTLED = 0.5


@dataclasses.dataclass(frozen=True)
class LossRun:
    """One training run."""

    model: ModelConfig = MODEL
    """With the attention kernel in it."""

    seed: int = 0
    """Of the first weights and the batches."""

    optimizer: OptimizerConfig = OPTIMIZER
    """Settings of AdamW and of the schedule."""

    steps: int = 500
    """Steps of the optimizer."""

    batch_size: int = 64
    """Sequences in a step."""

    corpus_bytes: int = 20_000_000
    """Of the embedded stories."""

    vocab_size: int = 4096
    """At most so many tokens are learned."""


def train_with_kernels(
    output: str | os.PathLike,
    *,
    run: LossRun = LossRun(),
    kernels: Sequence[str] = KERNELS,
    seeds: Sequence[int] = SEEDS,
    device: str = "auto",
) -> list[Record]:
    """Train as `run` says with each kernel and seed; write records, a table and a figure."""
    runs = [
        dataclasses.replace(
            run, model=dataclasses.replace(run.model, attention_kernel=kernel), seed=seed
        )
        for seed, kernel in itertools.product(seeds, kernels)
    ]
    path = Path(output, "attention_training.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        corpus = TokenizeConfig(
            corpus="stories",
            corpus_bytes=run.corpus_bytes,
            vocab_size=run.vocab_size,
            data_dir=Path(folder, "data"),
        )
        tokenize_corpus(corpus, progress_bar=lambda *_: contextlib.nullcontext(lambda _: None))

        def losses_of(run: LossRun) -> dict[str, Any]:
            return _train(run, corpus.output_dir, Path(folder), device)

        records = run_sweep(path, runs, losses_of, device=pick_device(device))
    write_training_report(records, output)
    return records


def _train(run: LossRun, data: Path, folder: Path, device: str) -> dict[str, Any]:
    config = TrainConfig(
        model=run.model,
        optimizer=run.optimizer,
        data=data,
        output=folder / f"{run.model.attention_kernel}-{run.seed}",
        steps=run.steps,
        batch_size=run.batch_size,
        seed=run.seed,
        device=device,
        eval_interval=0,
    )
    result = train(config)
    rows = [row for row in read_metrics(result.output / "metrics.jsonl") if "loss" in row]
    return {
        "steps": [row["step"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "validation_loss": result.evaluation.loss,
    }


def differences(records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each two runs that share the kernel or the seed: how far their losses are apart.

    Columns: first, second, the mean and the largest difference of the losses in the second half,
    and that of the losses on the validation text.
    """
    rows = []
    for one, other in itertools.combinations(records, 2):
        if kernel_of(one) != kernel_of(other) and seed_of(one) != seed_of(other):
            continue
        pairs = list(zip(one["figures"]["losses"], other["figures"]["losses"]))
        apart = [abs(a - b) for a, b in pairs[int(SETTLED * len(pairs)) :]]
        validation = [r["figures"]["validation_loss"] for r in (one, other)]
        rows.append(
            {
                "first": run_name(one),
                "second": run_name(other),
                "mean difference": statistics.mean(apart),
                "largest difference": max(apart),
                "validation difference": abs(validation[0] - validation[1]),
            }
        )
    return rows


def kernel_of(record: Record) -> str:
    """The attention kernel of a run."""
    return record["config"]["model"]["attention_kernel"]


def seed_of(record: Record) -> int:
    """The seed of a run."""
    return record["config"]["seed"]


def run_name(record: Record) -> str:
    """Of a run, for tables and legends."""
    return f"{kernel_of(record)}, seed {seed_of(record)}"


def write_training_report(records: Sequence[Record], output: str | os.PathLike) -> None:
    """Write `attention_training.md` and `.png` from records alone."""
    table = to_markdown(differences(records))
    device = records[0]["device"]
    title = "# Training with different attention kernels\n\n"
    intro = f"On {device}. Losses in nats per token, of the second half of the steps.\n\n"
    write_atomically(Path(output, "attention_training.md"), title + intro + table + "\n")
    save_loss_figure(records, Path(output, "attention_training.png"))


def save_loss_figure(records: Sequence[Record], path: str | os.PathLike) -> Path:
    """The losses of all runs, and how far runs of one seed are apart."""
    with house_figure(width=9, height=3.6, ncols=2) as (figure, (losses, apart)):
        styles = dict(zip(dict.fromkeys(map(kernel_of, records)), ("-", "--", ":", "-.")))
        first = {}
        for record in records:
            figures, color = record["figures"], f"C{seed_of(record)}"
            style = styles[kernel_of(record)]
            losses.plot(
                figures["steps"], figures["losses"], style, color=color, label=run_name(record)
            )
            before = first.setdefault(seed_of(record), record)
            if before is not record:
                gap = [abs(a - b) for a, b in zip(figures["losses"], before["figures"]["losses"])]
                apart.plot(figures["steps"], gap, color=color, label=f"seed {seed_of(record)}")
        losses.set(xlabel="step", ylabel="training loss (nats per token)", title="Loss")
        apart.set(xlabel="step", ylabel="nats per token", title="Between kernels, same seed")
        apart.set_ylim(bottom=0)
        for axes in (losses, apart):
            axes.legend(frameon=False, fontsize="small")
        return save_figure(figure, path)


if __name__ == "__main__":
    train_with_kernels(sys.argv[1] if len(sys.argv) > 1 else "artifacts")
