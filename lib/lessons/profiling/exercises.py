"""Exercises of notebook 04: timing, a hidden wait, rooflines, traces, memory, a whole step."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.lessons.exercise import NOT_FINISHED, Exercise, check, difference, edited
from lib.lessons.profiling.simulated import Kernel, ToyGPU, ToyTrainer, kernels_of
from lib.lessons.profiling.stacks import Run, Stack, judged, peak_share, plain
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.roofline import Limits
from lib.profiling.trace import category_of


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
        "the lower of the two middle times is returned, as torch.median does; for an even number "
        "of samples the median is their mean": ("statistics.median", "statistics.median_low"),
        "one of the two middle times is returned; for an even number of samples the median is "
        "their mean": ("statistics.median", "statistics.median_high"),
    },
)


# 2. The hidden .item()


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
        found = list(result) if isinstance(result, tuple) else result
        return {"mean and largest": found, "waits before the last step": gpu.early_waits}

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
        "a comparison inside the loop needs the losses' numbers on the host, from the second step "
        "on": watched(slow_train),
        "each step's loss is read as soon as it is launched, by `.item()`, `float()`, a format or "
        "a comparison": watched(
            edited(
                train,
                "load(batch)) for batch in batches]\n    values = [loss.item()",
                "load(batch)).item() for batch in batches]\n    values = [loss",
            )
        ),
        "the mean is a sum; divide by the number of batches": watched(
            edited(train, " / len(values)", "")
        ),
        "the smallest loss is returned, not the largest": watched(edited(train, "max(", "min(")),
        "the results are still on the device; read them with `.item()` at the end": watched(
            edited(train, "loss.item() for loss in losses", "loss for loss in losses")
        ),
    },
    "core",
    measure=lambda run: loop_ms(inspect.unwrap(run)),
    unit="ms for 20 steps (the toy's clock)",
)


# 3. A roofline of the block's backward pass


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


def _norm_and_sum_twice(*arguments: Any) -> dict[str, tuple[int, int, str]]:
    costs = backward_roofline(*arguments)
    for name in ("RMSNorm", "residual sum"):
        flops, moved, limit = costs[name]
        costs[name] = flops, 2 * moved, limit
    return costs


def _draw_block(generator: random.Random, size: int) -> tuple:
    heads, head_dim = generator.randint(1, 1 + size // 2), 8 * generator.randint(1, 8)
    d, f = heads * head_dim, 8 * generator.randint(1, 8 * size)
    sizes = generator.randint(1, size), generator.randint(2, 40 * size)
    ridge = generator.choice([3.5, 12.5, 50.5, 180.5])
    return *sizes, d, heads, f, generator.choice([2, 4]), ridge


def with_tuples(attempt: Callable) -> Callable:
    """Return `attempt` with lists in its result made tuples, so that both are right."""

    @functools.wraps(attempt)
    def run(*arguments: Any) -> Any:
        found = attempt(*arguments)
        if not isinstance(found, dict):
            return found
        return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}

    return run


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
        "fused attention moves seven tensors; it reads five and writes three": (
            "8 * e * tokens * d",
            "7 * e * tokens * d",
        ),
        "fused attention counts one FLOP for each term of its sums; it is two": (
            "5 * 2 * pairs",
            "5 * pairs",
        ),
        "fused attention moves the scores; it keeps them on the chip": (
            "8 * e * tokens * d)",
            "8 * e * tokens * d + 2 * e * pairs)",
        ),
        "`gate and value` has one matrix of width f; it has two": (
            "linear(d, 2 * f)",
            "linear(d, f)",
        ),
        "RMSNorm and the residual sum are counted twice, as a block has two; count one of each": (
            _norm_and_sum_twice
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
        "a multiplication and an addition count as one FLOP; a matmul does 2 m k n": (
            "for name, (flops, moved) in costs.items()",
            "for name, (flops, moved) in [(n, (c[0] // 2, c[1])) for n, c in costs.items()]",
        ),
        "a single sequence is counted; there are `batch` of them": (
            "    tokens = batch * length\n",
            "    batch, tokens = 1, length\n",
        ),
        "memory and arithmetic are swapped: above the ridge, arithmetic is the limit": (
            '"arithmetic" if flops / moved > ridge else "memory"',
            '"memory" if flops / moved > ridge else "arithmetic"',
        ),
    },
    "core",
)


# 5. Three traces


def diagnose(kernels: Sequence[Kernel]) -> str:
    span = kernels[-1].end - kernels[0].start
    busy = sum(kernel.end - kernel.start for kernel in kernels)
    if busy < span / 2:
        return "launch-bound"
    right = [kernel for kernel in kernels if category_of(kernel.name) in ("matmul", "attention")]
    in_matmuls = sum(kernel.end - kernel.start for kernel in right)
    return "compute-bound" if in_matmuls > busy / 2 else "memory-bound"


# Names that kernels have in the recorded steps.
MATMUL, ATTENTION = "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT", "cudnn_..._sdpa_sm90_flash_fprop"
CHAIN = ("vectorized_elementwise_kernel", "reduce_kernel", "_swiglu_kernel", "adamw_kernel")


def _draw_trace(generator: random.Random, size: int) -> tuple:
    begin = generator.choice([0, 1000, 250_000])
    if generator.random() < 0.2:
        # exactly half: of the time busy, or of the busy time in matmuls
        gap = generator.choice([0, 20])
        names = (MATMUL, generator.choice(CHAIN))
        return (
            [
                Kernel(begin, begin + 10, names[0]),
                Kernel(begin + gap + 10, begin + gap + 20, names[1]),
            ],
        )
    if generator.random() < 0.2:
        # matmuls take more than half of the busy time, and less than half of the whole
        longer, shorter = generator.randint(30, 60), generator.randint(5, 25)
        gap = generator.randint(longer - shorter + 1, longer + shorter)
        work = [(longer, generator.choice([MATMUL, ATTENTION])), (shorter, generator.choice(CHAIN))]
        generator.shuffle(work)
        (first_us, first), (second_us, second) = work
        return (
            [
                Kernel(begin, begin + first_us, first),
                Kernel(begin + first_us + gap, begin + first_us + gap + second_us, second),
            ],
        )
    short, launch_us = generator.choice([((2, 30), 100), ((20, 90), 10), ((20, 90), 10)])
    work = []
    for _ in range(2 + size):
        name = generator.choice([MATMUL, ATTENTION, *CHAIN[: generator.randint(1, 4)]])
        work.append((generator.randint(*short), name))
    # many short ones or a few long ones may be compute-bound, so count time, not kernels
    work[0] = (work[0][0] * generator.choice([1, 4, 8]), work[0][1])
    return (kernels_of(work, launch_us, begin),)


DIAGNOSE = Exercise(
    diagnose,
    _draw_trace,
    {
        "kernels are counted; add up their time": (
            "    in_matmuls = sum(kernel.end - kernel.start for kernel in right)",
            "    in_matmuls, busy = len(right), len(kernels)",
        ),
        "the gaps are never looked at; a GPU that idles more than half of the time is "
        "launch-bound": ("busy < span / 2", "False"),
        "memory and compute are swapped: matmuls and attention wait for arithmetic": (
            '"compute-bound" if in_matmuls > busy / 2 else "memory-bound"',
            '"memory-bound" if in_matmuls > busy / 2 else "compute-bound"',
        ),
        "the time runs from 0; it starts with the first kernel": (" - kernels[0].start\n", "\n"),
        "attention is not counted; fused, it is right of the ridge like the matmuls": (
            'in ("matmul", "attention")',
            '== "matmul"',
        ),
        "a GPU that is busy for exactly half of the time is called launch-bound; it takes less": (
            "busy < span / 2",
            "busy <= span / 2",
        ),
        "the time in matmuls is compared with the whole time, gaps included; compare it with the "
        "busy time": ("in_matmuls > busy / 2", "in_matmuls > span / 2"),
        "matmuls that take exactly half of the busy time decide; it takes more than half": (
            "in_matmuls > busy / 2",
            "in_matmuls >= busy / 2",
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


def _two_halves(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    half = len(blocks) // 2
    for part in (blocks[:half], blocks[half:]):
        x = checkpoint(functools.partial(plain, part), x, use_reentrant=False)
    return x


def _every_second(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for index, block in enumerate(blocks):
        x = block(x) if index % 2 else checkpoint(block, x, use_reentrant=False)
    return x


def _late_binding(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(lambda y: block(y), x, use_reentrant=False)  # noqa: B023
    return x


def _draw_stack(generator: random.Random, size: int) -> tuple:
    sizes = generator.choice([8, 10, 12]), generator.choice([16, 24]), generator.randrange(1000)
    return (Stack(*sizes),)


def _describe_run(yours: Any, expected: Run) -> str:
    if isinstance(yours, Run):
        return yours.problem()
    if yours is NOT_FINISHED:
        return difference(yours, expected)
    kind = "None (is a `return` missing?)" if yours is None else f"a {type(yours).__name__}"
    return f"it returned {kind}; expected the result of the last block"


FORWARD = Exercise(
    judged(forward),
    _draw_stack,
    {
        "nothing is checkpointed": judged(plain),
        "the whole stack is one checkpoint, so that the backward pass rebuilds everything at once; "
        "use smaller segments": judged(_checkpoint_everything),
        "the stack is two checkpoints, and the backward pass rebuilds half of it at once; use "
        "smaller segments": judged(_two_halves),
        "only every second block is in a checkpoint; the others keep everything": judged(
            _every_second
        ),
        "the function given to the checkpoint looks `block` up when it runs again, and by then the "
        "loop has moved on; pass the block itself": judged(_late_binding),
        "x is detached, so that no gradient reaches the blocks before": judged(
            edited(forward, "checkpoint(block, x,", "checkpoint(block, x.detach(),")
        ),
        "x is added to the result of each block; the blocks are residual, and add it already": (
            judged(edited(forward, "x = checkpoint(", "x = x + checkpoint("))
        ),
        "the last block is left out": judged(edited(forward, "in blocks:", "in blocks[:-1]:")),
        "the first block is left out": judged(edited(forward, "in blocks:", "in blocks[1:]:")),
        "each block gets the first x; give it the result of the block before": judged(
            edited(
                forward,
                "x = checkpoint(block, x, use_reentrant=False)\n    return x",
                "y = checkpoint(block, x, use_reentrant=False)\n    return y",
            )
        ),
        "the result of each checkpoint is dropped; assign it to x": judged(
            edited(forward, "x = checkpoint(", "checkpoint(")
        ),
    },
    "core",
    trials=4,
    seconds=20,
    describe=_describe_run,
    measure=peak_share,
    unit="% of the peak without checkpoints",
)


# 4. Fewer passes over memory


def naive_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
    """The chain of operators of the lesson."""
    m.mul_(0.9).add_(0.1 * g)
    v.mul_(0.95).add_(0.05 * g * g)
    p.sub_(lr * (m / (v.sqrt() + 1e-8) + 0.01 * p))


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
    # a weight that has had no gradient for long: only epsilon keeps its update finite
    g[-1] = v[-1] = 0
    return p, g, m, v, generator.choice([0.1, 0.5])


def _new_moments(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g * g
    p -= lr * (m / (v.sqrt() + 1e-8) + 0.01 * p)


ADAMW = Exercise(
    updated(adamw),
    _draw_update,
    {
        "m and v become other tensors, and those that are given stay as they are; change them in "
        "place": updated(_new_moments),
        "the weight decay is missing": updated(edited(adamw, "mul_(1 - 0.01 * lr).", "")),
        "the second moment takes the gradient, not its square": updated(
            edited(adamw, "addcmul_(b, b, value=0.05)", "add_(b.abs(), alpha=0.05)")
        ),
        "the weights decay after their update; decay what they were before it": updated(
            edited(
                adamw,
                "mul_(1 - 0.01 * lr).addcdiv_(c, d.sqrt().add_(1e-8), value=-lr)",
                "addcdiv_(c, d.sqrt().add_(1e-8), value=-lr).mul_(1 - 0.01 * lr)",
            )
        ),
        "the weights move toward the gradient; the sign is wrong": updated(
            edited(adamw, "value=-lr", "value=lr")
        ),
        "epsilon is added under the root; add it to the root": updated(
            edited(adamw, "d.sqrt().add_(1e-8)", "d.add(1e-8).sqrt_()")
        ),
        "epsilon is missing": updated(edited(adamw, ".add_(1e-8)", "")),
        "the root is missing below the fraction": updated(edited(adamw, "d.sqrt()", "d.clone()")),
        "only the first tile is updated": updated(edited(adamw, "p.split(tile)", "[p[:tile]]")),
    },
    "open",
    trials=30,
    measure=update_ms,
    baseline=naive_adamw,
    unit="ms",
)


# 7. A whole step


@dataclasses.dataclass(frozen=True, repr=False)
class Shape(ModelConfig):
    """A model, shown by what the exercise asks for."""

    def __repr__(self) -> str:
        sizes = f"vocab_size={self.vocab_size}, d_model={self.d_model}"
        return f"ModelConfig({sizes}, num_layers={self.num_layers}, ...)"


def step_ms(
    c: ModelConfig,
    tokens: int,
    e: int,
    block_ms: float,
    limits: Limits,
    host_ms: float,
    on_gpu: bool,
) -> float:
    def matmul_ms(m, k, n):
        moved = e * (m * k + k * n + m * n)
        return 1e3 * max(2 * m * k * n / limits.flops_per_s, moved / limits.bytes_per_s)

    d, vocab = c.d_model, c.vocab_size
    head = matmul_ms(tokens, d, vocab) + matmul_ms(tokens, vocab, d) + matmul_ms(vocab, tokens, d)
    update = 1e3 * 28 * num_parameters(c) / limits.bytes_per_s
    device = c.num_layers * block_ms + head + update
    return max(device, host_ms) if on_gpu else device + host_ms


def _draw_step(generator: random.Random, size: int) -> tuple:
    heads = generator.randint(1, 4)
    c = Shape(
        vocab_size=generator.randint(50, 5000),
        context_length=64,
        d_model=16 * heads,
        num_layers=generator.randint(2, 12),
        num_heads=heads,
        d_ff=64,
    )
    limits = Limits(generator.choice([1e11, 1e12]), generator.choice([2e10, 1e11]))
    device_ms = step_ms(c, 100, 4, 1.0, limits, 0.0, False)
    host_ms = round(device_ms * generator.choice([0.2, 0.6, 1.5, 3]), 3)
    rest = (generator.choice([2, 4]), 0.25 * generator.randint(1, 8), limits, host_ms)
    return (c, generator.randint(20, 400), *rest, generator.random() < 0.5)


STEP_MS = Exercise(
    step_ms,
    _draw_step,
    {
        "the head has only its forward matmul; two more follow in the backward pass": (
            " + matmul_ms(tokens, vocab, d) + matmul_ms(vocab, tokens, d)",
            "",
        ),
        "one block is counted; there are c.num_layers of them": (
            "c.num_layers * block_ms",
            "block_ms",
        ),
        "the head has two matmuls; it has one forward, and one for each of its two gradients": (
            " + matmul_ms(vocab, tokens, d)",
            "",
        ),
        "the update moves seven numbers of e bytes; AdamW's are float32 whatever e is": (
            "28 * num",
            "7 * e * num",
        ),
        "the update moves 28 numbers of e bytes; 28 is bytes already": ("28 * num", "28 * e * num"),
        "a multiplication and an addition count as one FLOP; a matmul does 2 m k n": (
            "max(2 * m",
            "max(m",
        ),
        "the times of FLOPs and of bytes are added up; the longer of the two counts": (
            "max(2 * m * k * n / limits.flops_per_s, moved / limits.bytes_per_s)",
            "(2 * m * k * n / limits.flops_per_s + moved / limits.bytes_per_s)",
        ),
        "the bytes of the head's matmuls are left out; the longer of the two times counts": (
            "max(2 * m * k * n / limits.flops_per_s, moved / limits.bytes_per_s)",
            "(2 * m * k * n / limits.flops_per_s)",
        ),
        "CPU and GPU are swapped; on a GPU the longer of host and device counts": (
            "if on_gpu",
            "if not on_gpu",
        ),
        "the head counts numbers, and not bytes; multiply by e": ("moved = e * (", "moved = ("),
        "host and device are added up on a GPU, too; there they work at the same time": (
            "max(device, host_ms) if on_gpu else device + host_ms",
            "device + host_ms",
        ),
        "the longer of host and device counts on a CPU, too; there one core does both, in turn": (
            "max(device, host_ms) if on_gpu else device + host_ms",
            "max(device, host_ms)",
        ),
        "the update is missing": (" + head + update", " + head"),
        "the head is missing": (" + head + update", " + update"),
        "the head and the update are in seconds, the blocks in ms: FLOPs over FLOP/s are seconds": (
            " + head + update",
            " + (head + update) / 1e3",
        ),
        "the head is in seconds, the rest in ms: FLOPs over FLOP/s are seconds": (
            "return 1e3 * max(2",
            "return max(2",
        ),
        "the update is in seconds, the rest in ms: bytes over bytes/s are seconds": (
            "1e3 * 28",
            "28",
        ),
    },
    "core",
)


def check_time_runs(attempt: Callable) -> None:
    """Check `time_runs(gpu, warmup, samples)` -> the median of a run's ms; `gpu` is a `ToyGPU`."""
    check(TIME_RUNS, attempt)


def check_train(attempt: Callable) -> None:
    """Check `train(gpu, batches)` -> (mean, largest) loss; `gpu` is a `ToyTrainer`."""
    check(TRAIN, watched(attempt))


def check_backward_roofline(attempt: Callable) -> None:
    """Check `backward_roofline(batch, length, d, heads, f, e, ridge)` -> name: (FLOPs, bytes,
    "arithmetic" or "memory")."""
    check(BACKWARD_ROOFLINE, with_tuples(attempt))


def check_diagnose(attempt: Callable) -> Callable:
    """Check `diagnose(kernels)` -> "launch-bound", "memory-bound" or "compute-bound"; return it
    if it is right, or else the solution."""
    return check(DIAGNOSE, attempt)


def check_forward(attempt: Callable) -> None:
    """Check `forward(blocks, x)` -> the result of all blocks, with at most half the memory."""
    check(FORWARD, judged(attempt))


def check_adamw(attempt: Callable) -> None:
    """Check `adamw(p, g, m, v, lr)`, which changes p, m and v in place; show how long it takes."""
    check(ADAMW, updated(attempt))


def check_step_ms(attempt: Callable) -> Callable:
    """Check `step_ms(c, tokens, e, block_ms, limits, host_ms, on_gpu)` -> ms; return it if it is
    right, or else the solution."""
    return check(STEP_MS, attempt)
