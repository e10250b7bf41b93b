"""Notebook 03's run with other seeds: a band that the reader's own curve is drawn into.

`python -m lib lessons band` trains them and records their losses in artifacts/training_band.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records
from lib.lessons.training.short_run import prepare_stories, train
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.optimizer.adamw import AdamW

RECORDS = ROOT / "artifacts/training_band.jsonl"
# The reader's run has seed 0.
SEEDS = range(1, 9)
# Half and twice the rate, and the number of seeds that they are tried with.
OTHER_RATES, RATE_SEEDS = (0.005, 0.02), 3
# Steps over which a curve is averaged.
SMOOTHED = 20


@dataclass(frozen=True)
class BandRun:
    """The run of notebook 03 at its default sizes."""

    vocab_size: int = 4096
    context_length: int = 64
    d_model: int = 96
    num_layers: int = 2
    num_heads: int = 4
    steps: int = 500
    batch_size: int = 8
    learning_rate: float = 0.01
    eval_tokens: int = 20_000

    @property
    def shape(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            d_ff=self.d_model * 8 // 3,
        )


def smooth(losses: list[float]) -> dict[int, float]:
    """The mean of each SMOOTHED losses, by the last of their steps, counted from 1."""
    ends = range(SMOOTHED, len(losses) + 1, SMOOTHED)
    return {end: float(np.mean(losses[end - SMOOTHED : end])) for end in ends}


def train_with_seed(run: BandRun, tokens: np.ndarray, seed: int) -> tuple[TransformerLM, list]:
    """Train a model whose weights and batches are drawn with `seed`; return it and its losses."""
    model = TransformerLM(run.shape, generator=torch.Generator().manual_seed(seed))
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        # the gains of norms
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, betas=(0.9, 0.95))
    losses = train(
        model,
        optimizer,
        tokens,
        steps=run.steps,
        batch_size=run.batch_size,
        learning_rate=run.learning_rate,
        warmup_steps=run.steps // 5,
        seed=seed,
    )
    return model, losses


def record_band() -> Path:
    """Train the run with each seed, and write the lowest and highest losses."""
    run = BandRun()
    tokens, judge = prepare_stories(run.eval_tokens)

    def trained(run: BandRun, seed: int) -> tuple[float, dict[int, float]]:
        model, losses = train_with_seed(run, tokens, seed)
        loss = judge(model).loss
        print(f"rate {run.learning_rate}, seed {seed}: held-out loss {loss:.3f}", flush=True)
        return round(loss, 4), smooth(losses)

    judged, curves = zip(*(trained(run, seed) for seed in SEEDS))
    figures: dict[str, Any] = {"steps": [*curves[0]], "held_out": judged}
    figures["held_out_at_rate"] = {
        str(rate): [
            trained(replace(run, learning_rate=rate), seed)[0] for seed in SEEDS[:RATE_SEEDS]
        ]
        for rate in OTHER_RATES
    }
    for name, choose in {"low": min, "high": max}.items():
        figures[name] = [round(choose(curve[step] for curve in curves), 4) for step in curves[0]]
    RECORDS.unlink(missing_ok=True)
    append_record(RECORDS, new_record(figures, config=run, seed=SEEDS[0]))
    return RECORDS


def read_band(run: BandRun) -> dict[str, Any] | None:
    """The recorded band of `run`: "steps", "low", "high", "held_out", and "held_out_at_rate".

    None of another run.
    """
    (record,) = read_records(RECORDS)
    return record["figures"] if BandRun(**record["config"]) == run else None
