"""Exercises of notebook 04: timing, idle time, a hidden wait, rooflines, memory, fewer passes."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.lessons.exercise import Exercise, check, edited
from lib.lessons.profiling.simulated import Kernel, ToyGPU, ToyTrainer, kernels_of
from lib.lessons.profiling.stacks import judged, peak_share, plain

Spans = Sequence[tuple[int, int]]


def _draw_timing(generator: random.Random, size: int) -> tuple:
    warmup, samples = generator.randint(1, 3), generator.choice([3, 4, 5, 6])
    # slow at first, and slow once more, now and then, when something else runs
    slow = [generator.randint(50, 99) for _ in range(warmup)]
    usual = generator.randint(5, 20)
    steady = [usual + generator.randint(0, 9) for _ in range(samples)]
    steady[generator.randrange(samples)] += generator.choice([0, 40])
    return ToyGPU(slow + steady), warmup, samples


def time_runs(gpu: ToyGPU, warmup: int, samples: int) -> float:
    for _ in range(warmup):
        gpu.run()
    gpu.wait()
    times = []
    for _ in range(samples):
        start = gpu.clock()
        gpu.run()
        gpu.wait()
        times.append(gpu.clock() - start)
    return statistics.median(times)


def _wait_after_the_loop(gpu: ToyGPU, warmup: int, samples: int) -> float:
    for _ in range(warmup):
        gpu.run()
    gpu.wait()
    start = gpu.clock()
    for _ in range(samples):
        gpu.run()
    gpu.wait()
    return (gpu.clock() - start) / samples


TIME_RUNS = Exercise(
    time_runs,
    _draw_timing,
    {
        "nothing waits for the device between gpu.run() and the second reading of the clock, so "
        "that only the launch is timed": ("        gpu.wait()\n", ""),
        "the warm-up is timed too; its runs must not count": (
            lambda gpu, warmup, samples: time_runs(gpu, 0, warmup + samples)
        ),
        "the mean is returned; one slow run moves it, so take the median": (
            "statistics.median",
            "statistics.mean",
        ),
        "the fastest run is returned; take the median": ("statistics.median", "min"),
        "the sum of the times is returned; take the median": ("statistics.median", "sum"),
        "the device is waited for once after all runs, which gives their mean; wait in each": (
            _wait_after_the_loop
        ),
        "the warm-up is not waited for, so that its work counts in the first sample": (
            "    gpu.wait()\n    times",
            "    times",
        ),
        "gpu.run() is called once before the samples, and not `warmup` times": (
            "range(warmup)",
            "range(1)",
        ),
        "nothing is run before the samples; the first `warmup` runs must not count": (
            "range(warmup)",
            "range(0)",
        ),
        "no time passes between the two readings of the clock; the run and the wait for it belong "
        "between them": ("gpu.clock() - start", "0"),
        "one of the two middle times is returned; for an even number of samples the median is "
        "their mean": ("statistics.median", "statistics.median_high"),
    },
)


def _draw_intervals(generator: random.Random, size: int) -> tuple:
    start = generator.randint(0, 20)
    end = start + 20 + 10 * size
    kernels = []
    for _ in range(1 + size):
        # some before the window or behind it
        first = generator.randint(start - 20, end + 5)
        kernels.append((first, first + generator.randint(1, 15)))
    if generator.random() < 0.5:
        # one inside another, and two that touch
        first, last = kernels[0]
        kernels += [(first, last + 12), (last + 12, last + 13)]
    generator.shuffle(kernels)
    return kernels, start, end


def idle_time(kernels: Spans, start: int, end: int) -> int:
    idle, reached = 0, start
    for first, last in sorted(kernels):
        idle += max(0, min(first, end) - reached)
        reached = max(reached, last)
    return idle + max(0, end - reached)


def _all_but_clipped_durations(kernels: Spans, start: int, end: int) -> int:
    inside = [max(0, min(last, end) - max(first, start)) for first, last in kernels]
    return end - start - sum(inside)


def _inner_gaps(kernels: Spans, start: int, end: int) -> int:
    first, last = min(kernels)[0], max(last for _, last in kernels)
    return idle_time(kernels, max(start, first), min(end, last))


def _gaps_of_neighbors(kernels: Spans, start: int, end: int) -> int:
    return sum(max(0, b[0] - a[1]) for a, b in itertools.pairwise(sorted(kernels)))


IDLE_TIME = Exercise(
    idle_time,
    _draw_intervals,
    {
        "durations are subtracted from the window: where kernels overlap, that counts twice, and "
        "some reach out of the window": (
            lambda kernels, start, end: end - start - sum(last - first for first, last in kernels)
        ),
        "where kernels overlap, the same time is counted twice": _all_but_clipped_durations,
        "the kernels are taken as they come; sort them by their start first": (
            "sorted(kernels)",
            "kernels",
        ),
        "each gap is measured from the end of the kernel before; "
        "measure it from the furthest end so far": ("max(reached, last)", "last"),
        "the gap before the first kernel is missing": (
            "reached = 0, start",
            "reached = 0, max(start, min(kernels)[0])",
        ),
        "the gap after the last kernel is missing": (" + max(0, end - reached)", ""),
        "only gaps between kernels count; those at both ends of the window are missing": (
            _inner_gaps
        ),
        "a kernel runs up to the end of its pair, not through it": (
            "max(reached, last)",
            "max(reached, last + 1)",
        ),
        "the gap after the last kernel is negative where a kernel reaches out of the window": (
            "max(0, end - reached)",
            "end - reached",
        ),
        "the gap before a kernel after the window goes on beyond the window's end": (
            "min(first, end)",
            "first",
        ),
        "kernels that reach out of the window are skipped; their part inside it counts": (
            "sorted(kernels)",
            "sorted(k for k in kernels if start <= k[0] and k[1] <= end)",
        ),
        "each kernel is compared with the next one alone: the window's two ends are missing, and "
        "one kernel may lie inside another": _gaps_of_neighbors,
        "the busy time is returned; the idle time is the rest of the window": (
            "idle + max(0, end - reached)",
            "end - start - idle - max(0, end - reached)",
        ),
    },
)


# 3. The hidden .item()


def train(gpu: ToyTrainer, batches: Sequence[int]) -> tuple[float, float]:
    losses = [gpu.step(gpu.load(batch)) for batch in batches]
    values = [loss.item() for loss in losses]
    return sum(values) / len(values), max(values)


def slow_train(gpu: ToyTrainer, batches: Sequence[int]) -> tuple[float, float]:
    """The loop of the lesson, whose comparison waits for the GPU in every step."""
    total, largest = 0.0, None
    for batch in batches:
        loss = gpu.step(gpu.load(batch))
        total = total + loss
        if largest is None or loss > largest:
            largest = loss
    return (total / len(batches)).item(), largest.item()


def watched(loop: Callable) -> Callable[[list[int]], dict[str, Any]]:
    """Return `loop` as a function of the batches, which also says how often the host waited."""

    @functools.wraps(loop)
    def run(batches: list[int]) -> dict[str, Any]:
        gpu = ToyTrainer()
        result = loop(gpu, batches)
        values = [float(value) for value in result] if isinstance(result, tuple) else result
        return {"mean and largest": values, "waits before the last launch": gpu.early_waits}

    return run


def loop_ms(loop: Callable) -> int:
    """The toy's ms for 20 steps, everything done."""
    gpu = ToyTrainer()
    loop(gpu, list(range(20)))
    return max(gpu.now, gpu.busy_until)


def _draw_batches(generator: random.Random, size: int) -> tuple:
    return ([generator.randint(0, 50) for _ in range(2 + size)],)


TRAIN = Exercise(
    watched(train),
    _draw_batches,
    {
        "something inside the loop needs a loss's number on the host: a comparison, `.item()`, "
        "`float()` or a format": watched(slow_train),
        "the mean is a sum; divide by the number of batches": watched(
            edited(train, " / len(values)", "")
        ),
        "the smallest loss is returned, not the largest": watched(edited(train, "max(", "min(")),
    },
    "core",
    measure=lambda run: loop_ms(inspect.unwrap(run)),
    unit="ms for 20 steps (the toy's clock)",
)


# 4. A roofline of the block's backward pass


def backward_roofline(
    batch: int, length: int, d: int, heads: int, f: int, e: int, ridge: float
) -> dict[str, tuple[int, int, str]]:
    tokens = batch * length

    def matmul(m, k, n):
        return 2 * m * k * n, e * (m * k + k * n + m * n)

    def linear(d_in, d_out):
        to_input = matmul(tokens, d_out, d_in)
        to_weight = matmul(d_out, tokens, d_in)
        return to_input[0] + to_weight[0], to_input[1] + to_weight[1]

    pairs = batch * heads * length * (length + 1) // 2
    costs = {
        "RMSNorm": (0, 3 * e * tokens * d),
        "q, k, v projection": linear(d, 3 * d),
        "attention, fused": (5 * 2 * pairs * (d // heads), 8 * e * tokens * d),
        "output projection": linear(d, d),
        "residual sum": (0, 3 * e * tokens * d),
        "gate and value": linear(d, 2 * f),
        "SiLU and gate": (0, 5 * e * tokens * f),
        "down projection": linear(f, d),
    }
    return {
        name: (flops, moved, "arithmetic" if flops / moved > ridge else "memory")
        for name, (flops, moved) in costs.items()
    }


def _draw_block(generator: random.Random, size: int) -> tuple:
    heads, head_dim = generator.randint(1, 1 + size // 2), 8 * generator.randint(1, 8)
    d, f = heads * head_dim, 8 * generator.randint(1, 8 * size)
    sizes = generator.randint(1, size), generator.randint(2, 40 * size)
    ridge = generator.choice([3.5, 12.5, 50.5, 180.5])
    return *sizes, d, heads, f, generator.choice([2, 4]), ridge


BACKWARD_ROOFLINE = Exercise(
    backward_roofline,
    _draw_block,
    {
        "each matmul has one in the backward pass; it has two, for the gradients of its input and "
        "of its weight": (
            "to_input[0] + to_weight[0], to_input[1] + to_weight[1]",
            "to_input",
        ),
        "the two matmuls of the backward pass move as many bytes as the one of the forward pass": (
            "to_input[0] + to_weight[0], to_input[1] + to_weight[1]",
            "to_input[0] + to_weight[0], matmul(tokens, d_in, d_out)[1]",
        ),
        "attention counts all pairs of tokens; the causal mask leaves T (T + 1) / 2 of a head": (
            "length * (length + 1) // 2",
            "length * length",
        ),
        "fused attention counts four matmuls; it computes the scores again, which makes five": (
            "5 * 2 * pairs",
            "4 * 2 * pairs",
        ),
        "fused attention moves the scores; it keeps them on the chip": (
            "8 * e * tokens * d)",
            "8 * e * tokens * d + 2 * e * pairs)",
        ),
        "`gate and value` has one matrix of width f; it has two": (
            "linear(d, 2 * f)",
            "linear(d, f)",
        ),
        "the gate moves three tensors of width f; its backward reads three and writes two": (
            "5 * e * tokens * f",
            "3 * e * tokens * f",
        ),
        "RMSNorm moves two tensors; its backward reads two and writes one": (
            '"RMSNorm": (0, 3 *',
            '"RMSNorm": (0, 2 *',
        ),
        "numbers are counted, and not bytes; multiply by e": (
            "2 * m * k * n, e * (",
            "2 * m * k * n, (",
        ),
        "memory and arithmetic are swapped: above the ridge, arithmetic is the limit": (
            '"arithmetic" if flops / moved > ridge else "memory"',
            '"memory" if flops / moved > ridge else "arithmetic"',
        ),
    },
    "core",
)


# 5. Three traces


def diagnose(kernels: Sequence[Kernel], ridge: float) -> str:
    span = kernels[-1].end - kernels[0].start
    busy = sum(kernel.end - kernel.start for kernel in kernels)
    if busy < span / 2:
        return "launch-bound"
    right = [kernel for kernel in kernels if kernel.flops / kernel.num_bytes > ridge]
    in_products = sum(kernel.end - kernel.start for kernel in right)
    return "compute-bound" if in_products > busy / 2 else "memory-bound"


def _draw_trace(generator: random.Random, size: int) -> tuple:
    ridge = generator.choice([10.5, 40.5, 180.5])
    short, long = generator.choice([((2, 30), 100), ((20, 90), 10), ((20, 90), 10)])
    costs = []
    for _ in range(2 + size):
        moved = generator.randint(1, 50) * 1000
        intensity = generator.choice([0.25, 1, 5, ridge * 1.5, ridge * 4])
        costs.append((generator.randint(*short), moved * intensity, moved))
    # many short ones or a few long ones may be compute-bound, so count time, not kernels
    costs[0] = (costs[0][0] * generator.choice([1, 4, 8]), *costs[0][1:])
    return kernels_of(costs, long), ridge


DIAGNOSE = Exercise(
    diagnose,
    _draw_trace,
    {
        "kernels are counted; add up their time": (
            "    in_products = sum(kernel.end - kernel.start for kernel in right)",
            "    in_products, busy = len(right), len(kernels)",
        ),
        "the gaps are never looked at; a GPU that idles more than half of the time is "
        "launch-bound": ("busy < span / 2", "False"),
        "memory and compute are swapped: above the ridge, arithmetic is the limit": (
            '"compute-bound" if in_products > busy / 2 else "memory-bound"',
            '"memory-bound" if in_products > busy / 2 else "compute-bound"',
        ),
        "all FLOPs over all bytes decide; one large matmul then hides kernels that take longer": (
            "    in_products = sum(kernel.end - kernel.start for kernel in right)",
            "    moved = sum(kernel.num_bytes for kernel in kernels)\n"
            "    total = sum(kernel.flops for kernel in kernels)\n"
            "    in_products = busy if total / moved > ridge else 0",
        ),
    },
    "core",
)


# 6. Half the peak memory


def forward(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def _checkpoint_everything(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    return checkpoint(functools.partial(plain, blocks), x, use_reentrant=False)


def _draw_stack(generator: random.Random, size: int) -> tuple:
    return generator.choice([8, 9, 10]), generator.choice([16, 24]), generator.randrange(1000)


FORWARD = Exercise(
    judged(forward),
    _draw_stack,
    {
        "nothing is checkpointed": judged(plain),
        "the whole stack is one checkpoint, so that the backward pass rebuilds everything at once; "
        "use smaller segments": judged(_checkpoint_everything),
        "x is detached, so that no gradient reaches the blocks before": judged(
            edited(forward, "checkpoint(block, x,", "checkpoint(block, x.detach(),")
        ),
    },
    "core",
    trials=4,
    seconds=20,
    measure=peak_share,
    unit="% of the peak without checkpoints",
)


# 7. Fewer passes over memory


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
    tile = 1 << 15
    for a, b, c, d in zip(p.split(tile), g.split(tile), m.split(tile), v.split(tile)):
        c.lerp_(b, 0.1)
        d.mul_(0.95).addcmul_(b, b, value=0.05)
        a.mul_(1 - 0.01 * lr).addcdiv_(c, d.sqrt().add_(1e-8), value=-lr)


def updated(update: Callable) -> Callable[..., Tensor]:
    """Return `update` as a function that returns the three tensors that it changes."""

    @functools.wraps(update)
    def run(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> Tensor:
        if update(p, g, m, v, lr) is not None:
            raise TypeError("the update must change p, m and v, and return None")
        return torch.stack([p, m, v])

    return run


def update_ms(run: Callable) -> float:
    """Best ms of an update of four million parameters, on one thread."""
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(1 << 22, generator=generator) for _ in range(4)]
    times = []
    torch.set_num_threads(1)
    try:
        for _ in range(6):
            started = time.perf_counter()
            inspect.unwrap(run)(*tensors, 1e-3)
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return 1e3 * min(times)


def _draw_update(generator: random.Random, size: int) -> tuple:
    torch_generator = torch.Generator().manual_seed(generator.randrange(1 << 30))
    count = generator.choice([1, 7, 1000, 40_000])
    p, g, m = (torch.randn(count, generator=torch_generator) for _ in range(3))
    v = torch.rand(count, generator=torch_generator)
    return p, g, m, v, generator.choice([0.1, 0.5])


ADAMW = Exercise(
    updated(adamw),
    _draw_update,
    {
        "the weight decay is missing": updated(edited(adamw, "mul_(1 - 0.01 * lr).", "")),
        "the second moment takes the gradient, not its square": updated(
            edited(adamw, "addcmul_(b, b, value=0.05)", "add_(b.abs(), alpha=0.05)")
        ),
        "the weights move towards the gradient; the sign is wrong": updated(
            edited(adamw, "value=-lr", "value=lr")
        ),
        "the root is missing below the fraction": updated(edited(adamw, "d.sqrt()", "d.clone()")),
        "only the first tile is updated": updated(edited(adamw, "p.split(tile)", "[p[:tile]]")),
    },
    "open",
    trials=30,
    measure=update_ms,
    unit="ms",
)


def check_time_runs(attempt: Callable) -> None:
    """Check `time_runs(gpu, warmup, samples)` -> the median of a run's ms; `gpu` is a `ToyGPU`."""
    check(TIME_RUNS, attempt)


def check_idle_time(attempt: Callable) -> None:
    """Check `idle_time(kernels, start, end)` -> the time in which no kernel runs."""
    check(IDLE_TIME, attempt)


def check_train(attempt: Callable) -> None:
    """Check `train(gpu, batches)` -> (mean, largest) loss; `gpu` is a `ToyTrainer`."""
    check(TRAIN, watched(attempt))


def check_backward_roofline(attempt: Callable) -> None:
    """Check `backward_roofline(batch, length, d, heads, f, e, ridge)` -> name: (FLOPs, bytes,
    "arithmetic" or "memory")."""
    check(BACKWARD_ROOFLINE, attempt)


def check_diagnose(attempt: Callable) -> None:
    """Check `diagnose(kernels, ridge)` -> "launch-bound", "memory-bound" or "compute-bound"."""
    check(DIAGNOSE, attempt)


def check_forward(attempt: Callable) -> None:
    """Check `forward(blocks, x)` -> the result of all blocks, with at most half the memory."""
    check(FORWARD, judged(attempt))


def check_adamw(attempt: Callable) -> None:
    """Check `adamw(p, g, m, v, lr)`, which changes p, m and v in place; show how long it takes."""
    check(ADAMW, updated(attempt))
