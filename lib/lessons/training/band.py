"""Notebook 03's run with other seeds: a recorded band that the reader's curve is drawn into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lib.core.files import ROOT
from lib.core.records import read_records

RECORDS = ROOT / "artifacts/training_band.jsonl"
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


def smooth(losses: list[float]) -> dict[int, float]:
    """The mean of each SMOOTHED losses, by the last of their steps, counted from 1."""
    ends = range(SMOOTHED, len(losses) + 1, SMOOTHED)
    return {end: float(np.mean(losses[end - SMOOTHED : end])) for end in ends}


def read_band(run: BandRun) -> dict[str, Any] | None:
    """The recorded band of `run`: "steps", "low", "high", "held_out", and "held_out_at_rate".

    None of another run.
    """
    (record,) = read_records(RECORDS)
    return record["figures"] if BandRun(**record["config"]) == run else None
