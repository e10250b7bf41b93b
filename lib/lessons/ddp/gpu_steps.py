"""Recorded steps of each data-parallel wrapper on two GPUs, kernel by kernel, for notebook 08.

A record has the milliseconds of steps that follow one another, and beside it is the trace of one
step on rank 0, which all ranks began together on idle GPUs. `none` is every rank by itself. All
were compiled block by block, FSDP in smaller parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib.core.files import ROOT
from lib.lessons.profiling.records import newest_records
from lib.profiling.profiler import STEP_TRACE
from lib.profiling.timeline import Timeline, step_timeline
from lib.profiling.trace import read_trace
from lib.profiling.trace_summary import STEP

FOLDER = ROOT / "artifacts/ddp_steps"
# `ddp_wrapper` of each recorded way to train.
WRAPPERS = ("none", "naive", "flat", "overlap", "flashddp", "fsdp")


@dataclass(frozen=True)
class GPUStep:
    """A recorded step, and its trace on rank 0."""

    name: str
    """The wrapper."""

    step_ms: float
    """A step of many, without the profiler."""

    timeline: Timeline


def recorded_steps() -> list[GPUStep]:
    """The recorded steps, in the order of `WRAPPERS`."""
    found = {record["config"]["name"]: record for record in newest_records(FOLDER / "steps.jsonl")}
    steps = []
    for name in filter(found.get, WRAPPERS):
        timeline = step_timeline(read_trace(FOLDER / name / STEP_TRACE), STEP)
        steps.append(GPUStep(name, found[name]["figures"]["step_ms"], timeline))
    return steps
