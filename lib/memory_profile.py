"""What fills the memory during a training step: weights, gradients, optimizer, activations.

PyTorch's profiler notes each block that the allocator hands out and takes back, on a CPU and on a
GPU. A block belongs to

- parameters, optimizer state: where it holds such a tensor at the start of the step;
- gradients: where it becomes a parameter's `.grad`;
- activations: where it lives on when a forward pass ends, and so waits for the backward pass;
- other: else. Temporaries, gradients of activations, buffers, and what the process holds besides.

So each block has one category for its whole life, and their sum is what is allocated. On a CPU,
where no allocator knows a total, tensors from before the step count only where they are the model's
or the optimizer's.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lib import profiling

CATEGORIES = ("parameters", "optimizer state", "gradients", "activations", "other")
FORWARD = "forward"
MARK = "memory of gradient "
DEVICE_TYPES = {"cpu": 0, "cuda": 1}


@dataclass(frozen=True)
class Block:
    """A piece of memory from when it is handed out to when it is taken back."""

    address: int
    num_bytes: int
    start: float
    """In µs, as `end`; -inf: before the step. `end` is inf where it outlives the step."""

    end: float


@dataclass(frozen=True)
class MemoryTimeline:
    """Allocated memory over a step."""

    times_ms: np.ndarray
    """(count,): when something changed, from 0, the start of the step."""

    num_bytes: dict[str, np.ndarray]
    """For each of `CATEGORIES` (count,) bytes that are allocated from that time on."""

    phases: tuple[tuple[str, float, float], ...]
    """Name, start and end in ms of what the step does: its outermost ranges."""

    @property
    def total(self) -> np.ndarray:
        """(count,): bytes allocated in all."""
        return sum(self.num_bytes.values())

    def peak(self) -> dict[str, int]:
        """The bytes of each category at the time when the total is largest."""
        index = int(self.total.argmax())
        return {category: int(values[index]) for category, values in self.num_bytes.items()}

    def highest(self) -> dict[str, int]:
        """The most bytes that each category has at any time."""
        return {category: int(values.max()) for category, values in self.num_bytes.items()}


def profile_memory(
    step: Callable[[], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device | str = "cpu",
) -> MemoryTimeline:
    """Watch the memory of one call of `step`, which trains `model` with `optimizer` on `device`.

    `step` is called twice, the first time unwatched, so that what it makes once is there. Its
    forward passes must be in ranges `forward` (`lib.profiling.annotate`), as in `TrainStep`. It
    must not replay a CUDA graph, which allocates nothing.

    Raises:
        ValueError: `device` is neither a CPU nor a CUDA device, or the step has no such range.
    """
    device = torch.device(device)
    if device.type not in DEVICE_TYPES:
        raise ValueError(f"device is {str(device)!r}; right is: cpu, cuda or cuda:N")
    with _marked_gradients(model), profiling.enabled():
        step()
        held = held_blocks(model, optimizer)
        allocated = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            allocated = torch.cuda.memory_allocated(device)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return memory_timeline(events, held, allocated=allocated, device=device)


def held_blocks(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[int, int]]:
    """Address -> bytes of what is allocated between steps, by category; shared memory once."""
    tensors = {
        "parameters": list(model.parameters()),
        "optimizer state": [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ],
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
    held: dict[str, dict[int, int]],
    *,
    allocated: int | None = None,
    device: torch.device | str = "cpu",
) -> MemoryTimeline:
    """The timeline in the events of a trace, made with `profile_memory=True`, of one step.

    Args:
        events: in Chrome's trace event format, times in µs.
        held: for each category address -> bytes of what was there before, as from `held_blocks`.
        allocated: bytes that the allocator had handed out before; what is not in `held` is other.

    Raises:
        ValueError: there is no range `forward`.
    """
    events = sorted(events, key=lambda event: event.get("ts", 0))
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e.get("ph") == "X"]
    forward_ends = sorted(e["ts"] + e["dur"] for e in ranges if e["name"] == FORWARD)
    if not forward_ends:
        raise ValueError(f"the step has no range {FORWARD!r}, whose end tells activations apart")
    kinds = {address: kind for kind, found in held.items() for address in found}
    blocks = list(_blocks(events, held, torch.device(device)))
    grads = [
        (e["ts"], int(e["name"].removeprefix(MARK))) for e in ranges if e["name"].startswith(MARK)
    ]
    is_gradient = _blocks_at(blocks, grads)
    changes: list[tuple[float, str, int]] = []
    for index, block in enumerate(blocks):
        if block.start == -np.inf:
            kind = kinds.get(block.address, "other")
        elif index in is_gradient:
            kind = "gradients"
        else:
            place = bisect_left(forward_ends, block.start)
            waits = place < len(forward_ends) and block.end > forward_ends[place]
            kind = "activations" if waits else "other"
        changes += [(block.start, kind, block.num_bytes), (block.end, kind, -block.num_bytes)]
    if allocated is not None:
        known = sum(block.num_bytes for block in blocks if block.start == -np.inf)
        changes.append((-np.inf, "other", allocated - known))
    return _summed(changes, events, ranges)


def _blocks(
    events: Iterable[dict[str, Any]], held: dict[str, dict[int, int]], device: torch.device
) -> Iterator[Block]:
    """The blocks on `device`, those of `held` first begun."""
    living = {
        address: (num_bytes, -np.inf)
        for found in held.values()
        for address, num_bytes in found.items()
    }
    for event in events:
        args = event.get("args") or {}
        if event.get("name") != "[memory]" or args["Device Type"] != DEVICE_TYPES[device.type]:
            continue
        if device.index is not None and args["Device Id"] not in (device.index, -1):
            continue
        address, num_bytes = args["Addr"], args["Bytes"]
        if num_bytes > 0:
            living[address] = (num_bytes, event["ts"])
            continue
        # one that is not known was there before the step, as part of `allocated`
        size, start = living.pop(address, (-num_bytes, -np.inf))
        yield Block(address, size, start, event["ts"])
    for address, (num_bytes, start) in living.items():
        yield Block(address, num_bytes, start, np.inf)


def _blocks_at(blocks: list[Block], places: list[tuple[float, int]]) -> set[int]:
    """Indices of the blocks that live at each of `places`: a time and an address."""
    at_address: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        at_address.setdefault(block.address, []).append(index)
    return {
        index
        for time, address in places
        for index in at_address.get(address, ())
        if blocks[index].start <= time < blocks[index].end
    }


def _summed(
    changes: list[tuple[float, str, int]],
    events: list[dict[str, Any]],
    ranges: list[dict[str, Any]],
) -> MemoryTimeline:
    """Running sums of `changes` (time in µs, category, bytes)."""
    outer = _outermost(ranges)
    start = min([e["ts"] for e in ranges], default=0.0)
    ends = [e["ts"] + e["dur"] for e in ranges]
    times = np.array([time for time, _, _ in changes])
    moments = np.unique(np.clip(times[times < np.inf], start, None))
    moments = np.union1d(moments, [start, max(ends)])
    num_bytes = {}
    for category in CATEGORIES:
        deltas = np.zeros(len(moments), dtype=np.int64)
        chosen = [(t, b) for t, kind, b in changes if kind == category and t < np.inf]
        if chosen:
            at, sizes = zip(*chosen)
            places = np.searchsorted(moments, np.clip(at, start, None))
            np.add.at(deltas, places, np.array(sizes, dtype=np.int64))
        num_bytes[category] = deltas.cumsum()
    phases = [
        (e["name"], (e["ts"] - start) / 1e3, (e["ts"] + e["dur"] - start) / 1e3) for e in outer
    ]
    return MemoryTimeline((moments - start) / 1e3, num_bytes, tuple(phases))


def _outermost(ranges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those inside no other but the one around the whole step."""
    longest = max((e["dur"] for e in ranges), default=0)
    outer: list[dict[str, Any]] = []
    for event in ranges:
        is_inside = outer and event["ts"] < outer[-1]["ts"] + outer[-1]["dur"]
        if event["dur"] < longest and not is_inside and not event["name"].startswith(MARK):
            outer.append(event)
    return outer


@contextlib.contextmanager
def _marked_gradients(model: nn.Module) -> Iterator[None]:
    """Let each gradient that is complete leave its address in the trace."""

    def mark(param: Tensor) -> None:
        address = param.grad.untyped_storage().data_ptr()
        with torch.profiler.record_function(f"{MARK}{address}"):
            pass

    handles = [
        param.register_post_accumulate_grad_hook(mark)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def memory_snapshot(path: Path, *, max_entries: int = 200_000) -> Iterator[None]:
    """Write the CUDA allocator's history in the block to `path`, for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)
    try:
        yield
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
