"""The runs that are kept in a folder: listed with their sizes and ages, and removed on request."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

from lib.core.files import try_lock_folder
from lib.core.settings import require, settings
from lib.training.metrics import last_evaluation, read_metrics


@settings
class RunsConfig:
    """Where runs are."""

    runs_dir: Path = Path("artifacts/runs")
    """The folder that holds a folder for each run."""


@settings
class RemoveRunsConfig(RunsConfig):
    """Which runs are removed."""

    names: tuple[str, ...] = ()
    """Runs as `python -m lib runs` lists them."""

    yes: bool = False
    """Remove them without asking."""


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """A run's folder at a glance."""

    folder: Path

    step: int | None
    """Step of the newest checkpoint; None without one."""

    bits_per_byte: float | None
    """The figure of the last evaluation; None without one."""

    num_bytes: int
    changed: float
    """When a file in it was last written, in seconds since 1970."""

    def __str__(self) -> str:
        age = age_in_words(time.time() - self.changed)
        return f"{self.folder.name}, {self.num_bytes / 1e6:,.1f} MB, {age} old"


def stored_runs(runs_dir: Path) -> list[StoredRun]:
    """The runs in `runs_dir`, the newest first."""
    folders = [path for path in runs_dir.glob("*") if path.is_dir()]
    return sorted(map(_stored_run, folders), key=lambda run: run.changed, reverse=True)


def _stored_run(folder: Path) -> StoredRun:
    # a training may delete files meanwhile
    stats = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stats.append(os.stat(os.path.join(parent, name)))
    last = last_evaluation(read_metrics(folder / "metrics.jsonl")) or {}
    numbers = [path.name[5:] for path in folder.glob("checkpoints/step-*")]
    return StoredRun(
        folder,
        step=max((int(number) for number in numbers if number.isdecimal()), default=None),
        bits_per_byte=last.get("validation_bits_per_byte"),
        num_bytes=sum(stat.st_size for stat in stats),
        changed=max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime),
    )


def list_runs(config: RunsConfig) -> int:
    """Print a table of the runs, the newest first; return the exit code."""
    from lib.core.records import to_markdown

    rows: list[dict[str, Any]] = [
        {
            "run": run.folder.name,
            "step": run.step,
            "bits per byte": run.bits_per_byte,
            "MB": run.num_bytes / 1e6,
            "age": age_in_words(time.time() - run.changed),
        }
        for run in stored_runs(config.runs_dir)
    ]
    print(to_markdown(rows) if rows else f"no runs in {config.runs_dir}\n", end="")
    return 0


def remove_runs(config: RemoveRunsConfig) -> int:
    """Ask about each run in `names`, and remove it; return the exit code, 1 if one was kept.

    Raises:
        ValueError: a name is no run, or one that is being trained; nothing was removed.
    """
    runs = {run.folder.name: run for run in stored_runs(config.runs_dir)}
    unknown = [name for name in config.names if name not in runs]
    if unknown or not config.names:
        known = ", ".join(runs) or "none"
        raise ValueError(f"names must be runs in {config.runs_dir}: {known}; got {unknown}")
    chosen = list(dict.fromkeys(runs[name] for name in config.names))
    going = [run for run in chosen if config.yes or _confirmed(f"Remove {run}? [y/N] ")]
    with contextlib.ExitStack() as locks:
        # After the questions, during which a training may have started; held until the runs are
        # gone, so that none starts in them meanwhile.
        held = {run: locks.enter_context(try_lock_folder(run.folder)) for run in going}
        busy = [run.folder.name for run, is_held in held.items() if not is_held]
        require(not busy, f"names must be runs that are not in training, got {', '.join(busy)}")
        for run in chosen:
            if run in going:
                shutil.rmtree(run.folder)
            print(f"{'removed' if run in going else 'kept'}: {run}")
    return int(going != chosen)


def _confirmed(question: str) -> bool:
    """Whether the user typed yes; without a user the answer is no."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def age_in_words(seconds: float) -> str:
    """Seconds as whole days, hours or minutes, such as `3 days`."""
    for unit, length in (("day", 86_400), ("hour", 3_600)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count > 1)}"
    return f"{max(0, int(seconds // 60))} min"
