"""What a training holds on one rank: its tensors by kind, and allocated memory by moment."""

from __future__ import annotations

import contextlib
import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from lib.allocations import allocate_workspaces, synchronise, without_stderr
from lib.benchmark_lm_matrix_training import Training
from lib.train_step import TrainStep

MARK = "moment: "


def watched(make: Callable[[], Training], device: torch.device) -> tuple[Training, dict[str, int]]:
    """A training of three steps, and the bytes that it holds, of itself alone.

    By kind, counted from tensors between the backward pass and the optimizer's step: `parameters`,
    `gradients`, `optimizer_state`. From what is allocated: `initialised`, before any step; of the
    third step `before_step` and `after_step` of the optimizer, `peak`, and `activations`, what the
    forward pass adds. The first makes the optimizer's state and compiles, and in the second
    PyTorch's DDP makes its buckets anew.

    On a GPU the allocator tells what is allocated, on a CPU PyTorch's profiler.
    """
    log = _GpuLog(device) if device.type == "cuda" else _CpuLog()
    with log.watching():
        training = make()
        log.mark("initialised")
        training.take(2)
        _come_to_rest(training, device)
        log.mark("begin")
        with _marked(training.step, log.mark) as kinds:
            training.take(1)
        _come_to_rest(training, device)
        log.mark("after_step")
    found = log.bytes()
    activations = found.pop("after_forward") - found.pop("begin")
    return training, {**kinds, "activations": activations, **found}


def _come_to_rest(training: Training, device: torch.device) -> None:
    """Let what was begun end: a GPU's work, and weights on their way, of which gloo has copies."""
    synchronise(device)
    if device.type == "cpu" and hasattr(training.step.optimizer, "wait_for_parameters"):
        training.step.optimizer.wait_for_parameters()


def held_bytes(step: TrainStep) -> dict[str, int]:
    """Bytes of a step's parameters, gradients and optimizer state on this rank."""
    params = list(step.model.parameters())
    shards = getattr(step.optimizer, "shards", [])
    grads = [param.grad for param in params] + [shard.grad for shard in shards]
    # PyTorch's ZeroRedundancyOptimizer has one of this rank's parameters
    state = getattr(step.optimizer, "optim", step.optimizer).state
    values = [value for of_param in state.values() for value in of_param.values()]
    return {
        "parameters": _bytes_of(params),
        "gradients": _bytes_of(grads),
        "optimizer_state": _bytes_of(values),
    }


def _bytes_of(tensors: Iterable[object]) -> int:
    """Bytes of the memory behind the tensors, each piece once; of sharded tensors this rank's."""
    pieces = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            pieces[storage.data_ptr()] = storage.nbytes()
    return sum(pieces.values())


@contextlib.contextmanager
def _marked(step: TrainStep, mark: Callable[[str], None]) -> Iterator[dict[str, int]]:
    """In the block the step marks its moments; yields what it holds before the optimizer's."""
    kinds: dict[str, int] = {}
    optimizer, update = step.optimizer, step.optimizer.step

    def marked_update(*args: object, **options: object) -> object:
        mark("before_step")
        kinds.update(held_bytes(step))
        return update(*args, **options)

    hook = step.loss.register_forward_hook(lambda *_: mark("after_forward"))
    optimizer.step = marked_update
    try:
        yield kinds
    finally:
        del optimizer.step
        hook.remove()


class _GpuLog:
    """What the allocator handed out beyond what it had before; the peak is that from `begin`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.found = device, {}
        allocate_workspaces(device)
        self.before = torch.cuda.memory_allocated(device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        yield
        self.found["peak"] = torch.cuda.max_memory_allocated(self.device) - self.before

    def mark(self, name: str) -> None:
        self.found[name] = torch.cuda.memory_allocated(self.device) - self.before
        if name == "begin":
            torch.cuda.reset_peak_memory_stats(self.device)

    def bytes(self) -> dict[str, int]:
        return self.found


class _CpuLog:
    """What was allocated and not freed since the start; the peak is that from `begin`."""

    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with without_stderr(), self.profiler:
            yield

    def mark(self, name: str) -> None:
        with record_function(MARK + name):
            pass

    def bytes(self) -> dict[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_bytes())["traceEvents"]
        return bytes_at_marks(events)


def bytes_at_marks(events: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Bytes that are allocated at each mark in the events of a trace, and the `peak` from `begin`.

    The profiler does not see what gloo's own threads free. Memory that is handed out anew was
    freed before, whoever did it.
    """
    found, sizes, starts, allocated, peak = {}, {}, [], 0, 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        name = event.get("name", "")
        if name == "[memory]":
            start, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
            stop = start + abs(num_bytes)
            # the blocks in that place
            first = bisect_right(starts, start)
            if first and starts[first - 1] + sizes[starts[first - 1]] > start:
                first -= 1
            last = bisect_left(starts, stop)
            allocated -= sum(sizes.pop(place) for place in starts[first:last])
            starts[first:last] = []
            if num_bytes > 0:
                starts.insert(first, start)
                sizes[start] = num_bytes
                allocated += num_bytes
            peak = max(peak, allocated)
        elif name.startswith(MARK):
            found[name.removeprefix(MARK)] = allocated
            peak = allocated if name == f"{MARK}begin" else peak
    return found | {"peak": peak}
