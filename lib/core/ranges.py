"""Named ranges in the library's own code, which profilers show; nearly free when off.

    with ranges.enabled(), torch.profiler.profile() as profiler:
        step(batch, lr)

Ranges are off by default, and then cost a fraction of a microsecond. `enabled` turns them on for
the calling thread alone. On a GPU, autograd runs the backward pass in a thread of its own, so only
the range around the whole backward pass shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

# None: off. False: ranges for PyTorch's profiler. True: NVTX ranges as well.
_nvtx: ContextVar[bool | None] = ContextVar("nvtx", default=None)


@contextlib.contextmanager
def enabled(*, nvtx: bool = False) -> Iterator[None]:
    """Turn the ranges of `annotate` on inside the block.

    Args:
        nvtx: also open NVTX ranges, for NVIDIA's tools such as Nsight Systems.

    Raises:
        ValueError: `nvtx` without a CUDA device.
    """
    if nvtx and not torch.cuda.is_available():
        raise ValueError("nvtx must be False without a CUDA device, got True")
    token = _nvtx.set(nvtx)
    try:
        yield
    finally:
        _nvtx.reset(token)


def annotate(name: str) -> contextlib.AbstractContextManager[None]:
    """Name a block as a range.

    `torch.compile` drops ranges from the code that it compiles: it fuses across them, and names its
    kernels by what they do. A CUDA graph replays without the Python code that it was captured from,
    and so without its ranges.

    Example:
        >>> with annotate("forward"):
        ...     loss = model.loss(inputs, targets)
    """
    # the compiler takes the first test for a constant, so it traces nothing of what follows
    if torch.compiler.is_dynamo_compiling() or _nvtx.get() is None:
        return contextlib.nullcontext()
    return _open_range(name)


@contextlib.contextmanager
def _open_range(name: str) -> Iterator[None]:
    nvtx = torch.cuda.nvtx.range(name) if _nvtx.get() else contextlib.nullcontext()
    with torch.profiler.record_function(name), nvtx:
        yield
