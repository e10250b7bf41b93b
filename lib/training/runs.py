"""The runs that are kept in a folder: listed with their sizes and ages."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from lib.core.records import to_markdown
from lib.core.settings import settings
from lib.training.metrics import last_evaluation, read_metrics


@settings
class RunsConfig:
    """Where runs are."""

    runs_dir: Path = Path("artifacts/runs")
    """The folder that holds a folder for each run."""


def list_runs(config: RunsConfig) -> int:
    """Print a table of the runs, the newest first; return the exit code."""
    rows = [_row(path) for path in config.runs_dir.glob("*") if path.is_dir()]
    rows.sort(key=lambda row: row["age"])
    shown = [row | {"age": age_in_words(row["age"])} for row in rows]
    print(to_markdown(shown) if shown else f"no runs in {config.runs_dir}\n", end="")
    return 0


def _row(folder: Path) -> dict[str, Any]:
    """Name, step of the newest checkpoint, last evaluation, size, and seconds since a change."""
    # a training may delete files meanwhile
    stats = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stats.append(os.stat(os.path.join(parent, name)))
    last = last_evaluation(read_metrics(folder / "metrics.jsonl")) or {}
    numbers = [path.name[5:] for path in folder.glob("checkpoints/step-*")]
    changed = max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime)
    return {
        "run": folder.name,
        "step": max((int(number) for number in numbers if number.isdecimal()), default=None),
        "bits per byte": last.get("validation_bits_per_byte"),
        "MB": sum(stat.st_size for stat in stats) / 1e6,
        "age": time.time() - changed,
    }


def age_in_words(seconds: float) -> str:
    """Seconds as whole days, hours or minutes, such as `3 days`."""
    for unit, length in (("day", 86_400), ("hour", 3_600)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count > 1)}"
    return f"{max(0, int(seconds // 60))} min"
