"""Experiments of notebook 04: training steps to measure, and their profiles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    import torch
    from IPython.display import Image

    from lib.model.config import ModelConfig
    from lib.profiling.memory_timeline import MemoryTimeline
    from lib.profiling.trace import Trace
    from lib.training.step import TrainStep


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
        save_memory_figure(timeline, path)
        return Image(path.read_bytes(), retina=True, alt=alt)
