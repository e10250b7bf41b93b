"""Records of the ladder of notebooks 06 and 07: the middle and the extremes of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lib.core.files import ROOT
from lib.core.records import Record, read_records
from lib.lessons.flash_attention.ladder_triton import LADDER, Rung

RECORDS = ROOT / "artifacts/attention_ladder.jsonl"
# (batch, heads, tokens, head_dim) that was measured.
SHAPE = (4, 32, 4096, 64)
PEERS = {"cudnn": "cuDNN", "fa4": "FlashAttention-4"}
# Runs of the ladder that notebooks show.
RUNS = 5


def recorded_ladder(
    rungs: Sequence[Rung] = LADDER, path: Path = RECORDS
) -> tuple[list[dict[str, Any]], list[Record]]:
    """A row for each version of `rungs`, and the records that it comes from: the newest RUNS.

    TFLOP/s are the median of the runs and their extremes. Gain is over the version before, of each
    run by itself: what is measured interleaved is compared.
    """
    runs = [record for record in read_records(path) if record["device"] != record["cpu"]]
    runs = [record for record in runs if record["commit"] == runs[-1]["commit"]][-RUNS:]
    rows = []
    for rung in rungs:
        speeds = speeds_of(rung.step, runs)
        row: dict[str, Any] = {"version": rung.name, "queries × keys, warps": rung.tiles}
        row |= {"TFLOP/s": interval(speeds) or "not measured", "gain": None}
        before = [one for one in LADDER[: LADDER.index(rung)] if speeds_of(one.step, runs)]
        if speeds and before:
            old = speeds_of(before[-1].step, runs)
            row["gain"] = interval([new / slow for new, slow in zip(speeds, old)])
        rows.append(row)
    return rows, runs


def speeds_of(step: str, runs: Sequence[Record]) -> list[float]:
    """TFLOP/s of a version or a peer in each run; empty if one of them lacks it."""
    found = [record["figures"]["steps"].get(step, {}).get("tflops") for record in runs]
    return found if all(found) else []


def interval(values: Sequence[float]) -> str:
    """The median of some values, and their extremes if these are not written alike."""
    if not len(values):
        return ""
    middle, low, high = (f"{x:.3g}" for x in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
