"""Steps of ZeRO-1 on H200s, from `artifacts/`, for notebook 09."""

from __future__ import annotations

from typing import Any

from lib.core.files import ROOT
from lib.core.records import read_records

RECORDS = ROOT / "artifacts/sharding_benchmark.jsonl"


def zero1_steps() -> list[dict[str, Any]]:
    """Each run with `zero1` on GPUs, beside the other methods of the same run.

    A ratio is the median over epochs of a step's time over that of `flashddp`, whose optimizer is
    whole. Memory saved is that of the peak, against `flashddp` too.
    """
    runs: dict[Any, dict[str, Any]] = {}
    for record in read_records(RECORDS):
        config, figures = record["config"], record["figures"]
        if config["backend"] == "nccl" and figures["status"] == "ok":
            names = ("model", "ranks", "tr_batch_size", "low_precision_weights", "bucket_size_mb")
            key = (*(config[name] for name in names), figures["launch"])
            runs.setdefault(key, {})[config["method"]] = figures
    return [
        {
            "model": model,
            "ranks": ranks,
            "sequences": sequences,
            "dtype": "bfloat16" if is_short else "float32",
            "bucket (MiB)": bucket,
            "run": launch[:16].replace("T", " "),
            "zero1 ÷ flashddp": found["zero1"]["step_ratio"],
            "behind flashddp ÷ flashddp": found.get("flashddp+zero1", {}).get("step_ratio"),
            "state, a rank's share": found["zero1"]["state_share"],
            "saved (GB)": found["zero1"]["saved_measured_bytes"] / 1e9,
            "by formula (GB)": found["zero1"]["saved_predicted_bytes"] / 1e9,
            "torch_zero saved (GB)": _saved_gb(found.get("torch_ddp+torch_zero")),
        }
        for (model, ranks, sequences, is_short, bucket, launch), found in sorted(runs.items())
        if "zero1" in found
    ]


def _saved_gb(figures: dict[str, Any] | None) -> float | None:
    return figures["saved_measured_bytes"] / 1e9 if figures else None
