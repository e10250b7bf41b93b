"""Memory during a training step, by category: parameters, optimizer, gradients, activations.

PyTorch's profiler records each block that the allocator hands out and takes back, on CPU and GPU.
Every block has one category for its whole life, so that the categories add up to what is allocated:

- parameters, optimizer state: it holds such a tensor at the start of the step;
- gradients: it becomes a parameter's `.grad`;
- activations: it outlives a forward pass, so it waits for the backward pass;
- other: everything else, such as temporaries, gradients of activations, and buffers.

On a CPU no allocator reports a total: of the tensors from before the step, only those of the model
and the optimizer count.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lib.core import ranges as core_ranges
from lib.profiling.trace import Span, events_of, parse_trace, phases_of

CATEGORIES = ("parameters", "optimizer state", "gradients", "activations", "other")
FORWARD = "forward"
# Name of the range that marks a gradient as complete; its address follows.
MARK = "memory of gradient "
# as PyTorch numbers them in its traces
DEVICE_TYPES = {"cpu": 0, "cuda": 1}


@dataclass
class Block:
    """A piece of memory from allocation to release, in µs; infinite beyond the step."""

    num_bytes: int
    start: float = -np.inf
    end: float = np.inf
    category: str | None = None


@dataclass(frozen=True)
class MemoryTimeline:
    """Allocated memory during a step."""

    times_ms: np.ndarray
    """(count,): times at which something changes, from 0, the start of the step."""

    num_bytes: dict[str, np.ndarray]
    """Category -> (count,) bytes allocated from each time on."""

    phases: tuple[tuple[str, float, float], ...]
    """Name, start and end in ms of the step's outermost ranges."""

    @property
    def total(self) -> np.ndarray:
        """(count,): bytes allocated in all."""
        return np.sum([*self.num_bytes.values()], axis=0)

    def peak(self) -> dict[str, int]:
        """Return the bytes of each category at the time of the largest total."""
        index = int(self.total.argmax())
        return {category: int(values[index]) for category, values in self.num_bytes.items()}


def profile_memory(
    step: Callable[[], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device | str = "cpu",
) -> MemoryTimeline:
    """Profile the memory of one call of `step`, which trains `model` with `optimizer` on `device`.

    Calls `step` twice, the first time unprofiled, so that what it allocates only once is there. Its
    forward passes must be in ranges `forward` (`lib.core.ranges.annotate`), as in `TrainStep`. It
    must not replay a CUDA graph, which allocates nothing.
    """
    device = torch.device(device)
    if device.type not in DEVICE_TYPES:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {str(device)!r}")
    with _marked_gradients(model), core_ranges.enabled():
        step()
        held = held_blocks(model, optimizer)
        allocated = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            allocated = torch.cuda.memory_allocated(device)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            step()
    return memory_timeline(events_of(profiler), held, allocated=allocated, device=device)


@contextlib.contextmanager
def _marked_gradients(model: nn.Module) -> Iterator[None]:
    """Write the address of each gradient into the trace when it is complete."""

    def mark(param: Tensor) -> None:
        address = param.grad.untyped_storage().data_ptr()
        with torch.profiler.record_function(f"{MARK}{address}"):
            pass

    trained = [param for param in model.parameters() if param.requires_grad]
    handles = [param.register_post_accumulate_grad_hook(mark) for param in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def held_blocks(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[int, int]]:
    """Return address -> bytes of what is allocated between steps, by category.

    Memory that tensors share counts once.
    """
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors: dict[str, list[Tensor]] = {
        "parameters": list(model.parameters()),
        "optimizer state": [value for value in states if isinstance(value, Tensor)],
        "gradients": [param.grad for param in model.parameters() if param.grad is not None],
        "other": list(model.buffers()),
    }
    held: dict[str, dict[int, int]] = {category: {} for category in CATEGORIES}
    seen: set[int] = set()
    for category, found in tensors.items():
        for tensor in found:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[category][storage.data_ptr()] = storage.nbytes()
    return held


def memory_timeline(
    events: Iterable[dict[str, Any]],
    held: Mapping[str, Mapping[int, int]],
    *,
    allocated: int | None = None,
    device: torch.device | str = "cpu",
) -> MemoryTimeline:
    """Return the timeline of one step from the events of a trace made with `profile_memory=True`.

    Args:
        events: in Chrome's trace event format, times in µs.
        held: for each category address -> bytes of what was allocated before, from `held_blocks`.
        allocated: bytes that the allocator had handed out before; what `held` lacks is other.
    """
    events = sorted(events, key=lambda event: event.get("ts", 0))
    ranges = parse_trace(events).ranges
    forward_ends = sorted(span.end for span in ranges if span.name == FORWARD)
    if not forward_ends:
        raise ValueError(f"the step has no range {FORWARD!r}, whose end defines activations")
    blocks = _blocks(events, held, torch.device(device))

    # each block adds its bytes at its start and takes them away at its end
    changes: list[tuple[float, str, int]] = []
    for block in blocks:
        if block.category is None:
            following = bisect_left(forward_ends, block.start)
            waits = following < len(forward_ends) and block.end > forward_ends[following]
            block.category = "activations" if waits else "other"
        changes.append((block.start, block.category, block.num_bytes))
        changes.append((block.end, block.category, -block.num_bytes))
    if allocated is not None:
        known = sum(block.num_bytes for block in blocks if block.start == -np.inf)
        changes.append((-np.inf, "other", allocated - known))
    return _running_sums(changes, ranges)


def _blocks(
    events: Iterable[dict[str, Any]], held: Mapping[str, Mapping[int, int]], device: torch.device
) -> list[Block]:
    """Return the blocks on `device`; those neither held before nor gradients have no category."""
    released = []
    living = {
        address: Block(num_bytes, category=category)
        for category, found in held.items()
        for address, num_bytes in found.items()
    }
    for event in events:
        name, args = event.get("name", ""), event.get("args") or {}
        if name.startswith(MARK):
            # the gradient at this address is complete
            block = living.get(int(name.removeprefix(MARK)))
            if block is not None and block.category is None:
                block.category = "gradients"
        if name != "[memory]" or args["Device Type"] != DEVICE_TYPES[device.type]:
            continue
        if device.index is not None and args["Device Id"] not in (device.index, -1):
            continue
        address, num_bytes = args["Addr"], args["Bytes"]
        if num_bytes > 0:
            living[address] = Block(num_bytes, start=event["ts"])
        else:
            # an unknown one was allocated before the step, as a part of `allocated`
            block = living.pop(address, Block(-num_bytes, category="other"))
            block.end = event["ts"]
            released.append(block)
    return [*released, *living.values()]


def _running_sums(
    changes: Sequence[tuple[float, str, int]], ranges: Sequence[Span]
) -> MemoryTimeline:
    """Add up `changes` (time in µs, category, bytes); those before the step count at its start."""
    start, end = min(span.start for span in ranges), max(span.end for span in ranges)
    changes = [(max(time, start), category, size) for time, category, size in changes]
    changes = [change for change in changes if change[0] < np.inf]
    moments = np.unique([start, end, *(time for time, _, _ in changes)])
    num_bytes = {category: np.zeros(len(moments), dtype=np.int64) for category in CATEGORIES}
    for time, category, size in changes:
        num_bytes[category][np.searchsorted(moments, time)] += size
    phases = phases_of([span for span in ranges if not span.name.startswith(MARK)])
    return MemoryTimeline(
        (moments - start) / 1e3,
        {category: deltas.cumsum() for category, deltas in num_bytes.items()},
        tuple((x.name, (x.start - start) / 1e3, (x.end - start) / 1e3) for x in phases),
    )


@contextlib.contextmanager
def memory_snapshot(path: Path) -> Iterator[None]:
    """Write the CUDA allocator's history in the block to `path`, for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    try:
        yield
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
