"""GPU measurements from `artifacts/` as rows of notebook 02's tables."""

from __future__ import annotations

from typing import Any

from lib.core.files import ROOT
from lib.core.records import read_records


def loss_on_gpu() -> list[dict[str, Any]]:
    """Time and memory of the loss with its gradients, with all logits and with chunks of them.

    Prints the device and the date of the record.
    """
    records = read_records(ROOT / "artifacts/training_benchmark.jsonl")
    records = [record for record in records if record["figures"].get("task") == "loss"]
    print("Loss and gradients on {device}, {date:.10}".format(**records[-1]))
    # of each candidate the newest
    newest = {record["figures"]["candidate"]: record["figures"] for record in records}
    return [
        {
            "logits": name,
            "tokens": figures["tokens"],
            "vocabulary": figures["vocab_size"],
            "time (ms)": figures["median_ms"],
            "peak memory (GB)": figures["peak_memory_gb"],
        }
        for name, figures in newest.items()
    ]
