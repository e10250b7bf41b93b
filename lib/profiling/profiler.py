"""`python -m lib profile`: a few training steps under PyTorch's profiler.

`profile` runs the steps and writes their trace, its summary as a record and as tables, and the
memory of one step by category.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.core import ranges
from lib.core.allocator import synchronize, without_stderr
from lib.core.files import make_folder, write_atomically
from lib.core.hardware import DtypeName, keep_freed_memory, pick_device, pick_dtype
from lib.core.records import new_record, to_markdown
from lib.core.settings import NonNegativeInt, PositiveInt, settings, to_json
from lib.data.batches import random_tokens
from lib.model.config import AttentionKernel, ModelConfig, PresetName, model_preset
from lib.model.costs import num_parameters
from lib.profiling.figures import save_memory_figure, save_time_figure
from lib.profiling.memory_timeline import MemoryTimeline, memory_snapshot, profile_memory
from lib.profiling.trace import read_trace, step_events
from lib.profiling.trace_summary import STEP, Summary, summarize
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.step import TrainStep, new_step, numerics

LEARNING_RATE = 1e-4
TRACE = "trace.json.gz"
# One step of it, small enough to commit.
STEP_TRACE = "step.json.gz"
# Not every profile writes these: those of an earlier one must not lie beside a later summary.
OPTIONAL_FILES = ("memory.png", "memory_snapshot.pickle", "nsys.nsys-rep")
# rows and characters in the table of kernels
SHOWN_KERNELS = 15
NAME_WIDTH = 72


@settings
class ProfileConfig:
    """A few training steps of a model under PyTorch's profiler."""

    model: PresetName = "tiny"
    """A model preset."""

    batch_size: PositiveInt = 8
    """Sequences per step."""

    context_length: PositiveInt | None = None
    """Tokens per sequence (default: the preset's)."""

    attention_kernel: AttentionKernel = "sdpa"
    """Implementation of attention."""

    dtype: DtypeName = "auto"
    """dtype of activations and matmuls: `auto`, `float32`, `bfloat16` or `float16`."""

    low_precision_weights: bool = False
    """Store weight matrices in `dtype`, with float32 masters in AdamW."""

    compile: bool = False
    """Compile the model with `torch.compile`."""

    cuda_graph: bool = False
    """Record the whole step once as a CUDA graph and replay it."""

    warmup_steps: PositiveInt = 3
    """Steps before the profile, which compile and allocate."""

    steps: PositiveInt = 3
    """Steps in the profile."""

    memory: bool = True
    """Also profile the memory of one further step."""

    nvtx: bool = False
    """Only run the steps, with NVTX ranges, between the marks that `nsys profile` waits for."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    seed: NonNegativeInt = 0
    """Seed of weights and tokens."""

    output: Path = Path("artifacts/profile")
    """Folder for trace, tables and figures; replaces those of an earlier profile."""

    def train_config(self) -> TrainConfig:
        """Return the settings of the training run whose steps are profiled."""
        model = dataclasses.replace(
            model_preset(self.model), attention_kernel=self.attention_kernel
        )
        if self.context_length is not None:
            model = dataclasses.replace(model, context_length=self.context_length)
        return TrainConfig(
            model=model,
            optimizer=OptimizerConfig(warmup_steps=0),
            steps=self.warmup_steps + self.steps,
            batch_size=self.batch_size,
            compile=self.compile,
            cuda_graph=self.cuda_graph,
            low_precision_weights=self.low_precision_weights,
        )


def profile(config: ProfileConfig) -> Summary | None:
    """Profile training steps, write the results to `config.output` and print the summary.

    Writes `trace.json.gz` (for ui.perfetto.dev), `step.json.gz` (one step of it, small enough to
    commit), `summary.md`, `summary.json` (a record), `config.json`, `time.png`, `memory.png` and,
    on CUDA, `memory_snapshot.pickle` (for pytorch.org/memory_viz). There it also prints the command
    line that profiles the same ranges with Nsight Systems. With `config.nvtx` it only runs the
    steps, writes nothing and returns None: that command line starts it so.
    """
    device = pick_device(config.device)
    _check_device(config, device)
    train_config = config.train_config()
    dtype = pick_dtype(device, config.dtype)
    if device.type == "cpu":
        keep_freed_memory()
    with numerics(tf32=True, deterministic=False):
        if config.nvtx:
            step, sequences = _warm_step(config, train_config, device, dtype)
            _run_for_nsys(step, sequences, config)
            return None
        make_folder(config.output)
        for name in OPTIONAL_FILES:
            (config.output / name).unlink(missing_ok=True)

        # profile memory first: a replayed CUDA graph would allocate nothing
        step, sequences = _warm_step(config, train_config, device, dtype)
        memory = None
        with without_stderr():
            if config.memory:
                snapshot = memory_snapshot(config.output / "memory_snapshot.pickle")
                with snapshot if device.type == "cuda" else nullcontext():
                    take = functools.partial(step, sequences, LEARNING_RATE)
                    memory = profile_memory(take, step.model, step.optimizer, device=device)
            step.use_cuda_graph(config.cuda_graph)
            trace_steps(step, sequences, config.output / TRACE, steps=config.steps)
    write_step_trace(config.output)
    summary = summarize(read_trace(config.output / TRACE))
    print(_write_results(config, train_config.model, summary, memory, device))
    write_atomically(config.output / "config.json", to_json(config))
    if device.type == "cuda":
        print(f"The same for Nsight Systems:\n{shlex.join(nsys_command(config))}")
    return summary


def _check_device(config: ProfileConfig, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {str(device)!r}")
    for field in ("cuda_graph", "nvtx"):
        if getattr(config, field) and device.type != "cuda":
            raise ValueError(f"device must be cuda or cuda:N for {field}, got {str(device)!r}")


def _warm_step(
    config: ProfileConfig, train_config: TrainConfig, device: torch.device, dtype: torch.dtype
) -> tuple[TrainStep, Tensor]:
    """Return a training step after warmup, not yet a CUDA graph, and sequences for it."""
    shape = train_config.model
    eager = dataclasses.replace(train_config, cuda_graph=False)
    step = new_step(eager, device, dtype, seed=config.seed)
    size = config.batch_size * (shape.context_length + 1)
    tokens = random_tokens(size, shape.vocab_size, config.seed)
    sequences = torch.from_numpy(tokens.astype("int64")).view(config.batch_size, -1).to(device)
    for _ in range(config.warmup_steps):
        step(sequences, LEARNING_RATE)
    return step, sequences


def trace_steps(step: TrainStep, sequences: Tensor, path: Path, *, steps: int) -> None:
    """Write the trace of `steps` training steps to `path`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if step.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # records the CUDA graph, if there is one
    step(sequences, LEARNING_RATE)
    with torch.profiler.profile(activities=activities) as profiler:
        # the first profiled step is slow; without ranges it does not count
        step(sequences, LEARNING_RATE)
        synchronize(step.device)
        with ranges.enabled():
            for _ in range(steps):
                step(sequences, LEARNING_RATE)
        synchronize(step.device)
    profiler.export_chrome_trace(str(path))


def write_step_trace(folder: Path) -> None:
    """Write one step of the trace in `folder`, without what a drawing does not need."""
    events = json.loads(gzip.decompress((folder / TRACE).read_bytes()))["traceEvents"]
    text = json.dumps({"traceEvents": step_events(events, STEP)}, separators=(",", ":"))
    write_atomically(folder / STEP_TRACE, gzip.compress(text.encode(), compresslevel=9, mtime=0))


def _write_results(
    config: ProfileConfig,
    shape: ModelConfig,
    summary: Summary,
    memory: MemoryTimeline | None,
    device: torch.device,
) -> str:
    """Write record, tables and figures; return the text of `summary.md`."""
    folder = config.output
    peak = None if memory is None else memory.peak()
    tokens = config.batch_size * shape.context_length
    figures = {
        "model": config.model,
        "parameters": num_parameters(shape),
        "batch_size": config.batch_size,
        "context_length": shape.context_length,
        "tokens_per_s_profiled": tokens / summary.wall_ms * 1e3,
        **figures_of(summary, peak),
    }
    record = new_record(figures, config=config, seed=config.seed, device=device)
    write_atomically(folder / "summary.json", json.dumps(record, indent=1, ensure_ascii=False))

    modes = ("compile", "cuda_graph", "low_precision_weights")
    mode = " + ".join(name for name in modes if getattr(config, name)) or "eager"
    text = (
        f"# Profile of {summary.steps} training steps\n\n"
        f"{config.model}, {config.batch_size} × {shape.context_length} tokens, "
        f"{config.attention_kernel}, dtype {config.dtype}, {mode}. "
        f"{record['device']}, torch {record['versions']['torch']}, {record['date']}. "
        "The profiler slows the host down.\n\n"
    )
    text += summary_markdown(summary, peak)
    write_atomically(folder / "summary.md", text)
    save_time_figure(figures, folder / "time.png")
    if memory is not None:
        save_memory_figure(memory, folder / "memory.png")
    return text


def figures_of(summary: Summary, memory: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the figures of a profile's record; times are ms per step.

    Args:
        memory: bytes of each category at the step's peak.
    """
    names = ("wall_ms", "busy_ms", "idle_ms", "dispatch_ms", "wait_ms", "kernels", "launches")
    names += ("communication_ms", "exposed_communication_ms", "overlapped_communication_ms")
    figures = {
        "task": "profile",
        "profiled": summary.device,
        "steps": summary.steps,
        **{name: getattr(summary, name) for name in names},
        "ms_by_category": {row.category: row.ms for row in summary.by_category},
        "share_by_category": {row.category: row.share for row in summary.by_category},
        "calls_by_category": {row.category: row.calls for row in summary.by_category},
        "ranges": [row._asdict() for row in summary.by_range],
        "kernel_times": [row._asdict() for row in summary.by_kernel[:SHOWN_KERNELS]],
    }
    if memory is not None:
        figures["peak_memory_bytes"] = sum(memory.values())
        figures["peak_bytes_by_category"] = dict(memory)
    return figures


def summary_markdown(summary: Summary, memory: Mapping[str, int] | None = None) -> str:
    """Return the tables of a profile, all values per step; `memory` as in `figures_of`."""
    on_gpu = summary.device == "gpu"
    unit = "kernel" if on_gpu else "operator"
    categories: list[dict[str, Any]] = [
        {"category": row.name, f"{unit}s": _count(row.calls), "ms": row.ms, "%": row.share * 100}
        for row in summary.by_category
        if row.calls
    ]
    kernels = [
        {unit: short_kernel_name(row.name), "category": row.category, "calls": _count(row.calls)}
        | {"ms": row.ms, "%": row.share * 100}
        for row in summary.by_kernel[:SHOWN_KERNELS]
    ]
    named_ranges = [
        {"range": row.name, "calls": _count(row.calls), "host (ms)": row.host_ms}
        | ({"kernels launched in it (ms)": row.device_ms} if on_gpu else {})
        for row in summary.by_range
    ]
    gaps = []
    for row in summary.gaps:
        is_last = row.longest_us == float("inf")
        end = "µs or more" if is_last else f"to {row.longest_us:,.0f} µs"
        length = f"{row.shortest_us:,.0f} {end}"
        gaps.append({"length": length, "gaps": _count(row.count), "ms": row.ms})
    tables = {
        "": _overview(summary),
        "## Time by category\n\n": categories,
        f"## Time by {unit}\n\n": kernels,
        "## Time by range\n\n": named_ranges,
        f"## Gaps between {unit}s\n\n": gaps,
    }
    if memory is not None:
        sizes = {**memory, "in all": sum(memory.values())}
        rows = [{"category": name, "MB": size / 1e6} for name, size in sizes.items()]
        tables["## Memory at the step's peak\n\n"] = rows
    return "\n".join(title + to_markdown(rows) for title, rows in tables.items() if rows)


def _overview(summary: Summary) -> list[dict[str, Any]]:
    on_gpu = summary.device == "gpu"
    share = 100 / summary.wall_ms if summary.wall_ms else 0.0
    rows: list[tuple[str, float | None, str]] = [
        ("wall time", summary.wall_ms, "ms"),
        ("GPU busy" if on_gpu else "in operators", summary.busy_ms, "ms"),
        ("… of the wall time", summary.busy_ms * share, "%"),
        ("GPU idle" if on_gpu else "between operators", summary.idle_ms, "ms"),
        ("host dispatches", summary.dispatch_ms, "ms"),
        ("host waits for the GPU", summary.wait_ms, "ms"),
        ("kernels" if on_gpu else "operators that do work", _count(summary.kernels), ""),
        ("launches", _count(summary.launches), ""),
    ]
    if summary.communication_ms:
        overlapped = summary.overlapped_communication_ms / summary.communication_ms
        rows += [
            ("communication", summary.communication_ms, "ms"),
            ("… behind other kernels", overlapped * 100, "%"),
            ("… exposed", summary.exposed_communication_ms, "ms"),
        ]
    return [
        {"a step": what, "": value, "unit": unit} for what, value, unit in rows if value is not None
    ]


def _count(value: float | None) -> float | None:
    """Return a mean that is whole as an int, which tables show without decimals."""
    return int(value) if value is not None and float(value).is_integer() else value


def short_kernel_name(name: str) -> str:
    """Return a kernel's name without C++'s return type and namespaces, cut to a table's width."""
    name = name.removeprefix("void ")
    name = name.replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"


def nsys_command(config: ProfileConfig) -> list[str]:
    """Return the command line that profiles the same steps with Nsight Systems."""
    return [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *("--force-overwrite=true", f"--output={config.output / 'nsys'}"),
        *(sys.executable, "-m", "lib", "profile"),
        *(f"--config={config.output / 'config.json'}", "--nvtx"),
    ]


def _run_for_nsys(step: TrainStep, sequences: Tensor, config: ProfileConfig) -> None:
    """Take the steps between cudaProfilerStart and cudaProfilerStop."""
    step.use_cuda_graph(config.cuda_graph)
    # records the CUDA graph, if there is one
    step(sequences, LEARNING_RATE)
    synchronize(step.device)
    with ranges.enabled(nvtx=True):
        torch.cuda.profiler.start()
        for _ in range(config.steps):
            step(sequences, LEARNING_RATE)
        synchronize(step.device)
        torch.cuda.profiler.stop()
