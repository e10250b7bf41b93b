"""The same training with different attention kernels: how far apart the losses come to lie.

Kernels add in another order, so no two runs stay equal to the last bit. What separates them in the
end must be as much as separates two seeds, and less at first.
`python -m lib.benchmark_attention_training` trains a model of 4 layers on the embedded stories and
writes `artifacts/attention_training.jsonl`, .md and .png.
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
SEEDS = (0, 1, 2, 3, 4, 5)
MODEL = ModelConfig(context_length=256, d_model=512, num_layers=4, num_heads=8, d_ff=1344)
OPTIMIZER = OptimizerConfig(learning_rate=0.003, min_learning_rate=0.0003, warmup_steps=50)


@dataclasses.dataclass(frozen=True)
class LossRun:
    """One training run."""

    model: ModelConfig = MODEL
    """With the attention kernel in it."""

    seed: int = 0
    """Of the first weights and the batches."""

    optimizer: OptimizerConfig = OPTIMIZER
    """Settings of AdamW and of the schedule."""

    steps: int = 300
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


def final_losses(records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each kernel, over its seeds: mean and standard deviation of the last validation loss."""
    rows = []
    for kernel in dict.fromkeys(map(kernel_of, records)):
        losses = [r["figures"]["validation_loss"] for r in records if kernel_of(r) == kernel]
        rows.append(
            {
                "kernel": kernel,
                "seeds": len(losses),
                "validation loss": statistics.mean(losses),
                "standard deviation": statistics.stdev(losses) if len(losses) > 1 else None,
            }
        )
    return rows


def differences(records: Sequence[Record]) -> list[dict[str, Any]]:
    """How far two runs are apart that differ in the kernel alone, or in the seed alone.

    Means over all such pairs, of the differences of their training losses in the first and in the
    second half of the steps, and of their last losses on the validation text.
    """
    rows = []
    for what, same, other in (("kernel", seed_of, kernel_of), ("seed", kernel_of, seed_of)):
        pairs = [
            (a["figures"], b["figures"])
            for a, b in itertools.combinations(records, 2)
            if same(a) == same(b) and other(a) != other(b)
        ]
        if not pairs:
            continue
        gaps = [[abs(x - y) for x, y in zip(a["losses"], b["losses"])] for a, b in pairs]
        rows.append(
            {
                "another": what,
                "pairs": len(pairs),
                "first half": statistics.mean(x for gap in gaps for x in gap[: len(gap) // 2]),
                "second half": statistics.mean(x for gap in gaps for x in gap[len(gap) // 2 :]),
                "validation": statistics.mean(
                    abs(a["validation_loss"] - b["validation_loss"]) for a, b in pairs
                ),
            }
        )
    return rows


def kernel_of(record: Record) -> str:
    """The attention kernel of a run."""
    return record["config"]["model"]["attention_kernel"]


def seed_of(record: Record) -> int:
    """The seed of a run."""
    return record["config"]["seed"]


def write_training_report(records: Sequence[Record], output: str | os.PathLike) -> None:
    """Write `attention_training.md` and `.png` from records alone."""
    device = records[0]["device"]
    text = f"# Training with different attention kernels\n\nOn {device}; losses in nats per token."
    text += f"\n\n{to_markdown(final_losses(records))}\n"
    text += (
        "How far two runs are apart that differ in one thing alone, in the mean of all pairs:\n\n"
    )
    write_atomically(
        Path(output, "attention_training.md"), text + to_markdown(differences(records))
    )
    save_loss_figure(records, Path(output, "attention_training.png"))


def save_loss_figure(records: Sequence[Record], path: str | os.PathLike) -> Path:
    """The losses of all runs, and the last one of each on the validation text: a point a seed."""
    kernels = list(dict.fromkeys(map(kernel_of, records)))
    with house_figure(width=9, height=3.6, ncols=2) as (figure, (losses, last)):
        for record in records:
            figures, place = record["figures"], kernels.index(kernel_of(record))
            look = {"color": f"C{place}", "alpha": 0.7}
            is_first = seed_of(record) == seed_of(records[0])
            label = kernel_of(record) if is_first else None
            losses.plot(figures["steps"], figures["losses"], marker="", label=label, **look)
            last.plot(place, figures["validation_loss"], "o", **look)
        losses.set(xlabel="step", ylabel="nats per token", title="Training loss")
        losses.legend(frameon=False)
        last.set(
            xlabel="kernel",
            ylabel="nats per token",
            title="Validation loss at the end",
        )
        last.set_xticks(range(len(kernels)), kernels)
        last.margins(x=0.5)
        return save_figure(figure, path)


if __name__ == "__main__":
    train_with_kernels(sys.argv[1] if len(sys.argv) > 1 else "artifacts")
