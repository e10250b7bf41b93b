"""Steps of each data-parallel wrapper on GPUs, kernel by kernel, recorded for notebook 08.

    torchrun --nproc-per-node=2 -m lib lessons gpu-steps

For each wrapper: milliseconds of steps that follow one another, then one step traced alone, which
all ranks begin together on idle GPUs. `none` is every rank by itself. All are compiled block by
block, FSDP in smaller parts.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.core.allocator import synchronize
from lib.core.files import ROOT, make_folder
from lib.core.records import append_record, new_record
from lib.core.settings import require
from lib.ddp.process_group import current_device, rank, world_size
from lib.lessons.profiling.records import newest_records
from lib.model.config import model_preset
from lib.model.transformer import TransformerLM
from lib.profiling.profiler import (
    LEARNING_RATE,
    STEP_TRACE,
    TRACE,
    trace_steps,
    write_step_trace,
)
from lib.profiling.timeline import Timeline, step_timeline
from lib.profiling.trace import read_trace
from lib.profiling.trace_summary import STEP
from lib.training.config import OptimizerConfig, TrainConfig, TrainingWrapper
from lib.training.step import TrainStep, numerics

FOLDER = ROOT / "artifacts/ddp_steps"
RECORDS = FOLDER / "steps.jsonl"
# `ddp_wrapper` of each measured way to train.
WRAPPERS: tuple[TrainingWrapper, ...] = ("none", "naive", "flat", "overlap", "flashddp", "fsdp")
WARMUP_STEPS, TIMED_STEPS, ROUNDS = 3, 5, 5


@dataclass(frozen=True)
class GPUStep:
    """A recorded step, and its trace on rank 0."""

    name: str
    """The wrapper."""

    step_ms: float
    """A step of many, without the profiler."""

    timeline: Timeline


def recorded_steps(folder: Path = FOLDER) -> list[GPUStep]:
    """The recorded steps, in the order of `WRAPPERS`."""
    found = {record["config"]["name"]: record for record in newest_records(folder / RECORDS.name)}
    steps = []
    for name in filter(found.get, WRAPPERS):
        timeline = step_timeline(read_trace(folder / name / STEP_TRACE), STEP)
        steps.append(GPUStep(name, found[name]["figures"]["step_ms"], timeline))
    return steps


def record_steps(
    model: str = "medium",
    batch_size: int = 128,
    context_length: int = 256,
    folder: Path = FOLDER,
    *,
    compiles: bool = True,
) -> Path:
    """Measure and trace all `WRAPPERS` on the ranks of this job; return the folder.

    Rank 0 writes `steps.jsonl` and, for each wrapper, a folder with `step.json.gz`.

    Args:
        model: a preset (`lib.model.config.PresetName`).
        batch_size: sequences a rank.
        context_length: tokens a sequence.
        compiles: whether models are compiled.

    Raises:
        ValueError: there is one rank only.
    """
    require(world_size() > 1, "lessons gpu-steps must run on several ranks, started by torchrun")
    alone = [dist.new_group([index]) for index in range(world_size())][rank()]
    hosts = dist.new_group(backend="gloo")
    device = current_device()
    shape = dataclasses.replace(model_preset(model), context_length=context_length)
    for name in WRAPPERS:
        config = TrainConfig(
            model=shape,
            optimizer=OptimizerConfig(warmup_steps=0),
            steps=10**6,
            batch_size=batch_size,
            dtype="bfloat16",
            compile=compiles and name == "fsdp",
            ddp_wrapper=name,
        )
        group = alone if name == "none" else None
        figures = _measure(config, group, hosts, folder, name, compiles=compiles)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rank() == 0:
            settings = {"name": name, "model": model, "batch_size": batch_size}
            settings |= {"context_length": context_length, "ranks": world_size()}
            record = new_record(figures, config=settings, seed=0, device=device)
            append_record(folder / RECORDS.name, record)
    return folder


def _measure(
    config: TrainConfig,
    group: dist.ProcessGroup | None,
    hosts: dist.ProcessGroup,
    folder: Path,
    name: str,
    *,
    compiles: bool,
) -> dict[str, Any]:
    """The figures of one way to train; rank 0 writes its trace."""
    device, shape = current_device(), config.model
    generator = torch.Generator(device).manual_seed(rank())
    size = (config.batch_size, shape.context_length + 1)
    tokens = torch.randint(shape.vocab_size, size, generator=generator, device=device)
    with numerics(tf32=True, deterministic=False):
        model = TransformerLM(shape, device=device, generator=generator.manual_seed(0))
        if compiles and name != "fsdp":
            # as overlap needs it; FSDP compiles smaller parts by itself
            model.compile_blocks()
        step = TrainStep(model, config, device, torch.bfloat16, group=group)
        for _ in range(WARMUP_STEPS):
            step(tokens, LEARNING_RATE)
        step.read_log()
        times = [_time_round(step, tokens, hosts) for _ in range(ROUNDS)]
        _trace(step, tokens, hosts, folder / name if rank() == 0 else None)
    return {
        "step_ms": statistics.median(times),
        "all_step_ms": times,
        "parameters": sum(param.numel() for param in model.parameters()),
    }


def _time_round(step: TrainStep, tokens: Tensor, hosts: dist.ProcessGroup) -> float:
    """Milliseconds of a step."""
    synchronize(step.device)
    dist.barrier(hosts)
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step(tokens, LEARNING_RATE)
    synchronize(step.device)
    end = time.perf_counter()
    step.read_log()
    return 1e3 * (end - start) / TIMED_STEPS


def _trace(step: TrainStep, tokens: Tensor, hosts: dist.ProcessGroup, folder: Path | None) -> None:
    """Trace a step that all ranks begin together on idle GPUs; keep it where there is a folder."""
    with tempfile.TemporaryDirectory() as name:
        begin = functools.partial(dist.barrier, hosts)
        trace_steps(step, tokens, Path(name) / TRACE, steps=1, begin=begin)
        step.read_log()
        if folder is not None:
            make_folder(folder)
            shutil.copy(write_step_trace(Path(name)), folder)
