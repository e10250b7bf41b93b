"""Memory and time of training with a sharded optimizer, against a replicated one and PyTorch's own.

For each model the methods are interleaved (see `interleaved.py`). In `none` each rank trains alone,
in a group of its own, while the others do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch

from lib.core.records import Record
from lib.core.settings import NonEmpty, NonNegativeInt, check, settings
from lib.model.config import AttentionKernel, PresetName
from lib.profiling.measurement import time_ratio
from lib.tools.benchmarks.harness import Benchmark
from lib.tools.benchmarks.interleaved import (
    loss_difference,
    measure_trainings,
)
from lib.tools.benchmarks.rank_training import (
    SHARDING_METHODS,
    RanksTrainingConfig,
    make_groups,
    predicted_memory,
    training_case,
)
from lib.tools.benchmarks.ranks_report import notes, ratios, training_frame
from lib.tools.benchmarks.sections import Report, failures, section, table, to_rows
from lib.tools.benchmarks.sweep import Case

# The method that the others are compared with.
BASE = "flashddp"
NOTE = """Each rank is a process with a part of the batch; in `none` each trains a model of its own
while the others do the same. `flashddp` keeps the whole optimizer on every rank, `zero1` a slice of
it, and averages gradients itself; in `wrapper+zero1` the wrapper averages them. `fsdp` and
PyTorch's `fully_shard`, `fsdp2`, shard weights and gradients too; with `+checkpoints` backward
computes every block again. Methods are interleaved, an epoch at a time; an epoch is a sample, its
time the ranks' mean, and the ratio to `flashddp` the median over the epochs.

Bytes are those of the rank that has most, in a training's third step and of itself alone. Weights,
gradients and state are counted from the tensors that are there when the optimizer steps; the rest
is what is allocated. Predictions are formulas (`lib.profiling.memory_formula`) for eager
mode, of which `torch.compile` keeps fewer activations. `saved` is how far the peak lies below that
of `flashddp`. Buckets have 25 MiB where a title says nothing else.
"""
COLUMNS = {
    "method": "method",
    "status": "status",
    "median_ms": "ms a step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "tokens_per_s": "tokens/s",
    "step_ratio": "time / flashddp",
    "iqr_step_ratio": "IQR",
    "communication_ms": "communication (ms)",
    "exposed_communication_ms": "exposed (ms)",
    "loss_difference": "loss difference",
}
MEMORY_COLUMNS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer_state": "state",
    "activations": "activations",
    "initialized": "initialized",
    "before_step": "before the update",
    "after_step": "after it",
    "peak": "peak",
}
# The methods that others are compared with, by the heading of the ratio, and FSDP with PyTorch's.
PEERS = {"time / flashddp": BASE, "time / torch_zero": "torch_ddp+torch_zero"}
FSDP_PEERS = {**PEERS, "time / fsdp2": "fsdp2"}
COMPARED = """Ratios are over the epochs of one run, and missing where methods did not run together.
`state · ranks` is 1 where a rank holds exactly its share of the optimizer's state. The formula that
the peak is compared with is today's; tables of bytes show that of the day.
"""


@settings
class ShardingConfig(RanksTrainingConfig):
    """Measure memory and time of training with the optimizer's state replicated and sharded.

    Defaults are chosen for two processes on one CPU, or for all GPUs of the machine.
    """

    models: tuple[PresetName, ...] = ()
    """Model presets; `tiny` by default on a CPU, `large` and `xl` on GPUs."""

    methods: Annotated[tuple[str, ...], NonEmpty] = tuple(SHARDING_METHODS)
    """Ways to train; `none` is each rank alone, and `flashddp` what the others are compared with.

    `zero1` averages gradients itself; `WRAPPER+zero1` leaves that to the wrapper. `+checkpoints`
    recomputes every block in backward.
    """

    attention_kernel: AttentionKernel = "sdpa"
    """Attention kernel."""

    loss_steps: NonNegativeInt = 10
    """Compare the losses of this many first steps with those of `flashddp`."""

    trace_steps: NonNegativeInt = 2
    """Trace this many further steps with PyTorch's profiler to time communication; 0: none."""

    defaults: ClassVar[dict[str, tuple[Any, Any]]] = {
        "models": (("tiny",), ("large", "xl")),
        "tr_batch_size": (2, 32),
        "steps_per_epoch": (3, 10),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        is_known = set(self.methods) <= set(SHARDING_METHODS)
        check(self, "methods", is_known, f"names out of {', '.join(SHARDING_METHODS)}")


def sharding_cases(config: ShardingConfig, device: torch.device) -> list[list[Case]]:
    """A group of methods for each model."""
    kernel = config.attention_kernel
    return [
        [training_case(config, model, kernel, method=method) for method in config.methods]
        for model in config.given("models")
    ]


def measure_methods(
    group: Sequence[Case], config: RanksTrainingConfig, device: torch.device
) -> list[dict[str, Any]]:
    """The figures of the methods of one model, compared with those of `flashddp`."""
    rows = measure_trainings(group, config, make_groups(config.timeout))
    base = rows.get(BASE, {})
    for method, row in rows.items():
        if row["status"] == "ok":
            row |= beside_base(method, row, base if base.get("status") == "ok" else {})
    return [*rows.values()]


def beside_base(method: str, row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Further figures of a method that compare it with `flashddp`, epoch by epoch.

    `step_ratio` is its time over that of `flashddp`, `state_share` its optimizer state over that of
    `flashddp`, and `saved_*_bytes` how far its peak is below, measured and predicted.
    """
    ratio, spread = time_ratio(row["times_ms"], base.get("times_ms", []))
    found = {"step_ratio": ratio, "iqr_step_ratio": spread}
    if base and method != "none":
        state = row["measured"]["optimizer_state"] / base["measured"]["optimizer_state"]
        found["state_share"] = state
        found["loss_difference"] = loss_difference(row["losses"], base["losses"])
        for source in ("measured", "predicted"):
            found[f"saved_{source}_bytes"] = base[source]["peak"] - row[source]["peak"]
    return found


def sharding_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each training, from its newest record."""
    return to_rows(training_frame(records))


def measured(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return `rows`, each of which was measured.

    Raises:
        RuntimeError: one was not; the message says which, and why.
    """
    if failed := failures(pd.DataFrame(rows), "model", "method"):
        raise RuntimeError(f"not everything could be measured:\n{failed}")
    return rows


def sharding_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The newest rows by setting: few ranks before many, small models first, methods as listed."""
    frame = training_frame(records)
    kernels = [f"; {name}" if name != "sdpa" else "" for name in frame["kernel"]]
    frame["setting"] += kernels
    frame["place"] = frame["method"].map(list(SHARDING_METHODS).index)
    order = ["ranks", "num_layers", "d_model", "tr_batch_size", "setting", "place"]
    peaks = [row["measured"] and row["measured"]["peak"] / 1e9 for row in to_rows(frame)]
    frame["peak_gb"] = peaks
    return frame.sort_values(order, kind="stable").drop(columns="place")


def memory_tables(rows: pd.DataFrame) -> list[str]:
    """The bytes of each method, measured and by formula, and what it saves."""
    done = [row for row in to_rows(rows) if row["status"] == "ok"]
    unit, size = _unit(max((row["measured"]["peak"] for row in done), default=0))
    lines = [
        {
            "method": row["method"],
            f"bytes of a rank ({unit})": source,
            **{MEMORY_COLUMNS[k]: row[source][k] / size for k in MEMORY_COLUMNS},
        }
        for row in done
        for source in ("measured", "predicted")
    ]
    return [table(lines), *notes(rows, "method")]


def _unit(largest: float) -> tuple[str, float]:
    """The unit for values up to `largest` bytes, and its bytes."""
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)


def comparisons(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """How the sharded methods compare with their peers of the same run, and with the formulas."""
    rows = to_rows(frame)
    lines = []
    for row in rows:
        if row["status"] != "ok" or row["method"] in ("none", BASE):
            continue
        line = {"setting": row["setting"], "method": row["method"]}
        share, saved = row.get("state_share"), row.get("saved_measured_bytes")
        predicted = row.get("saved_predicted_bytes")
        line["state · ranks"] = share and share * row["ranks"]
        peers = FSDP_PEERS if row["method"].startswith("fsdp") else PEERS
        line |= ratios(row, rows, peers, "method")
        line |= {"saved (MB)": saved and saved / 1e6}
        line |= {"by formula (MB)": predicted and predicted / 1e6}
        line |= {"saved / predicted": saved / predicted if saved and predicted else None}
        formula = predicted_memory(Case(**row)).peak
        line |= {"peak (GB)": row["measured"]["peak"] / 1e9}
        line |= {"peak / formula": row["measured"]["peak"] / formula, "recorded": row["recorded"]}
        lines.append(line)
    return lines


def overview(frame: pd.DataFrame) -> list[str]:
    """How the sharded methods compare."""
    compared = comparisons(frame)
    return [section("How the methods compare", COMPARED, table(compared))] if compared else []


REPORT = Report(
    "sharding_benchmark",
    "Sharded optimizer: memory and time",
    COLUMNS,
    note=NOTE,
    by=("setting",),
    rows=sharding_frame,
    overview=overview,
    further=memory_tables,
)
benchmark_sharding = Benchmark(REPORT, sharding_cases, measure_methods)
