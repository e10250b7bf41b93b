"""Time and memory of training steps by model, context, mode, precision and compilation.

`predicted_memory` estimates how much memory a case with gradients takes. One whose estimate exceeds
the memory of a CPU is not tried.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pandas as pd
import torch

from lib.core.allocator import Function, count_launches
from lib.core.hardware import device_name, peak, peak_flops, pick_dtype
from lib.core.records import Record, to_frame
from lib.core.settings import NonEmpty, PositiveFloat, PositiveInt, settings
from lib.model.config import AttentionKernel, ModelConfig, PresetName, model_preset
from lib.model.costs import flops_per_token, num_parameters
from lib.profiling.measurement import measure
from lib.profiling.memory_formula import rank_memory
from lib.profiling.memory_timeline import held_blocks
from lib.tools.benchmarks.harness import Benchmark, SamplingConfig, grid, sampling
from lib.tools.benchmarks.sections import Report, newest
from lib.tools.benchmarks.sweep import Case
from lib.training.config import TrainConfig
from lib.training.step import TrainStep, new_step, numerics

# Default models and lengths.
CPU_SIZES = (("tiny",), (32, 64, 128))
GPU_SIZES = (("small", "medium", "large", "xl"), (128, 256, 512, 1024))
# A case is tried if its estimate is at most this many times the device's memory. A GPU reports what
# does not fit; a CPU's system may kill the process instead.
TRIED_UP_TO = {"cuda": 1.2}
NOTE = """`float32` is IEEE, a shorter type is autocast. Launches are kernels on a GPU and
operators on a CPU. `oom`: out of memory, or predicted to be."""
COLUMNS = {
    "seq_len": "context",
    "mode": "mode",
    "status": "status",
    "median_ms": "median (ms)",
    "mean_ms": "mean (ms)",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "launches": "launches",
    "peak_memory_gb": "peak memory (GB)",
    "predicted_memory_gb": "predicted (GB)",
}


@settings
class StepBenchmarkConfig(SamplingConfig):
    """Training steps by model size, context, mode, precision and compilation."""

    models: tuple[PresetName, ...] = ()
    """Model presets; if empty, `tiny` on CPU, `small` to `xl` on GPU."""

    batch_size: PositiveInt = 4
    """Sequences per step."""

    seq_lens: tuple[PositiveInt, ...] = ()
    """Tokens per sequence; if empty, 32, 64 and 128 on CPU, 128 to 1024 on GPU."""

    modes: Annotated[tuple[Literal["forward", "forward_backward", "full_step"], ...], NonEmpty] = (
        "forward",
        "forward_backward",
        "full_step",
    )
    """The loss alone, with its gradients, or with clipping and AdamW too."""

    precisions: Annotated[tuple[Literal["float32", "tf32", "mixed"], ...], NonEmpty] = ("float32",)
    """`mixed` runs matmuls in the 16-bit dtype that is fast on the device."""

    compiled: Annotated[tuple[bool, ...], NonEmpty] = (False,)
    """Whether each layer is fused with `torch.compile`."""

    attention_kernel: Annotated[tuple[AttentionKernel, ...], NonEmpty] = ("sdpa",)
    """Attention kernels."""

    samples: PositiveInt = 10
    """Samples of each case; fewer, but at least 3, if they exceed max_seconds."""

    max_seconds: PositiveFloat = 2.0
    """Approximate time limit for the samples of one case."""


def step_cases(config: StepBenchmarkConfig, device: torch.device) -> list[Case]:
    """A case for each step on (batch_size, seq_len) tokens that `config` asks for."""
    models, lengths = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    # "auto" is float32 on a CPU, which has bfloat16 too
    short = pick_dtype(device, "auto" if device.type == "cuda" else "bfloat16")
    cases = []
    for precision in config.precisions:
        cases += grid(
            model=config.models or models,
            compile=config.compiled,
            dtype=str(short).removeprefix("torch.") if precision == "mixed" else "float32",
            tf32=precision == "tf32",
            attention_kernel=config.attention_kernel,
            seq_len=config.seq_lens or lengths,
            mode=config.modes,
            batch_size=config.batch_size,
            **sampling(config),
        )
    if any(_peak_flops(case, device) is None for case in cases):
        print(f"the peak FLOP/s of {device_name(device)} are not known, so there is no MFU")
    return cases


def shape_of(case: Case) -> ModelConfig:
    """The model of a case, for sequences of its length."""
    return dataclasses.replace(
        model_preset(case.model),
        context_length=case.seq_len,
        attention_kernel=case.attention_kernel,
    )


def dtype_of(case: Case) -> torch.dtype:
    """The data type of a case's matmuls."""
    return getattr(torch, case.dtype)


def measure_step(case: Case, config: StepBenchmarkConfig, device: torch.device) -> dict[str, Any]:
    """Measure a case, unless it is far too large; its estimate is a figure in any case."""
    predicted = predicted_memory(case, device)
    figures: dict[str, Any] = {
        "parameters": num_parameters(shape_of(case)),
        "flops": _flops_per_token(case) * case.batch_size * case.seq_len,
        "predicted_memory_gb": predicted and predicted / 1e9,
    }
    memory = (device_memory(device) or float("inf")) * TRIED_UP_TO.get(device.type, 1.0)
    if predicted is not None and predicted > memory:
        return figures | {"status": "oom", "was_tried": False}
    with numerics(tf32=case.tf32, deterministic=False):
        # time and memory
        step = _train_step(case, config.seed, device)
        fn = _function(step, case, config.seed)
        measured = measure(fn, device=device, **sampling(case))
        figures |= measured.figures() | {"was_tried": True}
        if measured.status == "oom":
            return figures

        # speed, memory of the model and its step together, launches
        rate = case.batch_size * case.seq_len / measured.median_ms * 1e3
        limit, allocated = _peak_flops(case, device), measured.peak_memory_bytes
        figures["tokens_per_s"] = rate
        figures["mfu"] = limit and rate * _flops_per_token(case) / limit
        if allocated is not None:
            figures["peak_memory_gb"] = (allocated + state_bytes(step)) / 1e9
        figures["launches"] = count_launches(fn, device)
        if case.compile:
            breaks = torch._dynamo.utils.counters["graph_break"]
            figures["graph_breaks"] = sum(breaks.values())
        # reference cycles would keep the optimizer's state until they are collected
        step.optimizer.state.clear()
        return figures


def _train_step(case: Case, seed: int, device: torch.device) -> TrainStep:
    """The training step of a case on a new model."""
    training = TrainConfig(model=shape_of(case), batch_size=case.batch_size, steps=10**6)
    step = new_step(training, device, dtype_of(case), seed=seed)
    if case.compile:
        # otherwise the compiler makes code for the lengths of earlier cases, too
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        step.model.compile_blocks()
    return step


def _function(step: TrainStep, case: Case, seed: int) -> Function:
    """The function to measure: the mode of `case`, on the same random tokens each time."""
    model = step.model
    generator = torch.Generator().manual_seed(seed)
    size = (case.batch_size, case.seq_len + 1)
    tokens = torch.randint(shape_of(case).vocab_size, size, generator=generator).to(step.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def forward() -> None:
        with torch.no_grad():
            step.parallel.loss(inputs, targets)

    def forward_backward() -> None:
        loss = step.parallel.loss(inputs, targets)
        (loss * step.loss_scale if step.uses_scale else loss).backward()
        model.zero_grad(set_to_none=True)

    def full_step() -> None:
        step(tokens, 1e-4)

    functions = {"forward": forward, "forward_backward": forward_backward, "full_step": full_step}
    return functions[case.mode]


def state_bytes(step: TrainStep) -> int:
    """Bytes that stay allocated between steps: weights, buffers and optimizer state."""
    held = held_blocks(step.model, step.optimizer)
    return sum(sum(blocks.values()) for kind, blocks in held.items() if kind != "gradients")


def _flops_per_token(case: Case) -> float:
    return flops_per_token(shape_of(case), backward=case.mode != "forward")


def _peak_flops(case: Case, device: torch.device) -> float | None:
    """The datasheet FLOP/s of the device for the matmuls of a case."""
    if device.type == "cuda" and case.dtype == "float32" and case.tf32:
        limits = peak(device_name(device))
        return limits.tf32 if limits else None
    return peak_flops(device, dtype_of(case))


def predicted_memory(case: Case, device: torch.device) -> int | None:
    """Estimate the peak memory of a step in bytes, the model included; None: not predictable.

    A full step takes what training does on one rank (`lib.profiling.memory_formula`), and gradients
    alone have no optimizer state. A forward pass alone is not predicted.
    """
    if case.mode == "forward":
        return None
    sizes: dict = {"batch_size": case.batch_size, "dtype": case.dtype}
    try:
        memory = rank_memory(shape_of(case), ranks=1, cuda=device.type == "cuda", **sizes)
    except ValueError:
        return None
    if case.mode == "forward_backward":
        memory = dataclasses.replace(memory, optimizer_state=0, update=0)
    return memory.peak


def device_memory(device: torch.device) -> int | None:
    """Total memory of `device` in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def step_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The newest record of each case, small models first."""

    def size(record: Record) -> int:
        return num_parameters(model_preset(record["config"]["model"]))

    frame = to_frame(sorted(newest(records), key=size))
    frame["precision"] = frame["dtype"].mask(frame["tf32"].map(bool), "TF32")
    return frame


REPORT = Report(
    "step_benchmark",
    "Training steps",
    COLUMNS,
    note=NOTE,
    by=("model", "batch_size", "precision", "compile", "attention_kernel"),
    rows=step_frame,
)
benchmark_step = Benchmark(REPORT, step_cases, measure_step)
