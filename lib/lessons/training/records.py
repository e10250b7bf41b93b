"""GPU measurements of notebook 03: training steps, with one idea after the other left out."""

from __future__ import annotations

from typing import Any

from lib.core.files import ROOT
from lib.lessons.profiling.records import newest_records, place_of

RECORDS = ROOT / "artifacts/training_benchmark.jsonl"


def gpu_steps(model: str) -> list[dict[str, Any]]:
    """Return a row for each recorded training step of `model`; print where it was measured."""
    records = [
        record
        for record in newest_records(RECORDS)
        if record["figures"]["task"] == "step" and record["figures"]["model"] == model
    ]
    print(f"{model}, {place_of(records[0])}")
    figures = [record["figures"] for record in records]
    best = next(row["tokens_per_s"] for row in figures if row["candidate"] == "all")
    return [
        {
            "step": row["candidate"],
            "time (ms)": row["median_ms"],
            "tokens/s": row["tokens_per_s"],
            "MFU": row["mfu"],
            "speed, of `all`": row["tokens_per_s"] / best,
        }
        for row in figures
    ]
