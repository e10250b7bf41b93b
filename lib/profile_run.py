"""Profile a few training steps: trace, summary, memory timeline; and for Nsight Systems."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from lib import profiling
from lib.allocations import synchronise, without_stderr
from lib.config_profile import ProfileConfig
from lib.config_training import ModelConfig, OptimizerConfig, TrainConfig
from lib.data import random_tokens
from lib.files import make_folder, write_atomically
from lib.hardware import ROOT, keep_freed_memory, pick_device, pick_dtype
from lib.memory_profile import MemoryTimeline, memory_snapshot, profile_memory
from lib.model import TransformerLM
from lib.model_costs import num_parameters
from lib.model_presets import model_preset
from lib.plots_profile import save_memory_figure, save_time_figure
from lib.profile_report import figures_of, summary_markdown
from lib.report import Record, new_record
from lib.strict_json import to_json
from lib.trace_file import read_trace
from lib.trace_summary import Summary, summarise
from lib.train_step import TrainStep, numerics

LEARNING_RATE = 1e-4
TRACE = "trace.json.gz"
# Files that not every profile writes: an earlier one's must not stand beside a later summary.
LEFT_BY_SOME = ("memory.png", "memory_snapshot.pickle", "nsys.nsys-rep")


@dataclasses.dataclass(frozen=True)
class Profile:
    """What `profile` found, and where it is written."""

    summary: Summary
    memory: MemoryTimeline | None
    """None where it was not asked for."""

    record: Record
    folder: Path


def profile(config: ProfileConfig) -> Profile | None:
    """Run training steps as `config` says and write what PyTorch's profiler saw of them.

    Into `config.output`: `trace.json.gz` (for ui.perfetto.dev), `summary.md`, `summary.json` (a
    record), `time.png`, `memory.png`, on CUDA `memory_snapshot.pickle` (for pytorch.org/memory_viz)
    and, where `nsys` is installed, `nsys.nsys-rep`. Prints the summary, and the command line that
    profiles the same ranges with Nsight Systems. With `config.nvtx` only the steps run, and nothing
    is written: this is what that command line starts. It returns None.

    Raises:
        ValueError: an unknown preset, device or dtype; CUDA graph or NVTX without CUDA.
        OSError: `output` cannot be written to.
    """
    device = pick_device(config.device)
    check_device(config, device)
    train_config = training_config(config)
    dtype = pick_dtype(device, config.dtype)
    if device.type == "cpu":
        keep_freed_memory()
    with numerics(tf32=True, deterministic=False):
        if config.nvtx:
            run_for_nsys(config, train_config, device, dtype)
            return None
        make_folder(config.output)
        for name in LEFT_BY_SOME:
            (config.output / name).unlink(missing_ok=True)
        memory = watch(config, train_config, device, dtype)
    summary = summarise(read_trace(config.output / TRACE))
    found = write_results(config, train_config.model, summary, memory, device)
    print((config.output / "summary.md").read_text(encoding="utf-8"))
    run_nsys(config, device)
    return found


def check_device(config: ProfileConfig, device: torch.device) -> None:
    """Refuse what `device` cannot do."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; right is: cpu, cuda or cuda:N")
    for field in ("cuda_graph", "nvtx"):
        if getattr(config, field) and device.type != "cuda":
            raise ValueError(f"{field} is True on device {str(device)!r}; right is: a CUDA device")


def training_config(config: ProfileConfig) -> TrainConfig:
    """The training whose steps are profiled."""
    model = dataclasses.replace(
        model_preset(config.model), attention_kernel=config.attention_kernel
    )
    if config.context_length is not None:
        model = dataclasses.replace(model, context_length=config.context_length)
    return TrainConfig(
        model=model,
        optimizer=OptimizerConfig(warmup_steps=0),
        steps=config.warmup_steps + config.steps,
        batch_size=config.batch_size,
        compile=config.compile,
        cuda_graph=config.cuda_graph,
        low_precision_weights=config.low_precision_weights,
    )


def make_step(
    config: ProfileConfig, train_config: TrainConfig, device: torch.device, dtype: torch.dtype
) -> tuple[TrainStep, Tensor]:
    """A training step, warm but not yet recorded as a CUDA graph, and windows for it."""
    shape = train_config.model
    generator = torch.Generator().manual_seed(config.seed)
    model = TransformerLM(shape, generator=generator).to(device)
    if config.low_precision_weights:
        model.use_low_precision_weights(dtype)
    step = TrainStep(model, dataclasses.replace(train_config, cuda_graph=False), device, dtype)
    size = config.batch_size * (shape.context_length + 1)
    tokens = random_tokens(size, shape.vocab_size, config.seed)
    windows = torch.from_numpy(tokens.astype("int64")).view(config.batch_size, -1).to(device)
    for _ in range(config.warmup_steps):
        take(step, windows)
    return step, windows


def watch(
    config: ProfileConfig, train_config: TrainConfig, device: torch.device, dtype: torch.dtype
) -> MemoryTimeline | None:
    """Write the trace of the steps, after the memory of one was watched."""
    memory = None
    step, windows = make_step(config, train_config, device, dtype)
    with without_stderr():
        if config.memory:
            memory = watch_memory(step, windows, device, config.output)
        # recorded only now, since a replayed graph allocates nothing
        step.config = train_config
        trace_steps(step, windows, config, device, config.output / TRACE)
    return memory


def take(step: TrainStep, windows: Tensor) -> None:
    """One step of training."""
    step(windows, LEARNING_RATE)


def trace_steps(
    step: TrainStep, windows: Tensor, config: ProfileConfig, device: torch.device, path: Path
) -> None:
    """Write the trace of `config.steps` steps to `path`, compressed."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # records the graph
    take(step, windows)
    with torch.profiler.profile(activities=activities) as profiler:
        # the first step that is watched is slow, and without ranges it does not count
        take(step, windows)
        synchronise(device)
        with profiling.enabled():
            for _ in range(config.steps):
                take(step, windows)
        synchronise(device)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        write_atomically(path, gzip.compress(plain.read_bytes(), compresslevel=6, mtime=0))


def watch_memory(
    step: TrainStep, windows: Tensor, device: torch.device, folder: Path
) -> MemoryTimeline:
    """The memory of one step; on CUDA the allocator's history goes to `folder` too."""
    is_cuda = device.type == "cuda"
    snapshot = memory_snapshot(folder / "memory_snapshot.pickle") if is_cuda else nullcontext()
    with snapshot:
        return profile_memory(
            lambda: take(step, windows), step.model, step.optimizer, device=device
        )


def write_results(
    config: ProfileConfig,
    shape: ModelConfig,
    summary: Summary,
    memory: MemoryTimeline | None,
    device: torch.device,
) -> Profile:
    """Record, tables and figures of a profile."""
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
    text = f"# Profile of {summary.steps} training steps\n\n{describe(config, shape, record)}\n\n"
    write_atomically(folder / "summary.md", text + summary_markdown(summary, peak))
    save_time_figure(figures, folder / "time.png")
    if memory is not None:
        save_memory_figure(
            memory.times_ms, memory.num_bytes, folder / "memory.png", phases=memory.phases
        )
    return Profile(summary, memory, record, folder)


def describe(config: ProfileConfig, shape: ModelConfig, record: Record) -> str:
    """What was profiled, in a sentence."""
    how = [
        name for name in ("compile", "cuda_graph", "low_precision_weights") if getattr(config, name)
    ]
    return (
        f"{config.model}, {config.batch_size} × {shape.context_length} tokens, "
        f"{config.attention_kernel}, dtype {config.dtype}, {' + '.join(how) or 'eager'}. "
        f"{record['device']}, torch {record['versions']['torch']}, {record['date']}. "
        "The profiler slows the host down."
    )


def nsys_command(config: ProfileConfig) -> list[str]:
    """The command line that profiles the same steps with Nsight Systems."""
    nsys = ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node"]
    nsys += [
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
    ]
    nsys += [f"--output={config.output / 'nsys'}"]
    settings = f"--config={config.output / 'config.json'}"
    return [*nsys, sys.executable, "-m", "lib", "profile", settings, "--nvtx"]


def run_nsys(config: ProfileConfig, device: torch.device) -> None:
    """Print how to profile the same ranges with Nsight Systems; do it where that is possible."""
    write_atomically(config.output / "config.json", to_json(config))
    command = nsys_command(config)
    print(f"The same for Nsight Systems, on a CUDA device:\n{shlex.join(command)}")
    if not config.nsys or device.type != "cuda" or shutil.which("nsys") is None:
        return
    torch.cuda.empty_cache()
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    if done.returncode:
        print(f"nsys failed with exit code {done.returncode}:\n{done.stderr.strip()[-2000:]}")


def run_for_nsys(
    config: ProfileConfig, train_config: TrainConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Warm up, then take the steps between cudaProfilerStart and cudaProfilerStop."""
    step, windows = make_step(config, train_config, device, dtype)
    step.config = train_config
    take(step, windows)
    synchronise(device)
    with profiling.enabled(nvtx=True):
        torch.cuda.profiler.start()
        for _ in range(config.steps):
            take(step, windows)
        synchronise(device)
        torch.cuda.profiler.stop()
