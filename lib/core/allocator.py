"""Memory that a call allocates, kernels that it launches, and freeing memory after it ran out."""

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
# Fragments of the errors that PyTorch raises as plain RuntimeErrors when memory runs out.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all work queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out, on a GPU or a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)


def free_memory(error: BaseException | None = None) -> None:
    """Free unreferenced memory, on GPUs too, and the tensors that the frames of `error` hold."""
    # an exception keeps its frames alive, and they keep their local tensors
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def allocate_workspaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces for matmuls now, in the forward and the backward thread.

    Otherwise they would count as memory of whatever is measured first: 64 MiB on an H200, 32 in
    each of the two threads.
    """
    if device.type == "cuda":
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()


def allocated_bytes(fn: Function, device: torch.device) -> tuple[int | None, int | None]:
    """Measure the peak memory of one call of `fn`, in bytes.

    `fn` waits for all collectives that it starts: gloo's threads write into the profiler's log.

    Returns:
        (peak, total): what the call allocates at most, and what PyTorch then holds in all. total
        is known on CUDA only; both are None on other devices and while another profiler runs.
    """
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        synchronize(device)
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
    """Count the kernels that one call of `fn` launches on a GPU, or the operators on a CPU.

    Operators called by other operators do not count. None on other devices and while another
    profiler runs.
    """
    if device.type not in ("cuda", "cpu") or torch.autograd._profiler_enabled():
        return None
    events = _profiled(fn, device)
    if device.type == "cuda":
        on_gpu = [event.name() for event in events if event.device_type().name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)
    # an operator that starts before the last counted one of its thread has ended is nested in it
    count, busy_until = 0, {}
    for event in events:
        thread = event.start_thread_id()
        is_operator = "::" in event.name() and "autograd::" not in event.name()
        if is_operator and event.start_ns() >= busy_until.get(thread, 0):
            busy_until[thread] = event.start_ns() + event.duration_ns()
            count += 1
    return count


def _profiled(fn: Function, device: torch.device, **options: Any) -> list[Any]:
    """Profile one call on `device`; return the events, ordered by start time.

    No collective may be under way when `fn` returns, see `TrainStep.wait`.
    """
    activity = getattr(torch.profiler.ProfilerActivity, device.type.upper())
    with without_stderr(), torch.profiler.profile(activities=[activity], **options) as profiler:
        fn()
        synchronize(device)
    return sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Silence the process's standard error, to which some PyTorch profilers write at each start."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
