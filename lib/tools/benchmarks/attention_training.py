"""The same training with different attention kernels: how far apart the losses end up.

Kernels add in different orders, so no two runs stay equal to the last bit. In the end they may be
as far apart as two seeds are; at first they must be closer.

`python -m lib benchmark attention-training` trains a model, of 4 layers by default, on generated
stories and writes attention_training.jsonl, .md and .png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd

from lib.core.figures import house_figure, save_figure
from lib.core.hardware import DtypeName, local_results, pick_device
from lib.core.records import Record
from lib.core.settings import NonEmpty, PositiveInt, settings
from lib.data.prepare import TokenizeConfig, tokenize_corpus
from lib.model.config import AttentionKernel, ModelConfig, PresetName, model_preset
from lib.tools.benchmarks.sections import Section, Table, to_rows, write_report
from lib.tools.benchmarks.sweep import run_sweep
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.loop import train
from lib.training.metrics import read_metrics

MODEL = ModelConfig(context_length=256, d_model=512, num_layers=4, num_heads=8, d_ff=1344)
OPTIMIZER = OptimizerConfig(learning_rate=0.003, min_learning_rate=0.0003, warmup_steps=50)


@dataclasses.dataclass(frozen=True)
class LossRun:
    """One training run."""

    model: ModelConfig = MODEL
    """The model, with its attention kernel."""

    seed: int = 0
    """Seed of the initial weights and the batches."""

    optimizer: OptimizerConfig = OPTIMIZER
    """Settings of AdamW and the learning rate schedule."""

    steps: int = 300
    """Optimizer steps."""

    batch_size: int = 64
    """Sequences per step."""

    corpus_bytes: int = 20_000_000
    """Size of the corpus, which is generated."""

    vocab_size: int = 4096
    """Largest vocabulary."""

    dtype: DtypeName = "auto"
    """Dtype of activations and matmuls; with `float16` the loss is scaled."""


@settings
class AttentionTrainingConfig:
    """The same training with different attention kernels."""

    kernels: Annotated[tuple[AttentionKernel, ...], NonEmpty] = ("sdpa", "flash_attention_triton")
    """Kernels to compare; `flash_attention_triton` needs a GPU."""

    seeds: Annotated[tuple[int, ...], NonEmpty] = (0, 1, 2, 3, 4, 5)
    """Seeds of the initial weights and the batches: a run of each kernel with each."""

    preset: PresetName | None = None
    """The model; None: 4 layers of width 512."""

    steps: PositiveInt = 300
    """Optimizer steps."""

    dtype: DtypeName = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, table and figure."""


def train_with_kernels(config: AttentionTrainingConfig, run: LossRun = LossRun()) -> list[Record]:
    """Train `run` with each kernel and seed; write records, tables and a figure."""
    run = dataclasses.replace(
        run,
        model=model_preset(config.preset) if config.preset else run.model,
        steps=config.steps,
        dtype=config.dtype,
    )
    runs = [
        dataclasses.replace(
            run, model=dataclasses.replace(run.model, attention_kernel=kernel), seed=seed
        )
        for seed, kernel in itertools.product(config.seeds, config.kernels)
    ]
    with tempfile.TemporaryDirectory() as folder:
        corpus = TokenizeConfig(
            corpus="stories",
            corpus_bytes=run.corpus_bytes,
            vocab_size=run.vocab_size,
            data_dir=Path(folder, "data"),
        )
        tokenize_corpus(corpus, progress_bar=lambda *_: contextlib.nullcontext(lambda _: None))
        path = config.output / "attention_training.jsonl"
        records = run_sweep(
            path,
            runs,
            lambda run: _train(run, corpus.output_dir, Path(folder), config.device),
            device=pick_device(config.device),
        )
    write_training_report(records, config.output)
    return records


def _train(run: LossRun, data: Path, folder: Path, device: str) -> dict[str, Any]:
    """The training losses of a run, as often as they are logged, and its final validation loss."""
    config = TrainConfig(
        model=run.model,
        optimizer=run.optimizer,
        data=data,
        output=folder / f"{run.model.attention_kernel}-{run.seed}",
        steps=run.steps,
        batch_size=run.batch_size,
        seed=run.seed,
        device=device,
        dtype=run.dtype,
        eval_interval=0,
        checkpointing_interval=0,
    )
    result = train(config)
    rows = [row for row in read_metrics(result.output / "metrics.jsonl") if "loss" in row]
    return {
        "steps": [row["step"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "validation_loss": result.evaluation.loss,
    }


def final_losses(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Mean and standard deviation of the final validation loss over seeds, for each kernel."""
    frame = pd.DataFrame(
        {"kernel": kernel_of(record), "loss": record["figures"]["validation_loss"]}
        for record in records
    )
    losses = frame.groupby("kernel", sort=False)["loss"]
    table = losses.agg(**{"seeds": "count", "validation loss": "mean", "standard deviation": "std"})
    return to_rows(table.reset_index())


def differences(records: Sequence[Record]) -> list[dict[str, Any]]:
    """How far apart two runs are that differ only in the kernel, or only in the seed.

    Mean absolute differences, over all such pairs, of the training losses in the first and in the
    second half of the steps, and of the final validation losses.
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
        gaps = np.abs([np.subtract(a["losses"], b["losses"]) for a, b in pairs])  # (pairs, steps)
        half = gaps.shape[1] // 2
        validation = [abs(a["validation_loss"] - b["validation_loss"]) for a, b in pairs]
        rows.append(
            {
                "another": what,
                "pairs": len(pairs),
                "first half": float(gaps[:, :half].mean()),
                "second half": float(gaps[:, half:].mean()),
                "validation": float(np.mean(validation)),
            }
        )
    return rows


def kernel_of(record: Record) -> str:
    """The attention kernel of a run."""
    return record["config"]["model"]["attention_kernel"]


def seed_of(record: Record) -> int:
    """The seed of a run."""
    return record["config"]["seed"]


def write_training_report(records: Sequence[Record], output: Path) -> None:
    """Write attention_training.md and .png from records."""
    run = records[0]["config"]
    parts: list[str | Table] = [
        f"On {records[0]['device']}: {run['steps']} steps of {run['model']['num_layers']} layers, "
        f"width {run['model']['d_model']}, dtype {run.get('dtype', 'auto')}; losses in nats per "
        "token.",
        Table(final_losses(records)),
        "How far apart two runs are that differ in one thing only, averaged over all pairs:",
        Table(differences(records)),
    ]
    title = "Training with different attention kernels"
    write_report(output / "attention_training.md", [Section(title, parts, level=1)])
    save_loss_figure(records, output / "attention_training.png")


def save_loss_figure(records: Sequence[Record], path: str | os.PathLike) -> Path:
    """Draw the training losses of all runs and their final validation losses, a point per seed."""
    kernels = list(dict.fromkeys(map(kernel_of, records)))
    with house_figure(width=9, height=3.6, ncols=2) as (figure, (losses, last)):
        for record in records:
            figures, index = record["figures"], kernels.index(kernel_of(record))
            style = {"color": f"C{index}", "alpha": 0.7}
            is_first = seed_of(record) == seed_of(records[0])
            label = kernel_of(record) if is_first else None
            losses.plot(figures["steps"], figures["losses"], marker="", label=label, **style)
            last.plot(index, figures["validation_loss"], "o", **style)
        losses.set(xlabel="step", ylabel="nats per token", title="Training loss")
        losses.legend(frameon=False)
        last.set(xlabel="kernel", ylabel="nats per token", title="Validation loss at the end")
        last.set_xticks(range(len(kernels)), kernels)
        last.margins(x=0.5)
        return save_figure(figure, path)
