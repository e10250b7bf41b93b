"""Experiments of notebook 04: training steps to measure, and their profiles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt

from lib.core.charts import bars
from lib.core.figures import BLUE, SKY

if TYPE_CHECKING:
    import torch
    from IPython.display import Image

    from lib.model.config import ModelConfig
    from lib.profiling.memory_timeline import MemoryTimeline
    from lib.profiling.roofline import Limits
    from lib.profiling.trace import Trace
    from lib.training.step import TrainStep


@dataclass(frozen=True)
class StepEstimate:
    """Predicted and measured time and memory of a training step."""

    name: str
    """Such as `8 × 128, float32`."""

    predicted_ms: float
    measured_ms: float | None
    """None: out of memory."""

    predicted_mb: float
    measured_mb: float | None
    """None: out of memory."""


def make_step(
    config: ModelConfig, batch_size: int, device: torch.device
) -> tuple[TrainStep, torch.Tensor]:
    """A training step of a fresh model, and sequences of random tokens for it."""
    import torch

    from lib.model import TransformerLM
    from lib.training import TrainConfig
    from lib.training.step import TrainStep

    model = TransformerLM(config, generator=torch.Generator().manual_seed(0)).to(device)
    settings = TrainConfig(model=config, batch_size=batch_size, steps=10**6)
    generator = torch.Generator().manual_seed(0)
    size = (batch_size, config.context_length + 1)
    sequences = torch.randint(config.vocab_size, size, generator=generator).to(device)
    return TrainStep(model, settings, device, torch.float32), sequences


def warm_up(step: Callable[[], Any], device: torch.device) -> None:
    """Call `step` a few times; on a GPU on a side stream, as recording a CUDA graph needs."""
    import torch

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    if stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream)


def trace_of(profiler: torch.profiler.profile) -> Trace:
    """The trace that a profiler has recorded."""
    from lib.profiling.trace import read_trace

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def show_trace(trace: Trace, *, title: str) -> None:
    """Show a trace as a timeline."""
    from lib.profiling.figures import draw_trace

    _, axes = plt.subplots(figsize=(9, 2.6))
    draw_trace(axes, trace, title=title, legend="below")
    plt.show()


def profile_step_memory(
    step: TrainStep, sequences: torch.Tensor, device: torch.device
) -> MemoryTimeline:
    """Record the memory of one training step by category."""
    from lib.core.allocator import without_stderr
    from lib.profiling.memory_timeline import profile_memory
    from lib.profiling.profiler import LEARNING_RATE

    with without_stderr():
        return profile_memory(
            lambda: step(sequences, LEARNING_RATE), step.model, step.optimizer, device=device
        )


def memory_image(timeline: MemoryTimeline) -> Image:
    """A step's memory over time, category stacked upon category."""
    from IPython.display import Image

    from lib.profiling.figures import save_memory_figure

    peak = timeline.peak()
    words = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in peak.items())
    alt = (
        f"Memory over a step by category. At the peak, {sum(peak.values()) / 1e6:,.0f} MB: {words}."
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.png"
        save_memory_figure(timeline.times_ms, timeline.num_bytes, path, phases=timeline.phases)
        return Image(path.read_bytes(), retina=True, alt=alt)


def step_estimator(
    preset: str,
    device: torch.device,
    limits: dict[str, Limits],
    *,
    contexts: Sequence[int],
    dispatch_ms: float,
    samples: int,
) -> Callable[[int, int, str], StepEstimate]:
    """Return a function (batch size, context, dtype) -> a training step, predicted and measured.

    Args:
        limits: by dtype.
        dispatch_ms: what the host takes to launch the step's operations.
    """
    from lib.profiling.roofline import predicted_ms
    from lib.tools.benchmarks import step as benchmark
    from lib.tools.benchmarks.harness import grid

    config = benchmark.StepBenchmarkConfig()
    fixed: dict = {"mode": "full_step", "tf32": False, "compile": False, "attention_kernel": "sdpa"}
    fixed |= {"warmup": 2, "samples": samples, "max_seconds": 0.5}

    def estimate(batch: int, length: int, dtype: str) -> StepEstimate:
        shape = {"model": preset, "batch_size": batch, "seq_len": length, "dtype": dtype}
        [case] = grid(**shape, **fixed)
        expected = benchmark.expect_step(case, device)
        found = benchmark.measure_step(case, config, device)
        predicted = predicted_ms(
            benchmark.shape_of(case),
            batch,
            length,
            limits[dtype],
            element_bytes=benchmark.dtype_of(case).itemsize,
            dispatch_ms=dispatch_ms,
            runs_ahead=device.type == "cuda",
        )
        memory = found.get("peak_memory_gb")
        megabytes = (1e3 * expected["predicted_memory_gb"], memory and 1e3 * memory)
        return StepEstimate(
            f"{batch} × {length}, {dtype}", predicted, found.get("median_ms"), *megabytes
        )

    return estimate


def show_estimates(estimates: Sequence[StepEstimate]) -> None:
    """Show bars of time and of memory, predicted above measured, for each of `estimates`."""
    size = (9.0, 1.5 + 0.6 * len(estimates))
    figure, panels = plt.subplots(ncols=2, sharey=True, figsize=size)
    units = {"ms": ("Time", "time of a step (ms)"), "mb": ("Memory", "peak memory (MB)")}
    for axes, (unit, (title, xlabel)) in zip(panels, units.items()):
        rows = {}
        for estimate in estimates:
            found = getattr(estimate, f"measured_{unit}")
            measured = "oom" if found is None else found
            predicted = getattr(estimate, f"predicted_{unit}")
            rows[estimate.name] = {"predicted": predicted, "measured": measured}
        bars(
            rows,
            axes=axes,
            title=title,
            xlabel=xlabel,
            ylabel="batch × context, dtype",
            texts="{:,.3g}",
            styles={"predicted": {"color": SKY}, "measured": {"color": BLUE}},
            legend="none",
        )
        axes.label_outer()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    plt.show()
