"""The memory of a training on one rank: by kind, and at five moments of its third step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from lib.core.allocator import allocate_workspaces, without_stderr
from lib.profiling.memory_formula import RankMemory
from lib.profiling.trace import events_of
from lib.tools.benchmarks.rank_training import Training
from lib.training.step import TrainStep

KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def predicted_bytes(memory: RankMemory) -> dict[str, int]:
    """A rank's bytes by kind and moment, as they are measured."""
    kinds = {kind: getattr(memory, kind) for kind in KINDS}
    if not memory.gradients_stay:
        # measured before the optimizer's step, when only averaged ones are left
        kinds["gradients"] = memory.averaged_gradients
    # measured when forward ends, before a block is computed again
    kinds["activations"] -= memory.recomputed
    return kinds | {
        # the first step makes the optimizer's state
        "initialized": memory.between_steps - memory.optimizer_state,
        "before_step": memory.before_step,
        "after_step": memory.between_steps,
        "peak": memory.peak,
    }


def measure_memory(
    make: Callable[[], Training], device: torch.device
) -> tuple[Training, dict[str, int]]:
    """Make a training, run three steps, and return it with the bytes that it holds by itself.

    Counted from tensors between the third backward pass and the optimizer's step: `parameters`,
    `gradients`, `optimizer_state`. Counted from allocations: `initialized`, before the first step;
    in the third step `before_step` and `after_step` of the optimizer, `peak`, and `activations`,
    what the forward pass adds. The first step makes the optimizer's state and compiles, and in the
    second PyTorch's DDP rebuilds its buckets.

    Allocations come from the caching allocator on a GPU, and from PyTorch's profiler on a CPU.
    """
    log = _GpuLog(device) if device.type == "cuda" else _CpuLog()
    with log.recording():
        # warm up
        training = make()
        log.mark("initialized")
        training.train(2)
        training.step.wait()
        # the step that is measured
        log.mark("begin")
        with _mark_moments(training.step, log.mark) as kinds:
            training.train(1)
        training.step.wait()
        log.mark("after_step")
    moments = log.bytes()
    activations = moments.pop("after_forward") - moments.pop("begin")
    return training, {**kinds, "activations": activations, **moments}


@contextlib.contextmanager
def _mark_moments(step: TrainStep, mark: Callable[[str], None]) -> Iterator[dict[str, int]]:
    """Mark `after_forward` and `before_step` of the steps in the block.

    Yields a dict that gets the bytes held at `before_step`.
    """
    held: dict[str, int] = {}

    def before_step(*_: Any) -> None:
        mark("before_step")
        held.update(held_bytes(step))

    hooks = (
        step.loss.register_forward_hook(lambda *_: mark("after_forward")),
        step.optimizer.register_step_pre_hook(before_step),
    )
    try:
        yield held
    finally:
        for hook in hooks:
            hook.remove()


def held_bytes(step: TrainStep) -> dict[str, int]:
    """Bytes of a step's parameters, gradients and optimizer state on this rank."""
    params = list(step.model.parameters())
    is_sharded, optimizer = step.parallel.is_sharded, step.optimizer
    shards = optimizer.shards if is_sharded else []
    grads = [param.grad for param in params] + [shard.leaf.grad for shard in shards]
    # that of this rank's parameters
    state = (optimizer.inner if is_sharded else optimizer).state
    values = [value for of_param in state.values() for value in of_param.values()]
    return {
        "parameters": _bytes_of(params),
        "gradients": _bytes_of(grads),
        "optimizer_state": _bytes_of(values),
    }


def _bytes_of(tensors: Iterable[object]) -> int:
    """Bytes of the storages behind the tensors, each counted once; of sharded ones this rank's."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _GpuLog:
    """Bytes that the caching allocator has handed out since the log was made."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.found = device, {}
        allocate_workspaces(device)
        self.before = torch.cuda.memory_allocated(device)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        yield
        self.found["peak"] = torch.cuda.max_memory_allocated(self.device) - self.before

    def mark(self, name: str) -> None:
        self.found[name] = torch.cuda.memory_allocated(self.device) - self.before
        if name == "begin":
            torch.cuda.reset_peak_memory_stats(self.device)

    def bytes(self) -> dict[str, int]:
        return self.found


MARK = "moment: "


class _CpuLog:
    """Bytes that PyTorch's profiler saw allocated and not freed."""

    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with without_stderr(), self.profiler:
            yield

    def mark(self, name: str) -> None:
        with record_function(MARK + name):
            pass

    def bytes(self) -> dict[str, int]:
        return bytes_at_marks(events_of(self.profiler))


def bytes_at_marks(events: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Allocated bytes at each mark in the events of a trace, and the `peak` from `begin` on.

    The profiler misses memory that gloo's own threads free. A block that overlaps a new one must
    have been freed before, so it is dropped.
    """
    found: dict[str, int] = {}
    live: dict[int, int] = {}  # address -> bytes
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        name = event.get("name", "")
        if name == "[memory]":
            # a negative size is a free
            start, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
            gone = [start]
            if num_bytes > 0:
                stop = start + num_bytes
                gone = [block for block in live if block < stop and block + live[block] > start]
            allocated -= sum(live.pop(block, 0) for block in gone)
            if num_bytes > 0:
                live[start] = num_bytes
                allocated += num_bytes
            peak = max(peak, allocated)
        elif name.startswith(MARK):
            found[name.removeprefix(MARK)] = allocated
            peak = allocated if name == f"{MARK}begin" else peak
    return found | {"peak": peak}
