"""Ablations of notebook 02: the same short training run with one thing changed, for three seeds.

`python -m lib lessons ablation` trains all of them and adds their losses to
artifacts/ablation.jsonl. An interrupted run continues.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records, remaining
from lib.lessons.training import short_run
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.optimizer.adamw import AdamW

RECORDS = ROOT / "artifacts/ablation.jsonl"
AS_BUILT = "as built"
SHAPE = ModelConfig(
    vocab_size=4096, context_length=64, d_model=96, num_layers=2, num_heads=4, d_ff=256
)
VARIANTS: dict[str, dict[str, Any]] = {
    AS_BUILT: {},
    "no positions": {"positions": "none"},
    "no norm": {"norm": "none"},
    "norm after each sum": {"norm": "post"},
    "no gate": {"feed_forward": "silu"},
    "one head": {"num_heads": 1},
    "RoPE with θ = 100": {"rope_theta": 100.0},
    "norm of q and k": {"qk_norm": True},
    "embedding is head": {"tied_embeddings": True},
}
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class ShortTraining:
    """Settings of a training run of seconds."""

    steps: int = 500
    learning_rate: float = 1e-2
    warmup_steps: int = 100
    batch_size: int = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the record."""

    variant: str
    seed: int
    training: ShortTraining = ShortTraining()
    eval_tokens: int = 20_000


def train(
    shape: ModelConfig, tokens: np.ndarray, training: ShortTraining, seed: int
) -> tuple[TransformerLM, list[float]]:
    """Train a model of `shape` on random sequences of `tokens`; return it and each step's loss.

    `seed` selects the initial weights and the sequences.
    """
    model = TransformerLM(shape, device="cpu", generator=torch.Generator().manual_seed(seed))
    optimizer = AdamW(model.parameters())
    losses = short_run.train(model, optimizer, tokens, seed=seed, **dataclasses.asdict(training))
    return model, losses


def run_ablations() -> Path:
    """Train every variant with every seed that has no record yet; return the records' path."""
    tokens, judge = short_run.prepare_stories(Run.eval_tokens)
    runs = [Run(variant, seed) for variant in VARIANTS for seed in SEEDS]
    for run in remaining(runs, read_records(RECORDS)):
        shape = dataclasses.replace(SHAPE, **VARIANTS[run.variant])
        model, _ = train(shape, tokens, run.training, run.seed)
        result = judge(model)
        losses = {"loss": result.loss, "bits_per_byte": result.bits_per_byte}
        figures = {name: round(value, 4) for name, value in losses.items()}
        append_record(RECORDS, new_record(figures, config=run, seed=run.seed))
        print(f"{run.variant}, seed {run.seed}: {result.loss:.3f} nats")
    return RECORDS


def recorded_costs() -> list[dict[str, Any]]:
    """Return what each variant adds to the loss of the model as built, seed by seed, dearest first.

    Returns:
        Rows with `variant`, `costs` in nats per token, one for each seed, and their `mean`.
    """
    losses: dict[tuple[str, int], float] = {}
    for record in read_records(RECORDS):
        run = record["config"]
        losses[run["variant"], run["seed"]] = record["figures"]["loss"]
    rows = []
    for variant in VARIANTS:
        if variant != AS_BUILT:
            costs = [losses[variant, seed] - losses[AS_BUILT, seed] for seed in SEEDS]
            rows.append({"variant": variant, "costs": costs, "mean": mean(costs)})
    return sorted(rows, key=lambda row: -row["mean"])
