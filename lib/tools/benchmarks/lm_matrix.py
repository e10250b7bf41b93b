"""Training of a language model with each attention kernel in each data-parallel wrapper.

For each kernel the wrappers are interleaved (see `interleaved.py`). In the baseline `none` each
rank trains alone, in a group of its own, while the others do the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch

from lib.core.settings import NonEmpty, settings
from lib.ddp.settings import DDP_WRAPPERS, DdpWrapper
from lib.model.config import AttentionKernel, PresetName
from lib.profiling.measurement import time_ratio
from lib.tools.benchmarks.harness import Benchmark
from lib.tools.benchmarks.interleaved import (
    loss_difference,
    measure_trainings,
    one_process,
)
from lib.tools.benchmarks.rank_training import (
    RanksTrainingConfig,
    compared_steps,
    make_groups,
    training_case,
)
from lib.tools.benchmarks.ranks_report import notes, ratios, training_frame
from lib.tools.benchmarks.sections import Chart, Report, section, table, to_rows
from lib.tools.benchmarks.sweep import Case

CPU_KERNELS = ("scaled_dot_prod_attention", "vectorized_torch", "flash_attention_torch", "sdpa")
GPU_KERNELS = ("vectorized_torch", "flash_attention_triton", "sdpa")
NOTE = """Each rank is a process with a part of the batch; `none` is the baseline, where each rank
trains a model of its own while the others do the same. Wrappers are interleaved, an epoch at a
time. An epoch is a sample, its time the ranks' mean; tokens/s are those of all ranks together.
Efficiency is the time of `none` with the same kernel over the wrapper's, epoch by epoch, and
overhead the peak memory of a rank beyond that of `none`. Communication is the time in which
gradients travel, including waiting for other ranks, and exposed the part of it in which nothing
else runs, both from a trace of a few further steps: of a GPU's kernels, or of a CPU's operators.
Loss difference: the largest one to a single process that trains on the batches of all ranks, in the
first steps. A compiled model is compiled block by block for the wrappers that overlap, which need
gradients during the backward pass, and as a whole for the others.
"""
COLUMNS = {
    "kernel": "kernel",
    "wrapper": "wrapper",
    "status": "status",
    "tokens_per_s": "tokens/s",
    "median_ms": "ms a step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "epoch_s": "s an epoch",
    "efficiency_percent": "efficiency (%)",
    "iqr_efficiency_percent": "IQR (%)",
    "peak_memory_mb": "peak memory (MB)",
    "overhead_percent": "overhead (%)",
    "communication_ms": "communication (ms)",
    "exposed_communication_ms": "exposed (ms)",
    "loss_difference": "loss difference",
}
PERCENT = {
    "scaling_efficiency": "efficiency_percent",
    "iqr_scaling_efficiency": "iqr_efficiency_percent",
    "memory_overhead": "overhead_percent",
}
# The wrappers that `flashddp` is compared with.
PEERS = {"× torch_ddp": "torch_ddp", "× naive": "naive"}


@settings
class LmMatrixConfig(RanksTrainingConfig):
    """Train a language model with each attention kernel in each data-parallel wrapper.

    Defaults are chosen for two processes on one CPU, or for all GPUs of the machine.
    """

    kernels: tuple[AttentionKernel, ...] = ()
    """Attention kernels; by default four that run on a CPU, or the three fast ones of a GPU."""

    wrappers: Annotated[tuple[DdpWrapper, ...], NonEmpty] = DDP_WRAPPERS
    """Data-parallel wrappers; `none` is the baseline, where each rank has a model of its own."""

    model: PresetName | None = None
    """Model preset, such as `small`; `tiny` by default on a CPU, `matrix` on GPUs."""

    defaults: ClassVar[dict[str, tuple[Any, Any]]] = {
        "model": ("tiny", "matrix"),
        "kernels": (CPU_KERNELS, GPU_KERNELS),
        "tr_batch_size": (2, 8),
        "steps_per_epoch": (3, 20),
    }


def matrix_cases(config: LmMatrixConfig, device: torch.device) -> list[list[Case]]:
    """A group of wrappers for each kernel."""
    model = config.given("model")
    return [
        [training_case(config, model, kernel, wrapper=wrapper) for wrapper in config.wrappers]
        for kernel in config.given("kernels")
    ]


def measure_wrappers(
    group: list[Case], config: LmMatrixConfig, device: torch.device
) -> list[dict[str, Any]]:
    """The figures of the wrappers of one kernel, beside `none` and the losses of one process."""
    groups = make_groups(config.timeout)
    reference: list[float] = []
    # where the kernel does not run, each training says so
    with contextlib.suppress(ValueError):
        steps = one_process(group[0], config, compared_steps(group[0]), groups)
        reference = [step.loss for step in steps]
    rows = measure_trainings(group, config, groups)
    for case in group:
        row = rows[case.wrapper]
        if row["status"] != "ok":
            continue
        row |= beside_none(row, rows.get("none", {}))
        # in `none` each rank sees its own batches alone
        if case.wrapper != "none" or case.ranks == 1:
            row["reference_losses"] = reference
            row["loss_difference"] = loss_difference(row["losses"], reference)
    return [*rows.values()]


def beside_none(row: Mapping[str, Any], none: Mapping[str, Any]) -> dict[str, Any]:
    """Scaling efficiency and memory overhead of a wrapper, epoch by epoch."""
    efficiency, spread = time_ratio(none.get("times_ms", []), row["times_ms"])
    memory = none.get("peak_memory_bytes")
    return {
        "scaling_efficiency": efficiency,
        "iqr_scaling_efficiency": spread,
        "memory_overhead": row["peak_memory_bytes"] / memory - 1 if memory else None,
    }


def matrix_frame(records: list[dict[str, Any]]) -> pd.DataFrame:
    """The newest rows, with percentages and megabytes."""
    frame = training_frame(records)
    for name, shown in PERCENT.items():
        found = frame[name] if name in frame else pd.Series(None, frame.index)
        frame[shown] = [None if value is None else round(100 * value, 2) for value in found]
    frame["peak_memory_mb"] = [value and value / 1e6 for value in frame["peak_memory_bytes"]]
    return frame


def overview(frame: pd.DataFrame) -> list[str]:
    """How `flashddp` compares on GPUs: a row for each setting and kernel."""
    rows = to_rows(frame)
    lines = []
    for row in rows:
        if (row["wrapper"], row["status"], row["backend"]) != ("flashddp", "ok", "nccl"):
            continue
        line = {"setting": row["setting"], "kernel": row["kernel"]}
        line |= ratios(row, rows, PEERS, "wrapper")
        line |= {"efficiency (%)": row["efficiency_percent"]}
        line |= {"memory overhead (%)": row["overhead_percent"]}
        lines.append(line | {"recorded": row["recorded"]})
    note = """× is how many times as fast `flashddp` is as another wrapper in the same run, epoch by
epoch; nothing where they did not run together."""
    return [section("How flashddp compares", note, table(lines))] if lines else []


def remarks(rows: pd.DataFrame) -> list[str]:
    """The remarks below a setting: caveats, and which cells failed."""
    return notes(rows, "kernel", "wrapper")


# File -> the figure that it shows, and its axis; a panel for each setting.
CHARTS = {
    "lm_matrix_time.png": ("median_ms", "time a step (ms)"),
    "lm_matrix_memory.png": ("peak_memory_mb", "peak memory of a rank (MB)"),
    "lm_matrix_throughput.png": ("tokens_per_s", "tokens/s of all ranks"),
    "lm_matrix_losses.png": ("loss_difference", "largest loss difference (nats per token)"),
}
REPORT = Report(
    "lm_matrix",
    "Attention kernels and data-parallel wrappers",
    COLUMNS,
    note=NOTE,
    by=("setting",),
    rows=matrix_frame,
    overview=overview,
    further=remarks,
    charts=[
        Chart(file, "bars", "kernel", y, "wrapper", ("setting",), ("attention kernel", label))
        for file, (y, label) in CHARTS.items()
    ],
    text="_report.md",
    table="_results.csv",
)
benchmark_lm_matrix = Benchmark(REPORT, matrix_cases, measure_wrappers)
