"""Steps of FSDP2 on H200s, from `artifacts/`, for notebook 09."""

from __future__ import annotations

from typing import Any

from lib.core.files import ROOT
from lib.core.records import read_records
from lib.lessons.profiling.records import block_on_gpu

RECORDS = ROOT / "artifacts/sharding_benchmark.jsonl"
# bfloat16 parameters are gathered twice, float32 gradients reduce-scattered once.
BYTES_SENT = 2 + 2 + 4


def flops_per_s() -> float:
    """The speed that an H200 reached in a large bfloat16 matmul."""
    return block_on_gpu()[0].flops_per_s


def fsdp2_steps() -> list[dict[str, Any]]:
    """Steps of FSDP2 beside `flashddp` of the same run: milliseconds by setting and run."""
    runs: dict[Any, dict[str, Any]] = {}
    for record in read_records(RECORDS):
        config, figures = record["config"], record["figures"]
        if config["backend"] == "nccl" and figures["status"] == "ok":
            key = config["model"], config["ranks"], figures["launch"], config["bucket_size_mb"]
            runs.setdefault(key, {})[config["method"]] = figures
    return [
        {
            "model": model,
            "ranks": ranks,
            "run": launch[:16].replace("T", " "),
            "parameters": found["fsdp2"]["parameters"],
            "flashddp (ms)": found["flashddp"]["median_ms"],
            "fsdp2 (ms)": found["fsdp2"]["median_ms"],
            "ratio": found["fsdp2"]["step_ratio"],
            "exposed (ms)": found["fsdp2"]["exposed_communication_ms"],
        }
        for (model, ranks, launch, _), found in sorted(runs.items())
        if {"flashddp", "fsdp2"} <= found.keys()
    ]
