"""Shared by the reports on training with several ranks: settings in words, and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lib.core.records import Record, to_frame
from lib.profiling.measurement import time_ratio
from lib.tools.benchmarks.rank_training import LENGTH
from lib.tools.benchmarks.sections import failures, newest, to_rows

TOGETHER_NOTE = "The models did not fit into memory together: each was built anew for each epoch."
GLOO_NOTE = """The ranks share the cores of one CPU, and memory is their network: times say nothing
about GPUs, and gloo's own copies are in the bytes."""


def training_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The newest record of each training, however long, with its setting in words."""
    found = sorted(newest(records, LENGTH), key=lambda record: record["date"])
    frame = to_frame(found)
    frame["setting"] = [setting_title(row) for row in to_rows(frame)]
    # what no record has yet, as where all failed
    for name in ("median_ms", "measured", "reason", "peak_memory_bytes"):
        frame[name] = frame.get(name)
    return frame


def setting_title(row: Mapping[str, Any]) -> str:
    """The setting of a row in words."""
    precision = "TF32" if row["tf32"] and row["backend"] == "nccl" else "float32"
    words = [precision if row["dtype"] == "float32" else row["dtype"]]
    words += ["compiled" if row["compile"] else "eager"]
    words += ["CUDA graph"] * row["cuda_graph"]
    words += [f"{row['dtype']} parameters"] * row["low_precision_weights"]
    words += [f"buckets of {row['bucket_size_mb']:g} MiB"] * (row["bucket_size_mb"] != 25)
    batch = f"{row['ranks']} × {row['tr_batch_size']} × {row['context_length']} tokens"
    return f"{row['model']}: {', '.join(words)}; {batch}; {machine(row)}"


def machine(row: Mapping[str, Any]) -> str:
    """The hardware that the ranks ran on."""
    if row["backend"] == "gloo":
        return f"{row['ranks']} processes on one CPU"
    return f"{row['ranks']} × {row['device']}"


def notes(rows: pd.DataFrame, *names: str) -> list[str]:
    """The caveats of a setting's rows, and why some failed."""
    parts = [GLOO_NOTE] * bool((rows["backend"] == "gloo").any())
    if "is_together" in rows and (rows["is_together"].map(str) == "False").any():
        parts.append(TOGETHER_NOTE)
    return [*parts, failures(rows, *names)]


def ratios(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], peers: Mapping[str, str], key: str
) -> dict[str, Any]:
    """Times of peers over those of a row, where their epochs are pairs: in the same launch.

    Args:
        row: of a training that was measured.
        rows: all of the report.
        peers: heading -> the peer's name in the field `key`. A heading that begins with `time /`
            asks for the row's times over the peer's.
    """
    line: dict[str, Any] = {}
    # old records name no launch
    same = ("launch", "setting", "kernel")
    beside = [
        other
        for other in rows
        if other["status"] == "ok" and all(other.get(name) == row.get(name) for name in same)
    ]
    times = {other[key]: other["times_ms"] for other in reversed(beside)}
    for heading, peer in peers.items():
        pair = [row["times_ms"], times.get(peer, [])]
        ratio = time_ratio(*(pair if heading.startswith("time /") else reversed(pair)))
        line[heading], line[f"{heading}, IQR"] = ratio
    return line
