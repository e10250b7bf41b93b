"""What a call allocates and launches on a device, and how memory becomes free again."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

Function = Callable[[], Any]

# What PyTorch says where memory is full and it has no class of its own for that.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")


def synchronise(device: torch.device) -> None:
    """Wait until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory is full, on a GPU or a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def free_memory(error: BaseException | None = None) -> None:
    """Free what nothing needs any more, on GPUs too, and what the frames behind `error` hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def allocate_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate what it keeps for all products, forward and backward, from now on.

    Otherwise what is measured first seems to hold it: 64 MiB on an H200, 32 in each of two threads.
    """
    if device.type == "cuda":
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()


def allocated_bytes(fn: Function, device: torch.device) -> tuple[int | None, int | None]:
    """The most memory that one call of `fn` allocates, as `Measurement` has it: (peak, total)."""
    if device.type == "cuda":
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        synchronise(device)
        total = torch.cuda.max_memory_allocated(device)
        return total - before, total
    if device.type != "cpu" or torch.autograd._profiler_enabled():
        fn()
        return None, None
    allocated = peak = 0
    for event in _profiled(fn, device, profile_memory=True):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak, None


def count_launches(fn: Function, device: torch.device) -> int | None:
    """Kernels that one call of `fn` launches on a GPU; on a CPU, operators it dispatches.

    Operators that others call do not count. None where PyTorch's profiler cannot tell, or is
    running.
    """
    if device.type not in ("cuda", "cpu") or torch.autograd._profiler_enabled():
        return None
    events = _profiled(fn, device)
    if device.type == "cuda":
        on_gpu = [event.name() for event in events if event.device_type().name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)
    count, busy_until = 0, {}
    for event in events:
        thread = event.start_thread_id()
        is_operator = "::" in event.name() and "autograd::" not in event.name()
        if is_operator and event.start_ns() >= busy_until.get(thread, 0):
            busy_until[thread] = event.start_ns() + event.duration_ns()
            count += 1
    return count


def _profiled(fn: Function, device: torch.device, **options: Any) -> list[Any]:
    """What PyTorch's profiler sees on `device` during one call, in order of time."""
    activity = getattr(torch.profiler.ProfilerActivity, device.type.upper())
    with without_stderr(), torch.profiler.profile(activities=[activity], **options) as profiler:
        fn()
        synchronise(device)
    return sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Some releases of PyTorch's profiler write to the process's standard error at each start."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
