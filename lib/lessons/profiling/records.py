"""GPU measurements from `artifacts/`: each function makes the rows of a table or a picture.

Functions that return rows print the device and the date of the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt

from lib.core.files import ROOT
from lib.core.records import Record, read_records
from lib.lessons.profiling.simulated import Kernel, kernels_of

if TYPE_CHECKING:
    from IPython.display import Image

    from lib.profiling.roofline import Limits, MeasuredOperation

ARTIFACTS = ROOT / "artifacts"
PROFILES = ARTIFACTS / "profile_h200"
# The folder of a profile -> what the notebook calls it.
PROFILE_NAMES = {
    "matrix_eager": "matrix, eager",
    "matrix_graph": "matrix, one CUDA graph",
    "eager": "gpt2-124m, eager",
    "compiled": "gpt2-124m, compiled",
    "compiled_graph": "gpt2-124m, compiled, one CUDA graph",
    "eager_textbook": "gpt2-124m, eager, naive attention",
}
# The figures that identify a record among those of one benchmark run.
IDENTITY = ("task", "model", "candidate", "name", "size", "numbers", "tokens")


def place_of(record: Record) -> str:
    """The device and the date of a record.

    >>> place_of({"device": "NVIDIA H200", "date": "2026-11-21T18:32:57+00:00"})
    'NVIDIA H200, 2026-11-21'
    """
    return f"{record['device']}, {record['date']:.10}"


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


def first_steps() -> list[dict[str, Any]]:
    """The first training step beside later ones, eager and compiled."""
    names = {"all": "compiled, one CUDA graph", "none of these": "eager"}
    rows = []
    for record in (records := newest_records(ARTIFACTS / "training_benchmark.jsonl")):
        figures = record["figures"]
        if figures["candidate"] in names and figures.get("first_step_s"):
            row = {"model": figures["model"], "step": names[figures["candidate"]]}
            row |= {"first (ms)": 1e3 * figures["first_step_s"], "later (ms)": figures["median_ms"]}
            rows.append(row)
    return _placed(rows, records)


def calls() -> list[dict[str, Any]]:
    """Matmuls on a GPU: when the call returns, and when the result is there."""
    rows = []
    for record in (records := newest_records(ARTIFACTS / "roofline.jsonl")):
        figures = record["figures"]
        if figures["task"] == "call":
            row = {"matmul": f"{figures['size']:,} × {figures['size']:,}"}
            returned, done = figures["returned_ms"], figures["done_ms"]
            row |= {"the call returns (ms)": returned, "the result is there (ms)": done}
            flops = 2e-9 * figures["size"] ** 3
            rows.append(row | {"TFLOP/s by the first": flops / returned, "really": flops / done})
    return _placed(rows, records)


def sizes_on_gpu() -> dict[int, float]:
    """Numbers in a tensor -> µs of one elementwise operation, on the recorded GPU."""
    records = newest_records(ARTIFACTS / "roofline.jsonl")
    figures = [record["figures"] for record in records if record["figures"]["task"] == "size"]
    return {row["numbers"]: 1e3 * row["min_ms"] for row in figures}


@dataclass(frozen=True)
class Profile:
    """A recorded training step under the profiler; times in ms."""

    name: str
    step_ms: float
    busy_ms: float
    """In which the GPU computes."""

    host_ms: float
    """In which the host launches."""

    kernels: int
    launches: int


def profiles() -> dict[str, Profile]:
    """The profiled steps by name (see PROFILE_NAMES)."""
    found = {}
    for folder, name in PROFILE_NAMES.items():
        figures = json.loads((PROFILES / folder / "summary.json").read_text())["figures"]
        times = (figures["wall_ms"], figures["busy_ms"], figures["dispatch_ms"])
        counts = round(figures["kernels"]), round(figures["launches"])
        found[name] = Profile(name, *times, *counts)
    return found


def show_gpu_timelines(*folders: str, zoom_ms: float | None = None) -> None:
    """Show recorded steps as timelines, all on the same time axis; `zoom_ms`: only the first ms.

    Of a profile without a recorded timeline, host and GPU are shown added up.
    """
    from lib.profiling.figures import draw_host_and_device, draw_trace
    from lib.profiling.trace import read_trace

    records = {name: json.loads((PROFILES / name / "summary.json").read_text()) for name in folders}
    place = place_of(next(iter(records.values())))
    if not all((PROFILES / name / "step.json.gz").is_file() for name in folders):
        figures = {PROFILE_NAMES[name]: record["figures"] for name, record in records.items()}
        _, axes = plt.subplots(figsize=(9, 1 + len(folders)))
        draw_host_and_device(axes, figures)
        axes.set_title(f"Training steps, {place}")
        plt.show()
        return
    longest = zoom_ms or max(record["figures"]["wall_ms"] for record in records.values())
    figure, panels = plt.subplots(
        nrows=len(folders), figsize=(9, 1.7 * len(folders)), squeeze=False
    )
    labels: dict[str, Any] = {}
    for axes, name in zip(panels[:, 0], folders):
        draw_trace(axes, read_trace(PROFILES / name / "step.json.gz"), end_ms=longest)
        axes.set_title(PROFILE_NAMES[name])
        labels |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.suptitle(f"{place}, under the profiler", fontsize=10)
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=6)
    plt.show()


def memory_picture() -> Image:
    """The memory of a recorded training step of gpt2-124m over time."""
    from IPython.display import Image

    record = json.loads((PROFILES / "eager/summary.json").read_text())
    figures = record["figures"]
    parts = figures["peak_bytes_by_category"]
    words = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts.items())
    alt = f"Memory over a step of gpt2-124m on {place_of(record)}. At the peak: {words}."
    return Image((PROFILES / "eager/memory.png").read_bytes(), retina=True, alt=alt)


def graph_gains() -> list[dict[str, Any]]:
    """Training steps with and without a CUDA graph."""
    names = {"all": "one CUDA graph", "without CUDA graph": "launched one by one"}
    found: dict[str, dict[str, Any]] = {}
    for record in (records := newest_records(ARTIFACTS / "training_benchmark.jsonl")):
        figures = record["figures"]
        if figures["candidate"] in names:
            row = found.setdefault(figures["model"], {"model": figures["model"]})
            row[f"{names[figures['candidate']]} (ms)"] = figures["median_ms"]
    rows = [
        row | {"times faster": row["launched one by one (ms)"] / row["one CUDA graph (ms)"]}
        for row in found.values()
    ]
    return _placed(rows, records)


def block_on_gpu() -> tuple[Limits, list[MeasuredOperation], str]:
    """Limits of the recorded GPU, the operations of a block on it, and what they are, in words."""
    from lib.profiling.roofline import points_of

    records = newest_records(ARTIFACTS / "roofline.jsonl")
    asked = records[-1]["config"]
    sizes = f"{asked['dtype']}, {asked['batch_size']} × {asked['context_length']:,} tokens"
    return *points_of(records), f"a block of {asked['model']}, {sizes}, {place_of(records[-1])}"


def anonymous_traces() -> dict[str, tuple[list[Kernel], float]]:
    """Three traces, name -> (kernels, µs of a launch), from recorded times of an H200's kernels.

    A and C: the recorded block, in order, with naive attention or with fused attention and with the
    norms, the rotation and the gate fused, which are taken to reach their roof. B: the latter with
    a thousandth of the tokens, where no kernel is shorter than the recorded shortest one.
    """
    from lib.profiling.roofline import NAIVE

    limits, points, _ = block_on_gpu()
    launch_us = 14.0
    shortest_us = min(sizes_on_gpu().values())
    chains = ("RMSNorm", "RoPE", "SiLU and gate")
    naive, fused, short = [], [], []
    for point in points:
        cost, recorded_us = point.cost, 1e3 * point.median_ms
        least_us = 1e3 * limits.least_ms(cost)
        naive += [] if point.name == "attention, fused" else [(recorded_us, *_work(cost))]
        if point.name not in NAIVE:
            us = least_us if point.name in chains else recorded_us
            fused.append((us, *_work(cost)))
            small = replace(cost, flops=cost.flops // 1000, num_bytes=cost.num_bytes // 30)
            short.append((max(shortest_us, us / 1000), *_work(small)))
    return {
        "A": (kernels_of(naive, launch_us), launch_us),
        "B": (kernels_of(short, launch_us, repeats=2), launch_us),
        "C": (kernels_of(fused, launch_us), launch_us),
    }


def _work(cost: Any) -> tuple[float, float]:
    return cost.flops, cost.num_bytes


def _steps(kernel: str = "sdpa") -> list[Record]:
    records = newest_records(ARTIFACTS / "step_benchmark.jsonl")
    is_shown = {"mode": "full_step", "dtype": "bfloat16", "compile": False}
    is_shown["attention_kernel"] = kernel
    return [r for r in records if is_shown.items() <= r["config"].items()]


def peak_memory() -> list[dict[str, Any]]:
    """Peak memory of training steps by context, with fused and with naive attention."""
    rows = []
    for kernel, name in (("sdpa", "fused"), ("vectorized_torch", "naive")):
        found = {r["config"]["seq_len"]: r["figures"] for r in _of_model(_steps(kernel), "small")}
        row = {"attention": name}
        row |= {f"{n:,} tokens (GB)": found[n]["peak_memory_gb"] for n in sorted(found)}
        rows.append(row | {"the last, by formula (GB)": found[max(found)]["predicted_memory_gb"]})
    return _placed(rows, _steps(), "small, 4 sequences, bfloat16")


def _of_model(records: Iterable[Record], model: str) -> list[Record]:
    return [record for record in records if record["config"]["model"] == model]


def predicted_steps() -> list[dict[str, Any]]:
    """Training steps at the longest context beside the sum of their operations' least times."""
    from lib.model.config import model_preset
    from lib.profiling.roofline import predicted_ms

    limits, _, _ = block_on_gpu()
    rows = []
    for record in (records := _steps()):
        asked, figures = record["config"], record["figures"]
        if asked["seq_len"] == 1024 and figures["status"] == "ok":
            shape = replace(model_preset(asked["model"]), context_length=1024)
            least = predicted_ms(shape, asked["batch_size"], 1024, limits, element_bytes=2)
            row = {"model": asked["model"], "by its roof (ms)": least}
            row |= {"measured (ms)": figures["median_ms"], "MFU": figures["mfu"]}
            rows.append(row | {"measured, to predicted": figures["median_ms"] / least})
    return _placed(rows, records, "4 × 1,024 tokens, bfloat16, eager")


def _placed(rows: list[dict[str, Any]], records: list[Record], words: str = "") -> list[dict]:
    """Return the rows of a table, and print the device and the date of the newest record."""
    print(", ".join(filter(None, (words, place_of(records[-1])))))
    return rows
