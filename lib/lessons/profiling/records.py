"""GPU measurements from `artifacts/`: each function makes the rows of a table or a picture.

Functions that return rows print the device and the date of the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib import pyplot as plt

from lib.core.files import ROOT
from lib.core.records import Record, read_records
from lib.lessons.profiling.simulated import Kernel

if TYPE_CHECKING:
    from lib.profiling.roofline import Limits, MeasuredOperation
    from lib.profiling.trace import Trace

ARTIFACTS = ROOT / "artifacts"
PROFILES = ARTIFACTS / "profile_h200"
# The folder of a profile -> what the notebook calls it.
PROFILE_NAMES = {
    "matrix_eager": "matrix, launched one by one",
    "matrix_graph": "matrix, one CUDA graph",
    "eager": "gpt2-124m, launched one by one",
    "eager_textbook": "gpt2-124m, naive attention",
}
# The trace's name -> the profile that it is taken from; one block of its forward pass.
ANONYMOUS = {"A": "eager_textbook", "B": "matrix_eager", "C": "eager"}
# The figures that identify a record among those of one benchmark run.
IDENTITY = ("task", "model", "candidate", "name", "size", "numbers", "tokens")


def place_of(*records: Record) -> str:
    """The devices and the dates of records, or of their rows: of all those that are shown.

    >>> first = {"device": "NVIDIA H200", "date": "2026-11-21T18:32:57+00:00"}
    >>> place_of(first)
    'NVIDIA H200, 2026-11-21'
    >>> place_of({**first, "date": "2026-11-27T09:00:00+00:00"}, first)
    'NVIDIA H200, 2026-11-21 to 2026-11-27'
    """
    devices = " and ".join(sorted({record["device"] for record in records}))
    dates = sorted({f"{record['date']:.10}" for record in records})
    return f"{devices}, {' to '.join([dates[0], *dates[1:][-1:]])}"


def newest_records(path: str | os.PathLike) -> list[Record]:
    """Read the records at `path`, keeping the last for each device and measurement.

    A measurement is identified by its figures' names (IDENTITY) if they have a task, else by its
    config.
    """
    newest = {}
    for record in read_records(path):
        figures = record["figures"]
        names = [figures.get(key) for key in IDENTITY] if "task" in figures else record["config"]
        newest[json.dumps([record["device"], names], sort_keys=True)] = record
    return list(newest.values())


def _of_task(task: str) -> list[Record]:
    records = newest_records(ARTIFACTS / "roofline.jsonl")
    return [record for record in records if record["figures"]["task"] == task]


def calls() -> list[dict[str, Any]]:
    """Matmuls on a GPU: when the call returns, and when the result is there."""
    rows = []
    for record in (shown := _of_task("call")):
        size, returned, done = (record["figures"][k] for k in ("size", "returned_ms", "done_ms"))
        flops = 2e-9 * size**3
        row = {"matmul": f"{size:,} × {size:,}", "the call returns (ms)": returned}
        row |= {"the result is there (ms)": done, "TFLOP/s, read too early": flops / returned}
        rows.append(row | {"TFLOP/s, really": flops / done})
    return _placed(rows, shown)


def sizes_on_gpu() -> dict[int, float]:
    """Numbers in a tensor -> µs of one elementwise operation, on the recorded GPU."""
    figures = [record["figures"] for record in _of_task("size")]
    return {row["numbers"]: 1e3 * row["min_ms"] for row in figures}


class Profile(NamedTuple):
    """A recorded training step under the profiler; times in ms."""

    name: str
    step_ms: float
    busy_ms: float
    """In which the GPU computes."""

    kernels: int


def profile_record(folder: str) -> Record:
    """The record of a profiled step."""
    return json.loads((PROFILES / folder / "summary.json").read_text(encoding="utf-8"))


def profiles() -> dict[str, Profile]:
    """The profiled steps by folder (see PROFILE_NAMES)."""
    found = {}
    for folder, name in PROFILE_NAMES.items():
        figures = profile_record(folder)["figures"]
        times = (figures["wall_ms"], figures["busy_ms"])
        found[folder] = Profile(name, *times, round(figures["kernels"]))
    return found


@cache
def recorded_trace(folder: str) -> Trace:
    """One step of a recorded profile, kernel by kernel."""
    from lib.profiling.trace import read_trace

    return read_trace(PROFILES / folder / "step.json.gz")


def show_gpu_timelines(*folders: str, start_ms: float = 0, end_ms: float | None = None) -> None:
    """Show recorded steps as timelines on the same time axis, all of it or a part."""
    from lib.profiling.figures import draw_trace

    records = {name: profile_record(name) for name in folders}
    last = end_ms or max(record["figures"]["wall_ms"] for record in records.values())
    figure, panels = plt.subplots(
        nrows=len(folders), figsize=(9, 0.7 + 1.7 * len(folders)), squeeze=False
    )
    labels: dict[str, Any] = {}
    for axes, name in zip(panels[:, 0], folders):
        place = f"{place_of(records[name])}, under the profiler"
        title = f"{PROFILE_NAMES[name]} ({place})"
        draw_trace(axes, recorded_trace(name), title=title, start_ms=start_ms, end_ms=last)
        labels |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    for axes in panels[:-1, 0]:
        axes.set_xlabel("")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=6)
    plt.show()


def ways_to_launch() -> list[dict[str, Any]]:
    """Training steps without the profiler: plain PyTorch, compiled, and compiled as one graph."""
    names = {
        "none of these": "plain PyTorch (ms)",
        "without CUDA graph": "compiled (ms)",
        "all": "compiled, one CUDA graph (ms)",
    }
    records = newest_records(ARTIFACTS / "training_benchmark.jsonl")
    shown = [record for record in records if record["figures"]["candidate"] in names]
    found: dict[str, dict[str, Any]] = {}
    for record in shown:
        figures = record["figures"]
        row = found.setdefault(figures["model"], {"model": figures["model"]})
        row[names[figures["candidate"]]] = figures["median_ms"]
        if figures["candidate"] == "all":
            row["first step with the graph (ms)"] = 1e3 * figures["first_step_s"]
    order = ["model", *names.values(), "first step with the graph (ms)"]
    return _placed([{key: row[key] for key in order} for row in found.values()], shown)


def block_on_gpu() -> tuple[Limits, list[MeasuredOperation], str]:
    """Limits of the recorded GPU, the operations of a block on it, and what they are, in words."""
    from lib.profiling.roofline import points_of

    records = [*_of_task("limits"), *_of_task("operation")]
    asked = records[-1]["config"]
    sizes = f"{asked['dtype']}, {asked['batch_size']} × {asked['context_length']:,} tokens"
    return *points_of(records), f"a block of {asked['model']}, {sizes}, {place_of(*records)}"


def block_rows(limits: Limits, points: Iterable[MeasuredOperation]) -> list[dict[str, Any]]:
    """The operations of a block: what they do a byte, how long they take, and their limit."""
    return [
        {
            "operation": point.name,
            "FLOP/byte": point.cost.intensity,
            "time (ms)": point.median_ms,
            "its limit": "arithmetic" if point.cost.intensity > limits.ridge else "memory",
            "of its roof": f"{limits.share(point):.0%}",
        }
        for point in points
    ]


def anonymous_traces() -> dict[str, list[Kernel]]:
    """Three recorded stretches, name -> kernels: those of a block in the middle, forward."""
    traces = {}
    for name, folder in ANONYMOUS.items():
        trace = recorded_trace(folder)
        blocks = [span for span in trace.ranges if span.name.startswith("block ")]
        block = blocks[len(blocks) // 2]
        launched = {c.correlation for c in trace.calls if block.start <= c.start < block.end}
        inside = [kernel for kernel in trace.kernels if kernel.correlation in launched]
        traces[name] = [Kernel(k.start, k.end, k.name) for k in inside]
    return traces


def _steps(kernel: str = "sdpa") -> list[Record]:
    records = newest_records(ARTIFACTS / "step_benchmark.jsonl")
    is_shown = {"mode": "full_step", "dtype": "bfloat16", "compile": False}
    is_shown["attention_kernel"] = kernel
    return [r for r in records if is_shown.items() <= r["config"].items()]


def peak_memory() -> list[dict[str, Any]]:
    """Peak memory of training steps by context, with fused and with naive attention."""
    rows, shown = [], []
    for kernel, name in (("sdpa", "fused"), ("vectorized_torch", "naive")):
        of_model = [record for record in _steps(kernel) if record["config"]["model"] == "small"]
        found = {record["config"]["seq_len"]: record["figures"] for record in of_model}
        row = {"attention": name}
        row |= {f"{n:,} tokens (GB)": found[n]["peak_memory_gb"] for n in sorted(found)}
        rows.append(row | {"1,024, by formula (GB)": found[max(found)]["predicted_memory_gb"]})
        shown += of_model
    return _placed(rows, shown, "small, 4 sequences, bfloat16")


def launch_bound_steps() -> list[dict[str, Any]]:
    """Training steps of four sizes with few and with many tokens, and what they launch."""
    few, many = (
        {record["config"]["model"]: record for record in _steps() if _tokens(record) == tokens}
        for tokens in (256, 1024)
    )
    rows = [
        {
            "model": model,
            "launches": few[model]["figures"]["launches"],
            "4 × 256 tokens (ms)": few[model]["figures"]["median_ms"],
            "4 × 1,024 tokens (ms)": many[model]["figures"]["median_ms"],
        }
        for model in few
    ]
    shown = [*few.values(), *many.values()]
    return _placed(rows, shown, "bfloat16, plain PyTorch, without the profiler")


def _tokens(record: Record) -> int:
    return record["config"]["seq_len"]


def predicted_steps(launch_ms: float) -> list[dict[str, Any]]:
    """Training steps of 4 × 1,024 tokens beside the time of their launches and their roof.

    Args:
        launch_ms: what the host takes to launch one operator.
    """
    from lib.model.config import model_preset
    from lib.profiling.roofline import predicted_ms

    limits, _, _ = block_on_gpu()
    shown = [r for r in _steps() if _tokens(r) == 1024 and r["figures"]["status"] == "ok"]
    rows = []
    for record in shown:
        asked, figures = record["config"], record["figures"]
        shape = replace(model_preset(asked["model"]), context_length=1024)
        device = predicted_ms(shape, asked["batch_size"], 1024, limits, element_bytes=2)
        host, took = launch_ms * figures["launches"], figures["median_ms"]
        row = {"model": asked["model"], "launches": figures["launches"]}
        row |= {"the host launches (ms)": host, "the GPU, by its roof (ms)": device}
        row |= {"measured (ms)": took, "measured / the longer": took / max(host, device)}
        rows.append(row | {"MFU": f"{figures['mfu']:.0%}"})
    return _placed(rows, shown, "4 × 1,024 tokens, bfloat16, plain PyTorch")


def _placed(rows: list[dict[str, Any]], shown: list[Record], words: str = "") -> list[dict]:
    """Return the rows of a table, and print the device and the dates of the records in it."""
    print(", ".join(filter(None, (words, place_of(*shown)))))
    return rows
