"""Shared by the reports on training with several ranks: rows by setting, and comparisons."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lib.core.figures import house_figure
from lib.core.records import Record
from lib.model.config import MODEL_PRESETS
from lib.profiling.measurement import interquartile_range
from lib.tools.benchmarks.multi_rank import epoch_ratios
from lib.tools.benchmarks.rank_training import SIZES
from lib.tools.benchmarks.sections import newest, to_frame, to_rows

# Fields of a case that say how long it trained, not what was trained.
LENGTH = ("epochs", "timed_epochs", "steps_per_epoch", "loss_steps")
# Fields that trainings must share to be compared.
SETTING = (
    "device",
    "model",
    *SIZES,
    "dtype",
    "tf32",
    "compile",
    "cuda_graph",
    "low_precision_weights",
    "tr_batch_size",
    "ranks",
    "backend",
    "bucket_size_mb",
)
TOGETHER_NOTE = "The models did not fit into memory together: each was built anew for each epoch."


@dataclass(frozen=True)
class Setting:
    """The rows of one model on one machine with the same settings."""

    title: str
    rows: tuple[Mapping[str, Any], ...]


def training_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A flat row for each training, from its newest record, in the order of those records."""
    return to_rows(to_frame(sorted(newest(records, LENGTH), key=lambda record: record["date"])))


def measured(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return `rows`, each of which was measured.

    Raises:
        RuntimeError: one was not; the message says which, and why.
    """
    if failures := failure_list(rows, "model", "method"):
        raise RuntimeError(f"not everything could be measured:\n{failures}")
    return rows


def group_rows(
    rows: Iterable[Mapping[str, Any]], by: Sequence[str] = SETTING
) -> list[list[Mapping[str, Any]]]:
    """The rows of each combination of the values `by`, in the order in which they appear."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(groups.values())


def setting_title(row: Mapping[str, Any]) -> str:
    """The setting of a row in words."""
    preset = MODEL_PRESETS.get(row["model"])
    # the context length is in the batch's words
    sizes = [name for name in SIZES if name != "context_length"]
    other = [f"{name} {row[name]}" for name in sizes if row[name] != getattr(preset, name, None)]
    precision = "TF32" if row["tf32"] and row["backend"] == "nccl" else "float32"
    words = [precision if row["dtype"] == "float32" else row["dtype"]]
    words += ["compiled" if row["compile"] else "eager"]
    words += ["CUDA graph"] * row["cuda_graph"]
    words += [f"{row['dtype']} parameters"] * row["low_precision_weights"]
    words += [f"buckets of {row['bucket_size_mb']:g} MiB"] * (row["bucket_size_mb"] != 25)
    batch = f"{row['ranks']} × {row['tr_batch_size']} × {row['context_length']} tokens"
    return f"{', '.join([row['model'], *other])}: {', '.join(words)}; {batch}; {machine(row)}"


def machine(row: Mapping[str, Any]) -> str:
    """The hardware that the ranks ran on."""
    if row["backend"] == "gloo":
        return f"{row['ranks']} processes on one CPU"
    return f"{row['ranks']} × {row['device']}"


def gpu_settings(settings: Iterable[Setting]) -> dict[str, Setting]:
    """The settings on GPUs by title, without the machine where it is the same for all."""
    on_gpus = [setting for setting in settings if setting.rows[0]["backend"] == "nccl"]
    if len({setting.rows[0]["device"] for setting in on_gpus}) > 1:
        return {setting.title: setting for setting in on_gpus}
    return {s.title.replace(f"; {machine(s.rows[0])}", ""): s for s in on_gpus}


def setting_intro(rows: Sequence[Mapping[str, Any]], gloo_note: str, size: str = "") -> str:
    """The paragraph above a setting's tables: machine, versions, date, and what to keep in mind.

    Args:
        gloo_note: what times on one CPU show and what they do not.
        size: the size of the model, ending in a comma and a space, if it is to be named.
    """
    last = max(rows, key=lambda row: row["date"])
    text = f"{last['device']}, torch {last['torch']}, {last['date']}, {size}{last['backend']}, "
    text += f"{last['steps_per_epoch']} steps an epoch.\n"
    if last["backend"] == "gloo":
        text += (
            f"{last['ranks']} processes share the {last['cores']} cores of one CPU, and memory is "
            f"their network: {gloo_note}\n"
        )
    if any(row.get("is_together") is False for row in rows):
        text += f"{TOGETHER_NOTE}\n"
    return text


def failure_list(rows: Iterable[Mapping[str, Any]], *names: str) -> str:
    """A list of the trainings that failed, each by its fields `names`, and why."""
    failed = [row for row in rows if row["status"] != "ok"]
    items = [f"- {', '.join(r[n] for n in names)}: {r['status']}: {r['reason']}" for r in failed]
    return "\n".join(items)


def time_ratio(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> tuple[float | None, float | None]:
    """Median and interquartile range of the first's times over the second's, epoch by epoch.

    None unless both ran in the same launch, where their epochs are pairs.
    """
    are_measured = all(row and row["status"] == "ok" for row in (first, second))
    if not are_measured or first["launch"] != second["launch"]:
        return None, None
    ratios = epoch_ratios(first["times_ms"], second["times_ms"])
    return median(ratios), interquartile_range(ratios)


@contextlib.contextmanager
def panels(count: int, *, columns: int, width: float, height: float) -> Iterator[tuple]:
    """A figure and its `count` panels of this size in inches, at most `columns` side by side."""
    columns = max(1, min(columns, count))
    rows = max(1, math.ceil(count / columns))
    size = {"width": width * columns, "height": height * rows}
    with house_figure(nrows=rows, ncols=columns, squeeze=False, **size) as (figure, grid):
        for axes in grid.flat[count:]:
            axes.set_axis_off()
        yield figure, grid.flat
