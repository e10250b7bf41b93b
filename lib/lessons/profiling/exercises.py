"""Exercises of notebook 04: timing, a hidden wait, traces, a planted bottleneck, memory, steps."""

from __future__ import annotations

import dataclasses
import functools
import math  # noqa: F401 (a mistake uses it)
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.lessons.differences import Named
from lib.lessons.exercise import check_of, exercise
from lib.lessons.inputs import choices, ints, lists
from lib.lessons.profiling.frugal import (
    backward_at_the_end,  # noqa: F401 (a mistake calls it)
    draw_hidden,
    frugal,
)
from lib.lessons.profiling.plants import CAUSES
from lib.lessons.profiling.simulated import Kernel, ToyGPU, ToyTrainer, kernels_of
from lib.lessons.profiling.stacks import draw_stack, peak_share, run_stack
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.measurement import wall_ms
from lib.profiling.roofline import Limits
from lib.profiling.trace import category_of

check = check_of(__name__)
# The reader's function if it is right, or else the solution.
take = check_of(__name__, returns=True)


# A clock, read too early


def draw_timing(generator: random.Random, size: int) -> tuple:
    warmup, samples = generator.randint(1, 3), generator.choice([3, 4, 5, 6])
    # slow at first, and slow once more, now and then, when something else runs
    slow = [generator.randint(50, 99) for _ in range(warmup)]
    usual = generator.randint(5, 20)
    steady = [usual + generator.randint(0, 9) for _ in range(samples)]
    steady[generator.randrange(samples)] += generator.choice([0, 40])
    return ToyGPU(slow + steady), warmup, samples


@exercise("warm-up", draw_timing)
def time_runs(gpu: ToyGPU, warmup: int, samples: int) -> float:
    for _ in range(warmup):
        gpu.run()
    gpu.wait()  # for the warm-up
    times = []
    for _ in range(samples):
        start = gpu.clock()
        gpu.run()
        gpu.wait()  # for this run
        times.append(gpu.clock() - start)
    return statistics.median(times)


time_runs.mistakes = """
gpu.wait()  # for this run => pass
    | nothing waits for the device between gpu.run() and the second reading of the clock, so that
    only the launch is timed
gpu.wait()  # for the warm-up => pass
    | the warm-up is not waited for, so that its work counts in the first sample
range(warmup) => range(0) && range(samples) => range(warmup + samples)
    | the warm-up is timed too; its runs must not count
statistics.median => statistics.median_high
    | the higher of the two middle times is returned; for an even number of samples the median is
    their mean
statistics.median => statistics.median_low
    | the lower of the two middle times is returned, as torch.median does; for an even number of
    samples the median is their mean
times = [] => times, first = [], gpu.clock() && gpu.wait()  # for this run => pass
    && statistics.median(times) => (gpu.wait(), gpu.clock() - first)[1] / samples
    | the device is waited for once after all runs, which gives their mean; wait in each
"""


# One number is no number


def on_drifting_machine(interleaved: Callable, costs: list[int], rounds: int) -> Named:
    """Times and order of calls, on a machine on which each call is slower than the one before."""
    now, order = 0, []

    def run(cost: int) -> None:
        nonlocal now
        order.append(cost)
        now += cost + len(order)

    # of equal costs: the same function, twice
    functions = {cost: functools.partial(run, cost) for cost in costs}
    times = interleaved([functions[cost] for cost in costs], rounds, lambda: now)
    return Named({"costs in the order of calls": order, "times": times})


@exercise(
    "warm-up",
    {"costs": lists(choices(10, 20, 30, 50), 2, 4), "rounds": ints(2, 5)},
    harness=on_drifting_machine,
)
def interleaved(runs: Sequence[Callable], rounds: int, clock: Callable) -> list[list[float]]:
    times = [[] for _ in runs]
    order = list(range(len(runs)))
    for _ in range(rounds):
        for number in order:
            start = clock()
            runs[number]()
            times[number].append(clock() - start)
        order.reverse()
    return times


interleaved.mistakes = """
order.reverse() => pass
    | every round has the same order, so that on a machine that slows down the later ones lose;
    reverse it after each
for _ in range(rounds): => for order in [[number] * rounds for number in order]:
    | all calls of one come before all of the next; call each once in a round
times[number].append => times[order.index(number)].append
    | times are kept by the place in the round, not by the function; in every second round these
    differ
[[] for _ in runs] => [[]] * len(runs)
    | all functions share one list: `[[]] * n` is n times the same
[[] for _ in runs] => {run: [] for run in runs}
    && times[number].append => times[runs[number]].append
    && return times => return list(times.values())
    | times are kept by function, but the same function may come twice; keep a list for each place
"""


# Who waits for whom: the hidden .item()


def draw_batches(generator: random.Random, size: int) -> tuple:
    # now and then all losses are negative
    shift = generator.choice([0, 0, -150])
    return ([shift + batch for batch in lists(ints(0, 50), 3, 17)(generator, size)],)


def on_toy_trainer(train: Callable, batches: list[int]) -> Named:
    """The result of a loop, and how often the host waited before its last launch."""
    gpu = ToyTrainer()
    found = train(gpu, batches)
    return Named({"mean and largest": found, "waits before the last step": gpu.early_waits})


def loop_ms(train: Callable) -> float:
    """The toy's ms for 20 steps, everything done."""
    gpu = ToyTrainer()
    train(gpu, list(range(20)))
    return max(gpu.now, gpu.busy_until)


@exercise(
    "core",
    draw_batches,
    harness=on_toy_trainer,
    measure=loop_ms,
    # a running sum and maximum are right; a GPU that idles while all batches are loaded is not
    at_most=1.35,
    unit="ms for 20 steps (the toy's clock)",
)
def train(gpu: ToyTrainer, batches: Sequence[int]) -> tuple[float, float]:
    losses = [gpu.step(gpu.load(batch)) for batch in batches]
    values = [loss.item() for loss in losses]
    return sum(values) / len(values), max(values)


train.mistakes = """
gpu.step(gpu.load(batch)) for => gpu.step(gpu.load(batch)).item() for && loss.item() for => loss for
    | each step's loss is read as soon as it is launched, by `.item()`, `float()`, a format or a
    comparison
losses = [gpu.step(gpu.load(batch)) for batch in batches] =>
    losses = [(loss := gpu.step(gpu.load(batch)), n and loss > 0)[0] for n, batch in
    enumerate(batches)]
    | from the second step on, the number of a loss is needed on the host inside the loop: by a
    comparison, or by reading the loss of the step before
/ len(values) => | the mean is a sum; divide by the number of batches
max( => min( | the smallest loss is returned, not the largest
max(values) => max(0.0, *values) | the largest begins at 0, but losses may be negative
loss.item() for => loss for
    | the results are still on the device; read them with `.item()` at the end
"""


# Three traces


def draw_trace(generator: random.Random, size: int) -> tuple:
    begin = generator.choice([0, 1000, 250_000])
    # exactly half of the time busy, or of the busy time in matmuls
    if generator.random() < 0.2:
        gap = generator.choice([0, 20])
        work = [(10, MATMUL), (10, generator.choice(CHAIN))]
    # matmuls take more than half of the busy time, and less than half of the whole
    elif generator.random() < 0.25:
        longer, shorter = generator.randint(30, 60), generator.randint(5, 25)
        gap = generator.randint(longer - shorter + 1, longer + shorter)
        work = [(longer, generator.choice([MATMUL, ATTENTION])), (shorter, generator.choice(CHAIN))]
        generator.shuffle(work)
    # many short ones or a few long ones may be compute-bound, so count time, not kernels
    else:
        short, launch_us = generator.choice([((2, 30), 100), ((20, 90), 10), ((20, 90), 10)])
        names = [MATMUL, ATTENTION, *CHAIN[: generator.randint(1, 4)]]
        work = [(generator.randint(*short), generator.choice(names)) for _ in range(2 + size)]
        work[0] = (work[0][0] * generator.choice([1, 4, 8]), work[0][1])
        return (kernels_of(work, launch_us, begin),)
    (first_us, first), (second_us, second) = work
    start = begin + first_us + gap
    return ([Kernel(begin, begin + first_us, first), Kernel(start, start + second_us, second)],)


# Names that kernels have in the recorded steps.
MATMUL, ATTENTION = "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT", "cudnn_..._sdpa_sm90_flash_fprop"
CHAIN = ("vectorized_elementwise_kernel", "reduce_kernel", "_swiglu_kernel", "adamw_kernel")


@exercise("core", draw_trace)
def diagnose(kernels: Sequence[Kernel]) -> str:
    span = kernels[-1].end - kernels[0].start
    busy = sum(kernel.end - kernel.start for kernel in kernels)
    if busy < span / 2:
        return "launch-bound"
    right = [kernel for kernel in kernels if category_of(kernel.name) in ("matmul", "attention")]
    in_matmuls = sum(kernel.end - kernel.start for kernel in right)
    return "compute-bound" if in_matmuls > busy / 2 else "memory-bound"


diagnose.mistakes = """
in_matmuls > busy / 2 => len(right) > len(kernels) / 2 | kernels are counted; add up their time
busy < span / 2 => False
    | the gaps are never looked at; a GPU that idles more than half of the time is launch-bound
busy < span / 2 => busy < span / 2 and sum(kernel.end - kernel.start for kernel in kernels if
    category_of(kernel.name) in ("matmul", "attention")) <= busy / 2
    | matmuls are looked at before the gaps; a GPU that idles more than half of the time is
    launch-bound, whatever its kernels are
- kernels[0].start => | the time runs from 0; it starts with the first kernel
in ("matmul", "attention") => == "matmul"
    | attention is not counted; fused, it is right of the ridge like the matmuls
in_matmuls > busy / 2 => in_matmuls > span / 2
    | the time in matmuls is compared with the whole time, gaps included; compare it with the busy
    time
"""


# Profile your own model: what is planted in it


def evidence(yours: Any, expected: str) -> str:
    """The signs that a guess would leave in the trace, and that it lacks."""
    if yours not in CAUSES:
        return f"it returned {yours!r}; the causes are {', '.join(map(repr, CAUSES))}"
    return f"it is not {yours!r}: {CAUSES[yours].signs}"


@exercise("core", {"plant": choices("B", "C")}, trials=8, describe=evidence)
def cause(plant: str) -> str:
    return {"B": "mask", "C": "float64"}[plant]


cause.mistakes = """
"B": "mask" => "B": "heads"
    | in B you see many small operators; count the calls, and then the time between them
"C": "float64" => "C": "heads"
    | in C you see more calls where each call has become longer
"B": "mask", "C": "float64" => "B": "float64", "C": "mask"
    | you have B and C the wrong way round
"""


# A roofline of the block's backward pass


def draw_block(generator: random.Random, size: int) -> tuple:
    heads, head_dim = generator.randint(1, 1 + size // 2), 8 * generator.randint(1, 8)
    d, f = heads * head_dim, 8 * generator.randint(1, 8 * size)
    sizes = generator.randint(1, size), generator.randint(2, 40 * size)
    ridge = generator.choice([3.5, 12.5, 50.5, 180.5])
    return *sizes, d, heads, f, generator.choice([2, 4]), ridge


@exercise("optional", draw_block)
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


backward_roofline.mistakes = """
to_input[0] + to_weight[0], to_input[1] + to_weight[1] => to_input
    | each matmul has one in the backward pass; it has two, for the gradients of its input and of
    its weight
length * (length + 1) // 2 => length * length
    | attention counts all pairs of tokens; the causal mask leaves T (T + 1) / 2 of a head
5 * 2 * pairs => 4 * 2 * pairs
    | fused attention counts four matmuls; it computes the scores again, which makes five
8 * e * tokens * d => 8 * e * tokens * d + 2 * e * pairs
    | fused attention moves the scores; it keeps them on the chip
5 * e * tokens * f => 3 * e * tokens * f
    | the gate moves three tensors of width f; its backward reads three and writes two
2 * m * k * n, e * ( => 2 * m * k * n, ( | numbers are counted, and not bytes; multiply by e
"""


# Fewer passes over memory


def naive_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
    """The chain of operators of the lesson."""
    m.mul_(0.9).add_(0.1 * g)
    v.mul_(0.95).add_(0.05 * g * g)
    p.sub_(lr * (m / (v.sqrt() + 1e-8) + 0.01 * p))


def updated(update: Callable, p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> Named:
    """The three tensors that an update changes in place."""
    if update(p, g, m, v, lr) is not None:
        raise TypeError("the update must change p, m and v, and return None")
    return Named(p=p, m=m, v=v)


def update_ms(update: Callable) -> float:
    """Best ms of an update of four million parameters, on one thread."""
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(1 << 22, generator=generator) for _ in range(4)]
    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    try:
        return min(wall_ms(lambda: update(*tensors, 1e-3), 1, cpu) for _ in range(6))
    finally:
        torch.set_num_threads(threads)


def draw_update(generator: random.Random, size: int) -> tuple:
    torch_generator = torch.Generator().manual_seed(generator.randrange(1 << 30))
    count = generator.choice([1, 7, 1000, 40_000])
    p, g, m = (torch.randn(count, generator=torch_generator) for _ in range(3))
    v = torch.rand(count, generator=torch_generator)
    # a weight that has had no gradient for long: only epsilon keeps its update finite
    g[-1] = v[-1] = 0
    return p, g, m, v, generator.choice([0.1, 0.5])


@exercise(
    "open",
    draw_update,
    harness=updated,
    trials=30,
    measure=update_ms,
    baseline=naive_adamw,
    unit="ms",
)
def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
    tile = 1 << 15
    for a, b, c, d in zip(p.split(tile), g.split(tile), m.split(tile), v.split(tile)):
        c.lerp_(b, 0.1)
        d.mul_(0.95).addcmul_(b, b, value=0.05)
        a.mul_(1 - 0.01 * lr).addcdiv_(c, d.sqrt().add_(1e-8), value=-lr)


adamw.mistakes = """
tile = 1 << 15 => tile, m, v = 1 << 15, m.clone(), v.clone()
    | m and v become other tensors, and those that are given stay as they are; change them in place
mul_(1 - 0.01 * lr). => | the weight decay is missing
addcmul_(b, b, value=0.05) => add_(b.abs(), alpha=0.05)
    | the second moment takes the gradient, not its square
value=-lr => value=lr | the weights move toward the gradient; the sign is wrong
d.sqrt().add_(1e-8) => d.add(1e-8).sqrt_() | epsilon is added under the root; add it to the root
p.split(tile) => [p[:tile]] | only the first tile is updated
"""


# Half the peak memory


@exercise(
    "optional",
    draw_stack,
    harness=run_stack,
    trials=4,
    seconds=20,
    measure=peak_share,
    unit="% of the peak without checkpoints",
)
def forward(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


forward.mistakes = """
checkpoint(block, x, use_reentrant=False) => block(x) | nothing is checkpointed
for block in blocks: => for block in [nn.Sequential(*blocks)]:
    | the whole stack is one checkpoint, so that the backward pass rebuilds everything at once; use
    smaller segments
for block in blocks: =>
    for block in [nn.Sequential(*blocks[: len(blocks) // 2]),
    nn.Sequential(*blocks[len(blocks) // 2 :])]:
    | the stack is two checkpoints, and the backward pass rebuilds half of it at once; use smaller
    segments
for block in blocks: => for index, block in enumerate(blocks): && x = checkpoint(block, x, =>
    x = block(x) if index % 2 else checkpoint(block, x,
    | only every second block is in a checkpoint; the others keep everything
checkpoint(block, x, => checkpoint(lambda y: block(y), x,
    | the function given to the checkpoint looks `block` up when it runs again, and by then the loop
    has moved on; pass the block itself
checkpoint(block, x, => checkpoint(block, x.detach(),
    | x is detached, so that no gradient reaches the blocks before
"""


# A whole step


@dataclasses.dataclass(frozen=True, repr=False)
class Shape(ModelConfig):
    """A model, shown by what the exercise asks for."""

    def __repr__(self) -> str:
        sizes = f"vocab_size={self.vocab_size}, d_model={self.d_model}"
        return f"ModelConfig({sizes}, num_layers={self.num_layers}, ...)"


def draw_step(generator: random.Random, size: int) -> tuple:
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
    device_ms = step_ms.solve(c, 100, 4, 1.0, limits, 0.0, False)
    host_ms = round(device_ms * generator.choice([0.2, 0.6, 1.5, 3]), 3)
    rest = (generator.choice([2, 4]), 0.25 * generator.randint(1, 8), limits, host_ms)
    return (c, generator.randint(20, 400), *rest, generator.random() < 0.5)


@exercise("optional", draw_step)
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


step_ms.mistakes = """
+ matmul_ms(tokens, vocab, d) + matmul_ms(vocab, tokens, d) =>
    | the head has only its forward matmul; two more follow in the backward pass
c.num_layers * block_ms => block_ms | one block is counted; there are c.num_layers of them
28 * num => 7 * e * num
    | the update moves seven numbers of e bytes; AdamW's are float32 whatever e is
max(2 * m => max(m | a multiplication and an addition count as one FLOP; a matmul does 2 m k n
max(2 * m * k * n / limits.flops_per_s, moved / limits.bytes_per_s) =>
    (2 * m * k * n / limits.flops_per_s + moved / limits.bytes_per_s)
    | the times of FLOPs and of bytes are added up; the longer of the two counts
max(device, host_ms) if on_gpu else device + host_ms => device + host_ms
    | host and device are added up on a GPU, too; there they work at the same time
"""


# The largest tensor of all


@exercise("optional", draw_hidden, harness=frugal, trials=60)
def loss_in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    loss, num_tokens = torch.zeros(()), len(hidden)
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for start in range(0, num_tokens, chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        logits = hidden[chunk] @ weight.T  # (chunk, vocab)
        rows = torch.arange(len(logits))
        loss -= logits.log_softmax(-1)[rows, targets[chunk]].sum()
        d_logits = logits.softmax(-1)
        d_logits[rows, targets[chunk]] -= 1
        d_hidden[chunk] = d_logits @ weight
        d_weight += d_logits.T @ hidden[chunk]
    return loss / num_tokens, d_hidden / num_tokens, d_weight / num_tokens


loss_in_chunks.mistakes = """
loss, num_tokens = torch.zeros(()), len(hidden) =>
    loss, num_tokens, chunk_tokens = torch.zeros(()), len(hidden), len(hidden)
    | all logits are made at once; go through the tokens chunk by chunk
loss, num_tokens = torch.zeros(()), len(hidden) =>
    return backward_at_the_end(hidden, weight, targets, chunk_tokens)
    | backward is called once, at the end, so autograd keeps every chunk's logits until then; call
    it for each chunk
d_logits[rows, targets[chunk]] -= 1 => pass
    | the one-hot of the target is missing; the gradient is softmax - one-hot
d_weight += => d_weight = | d_weight keeps the last chunk alone; add up the chunks
d_hidden / num_tokens, d_weight / num_tokens => d_hidden, d_weight
    | the gradients are those of the sum; divide them by the number of tokens
].sum() => ].mean() * num_tokens / math.ceil(num_tokens / chunk_tokens)
    | the loss is a mean over chunks, though the last may be shorter; add up all losses, and divide
    once
"""
