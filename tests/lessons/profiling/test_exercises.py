"""The exercises of notebook 04 against independent answers; their mistakes: test_exercise.py."""

import dataclasses
import inspect
import re
from collections import Counter

import nbformat
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lib.core.files import ROOT
from lib.lessons.exercise import verdict
from lib.lessons.profiling import exercises
from lib.lessons.profiling.exercises import loop_ms, naive_adamw
from lib.lessons.profiling.records import anonymous_traces
from lib.lessons.profiling.simulated import ToyGPU, ToyTrainer
from lib.lessons.profiling.stacks import Stack, make_stack, peak_bytes, plain, run_stack
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.roofline import backward_costs, predicted_ms
from lib.profiling.trace import category_of
from tests.lessons.remembered import remembered

REMEMBERED = remembered(exercises.forward)


def time_runs(gpu, warmup, samples):
    """Waits more often than needed."""
    times = []
    for _ in range(warmup + samples):
        gpu.wait()
        start = gpu.clock()
        gpu.run()
        gpu.wait()
        times.append(gpu.clock() - start)
    times = sorted(times[warmup:])
    return (times[(samples - 1) // 2] + times[samples // 2]) / 2


def interleaved(runs, rounds, clock):
    """By index, and slices that turn around."""
    times = [[None] * rounds for _ in runs]
    for one in range(rounds):
        for number in range(len(runs))[:: 1 - 2 * (one % 2)]:
            before = clock()
            runs[number]()
            times[number][one] = clock() - before
    return times


def train(gpu, batches):
    """Sums on the device, unlike the solution."""
    losses = []
    for batch in batches:
        losses.append(gpu.step(gpu.load(batch)))
    mean = sum(losses) / len(losses)
    return mean.item(), max(float(loss) for loss in losses)


def train_with_maximum(gpu, batches):
    """All on the device: a batch and three launches a step."""
    largest = total = None
    for batch in batches:
        loss = gpu.step(gpu.load(batch))
        largest = loss if largest is None else gpu.maximum(largest, loss)
        total = loss if total is None else total + loss
    return (total / len(batches)).item(), largest.item()


def train_that_launches_at_the_end(gpu, batches):
    losses = [gpu.step(gpu.load(batch)) for batch in batches]
    largest = max(loss.item() for loss in losses)
    return (sum(losses) / len(losses)).item(), largest


def slow_train(gpu, batches):
    """The loop of the lesson, whose comparison waits for the GPU in every step."""
    total, largest = 0.0, None
    for batch in batches:
        loss = gpu.step(gpu.load(batch))
        total = total + loss
        if largest is None or loss > largest:
            largest = loss
    return (total / len(batches)).item(), largest.item()


def diagnose(kernels):
    """By category, from the whole busy time."""
    spent = Counter()
    for start, end, name in kernels:
        spent[category_of(name)] += end - start
    if 2 * spent.total() < max(k.end for k in kernels) - min(k.start for k in kernels):
        return "launch-bound"
    others = spent.total() - spent["matmul"] - spent["attention"]
    return "compute-bound" if others < spent.total() / 2 else "memory-bound"


def backward_roofline(batch, length, d, heads, f, e, ridge):
    """Those of `lib`, without the small FLOPs of what memory limits; lists in place of tuples."""
    shape = ModelConfig(
        vocab_size=2,
        context_length=length,
        d_model=d,
        num_layers=1,
        num_heads=heads,
        d_ff=f,
        positions="none",
    )
    costs = backward_costs(shape, batch, length, element_bytes=e)
    for name in ("RMSNorm", "residual sum", "SiLU and gate"):
        costs[name] = dataclasses.replace(costs[name], flops=0)
    for name in ("RoPE", "scores", "mask and softmax", "value product"):
        del costs[name]
    return {
        name: [cost.flops, cost.num_bytes, "arithmetic" if cost.intensity > ridge else "memory"]
        for name, cost in costs.items()
    }


def adamw(p, g, m, v, lr):
    """Whole tensors, and PyTorch's words for the same."""
    m += 0.1 * (g - m)
    v += 0.05 * (g.square() - v)
    p -= lr * (m / (v.sqrt() + 1e-8) + 0.01 * p)


def two_at_a_time(blocks, x):
    for first in range(0, len(blocks), 2):
        x = checkpoint(nn.Sequential(*blocks[first : first + 2]), x, use_reentrant=False)
    return x


def step_ms(c, tokens, e, block_ms, limits, host_ms, on_gpu):
    """That of `lib`, with the time of its blocks replaced by the given one."""
    c = dataclasses.replace(c, context_length=tokens)
    deeper = dataclasses.replace(c, num_layers=c.num_layers + 1)
    here, below = (predicted_ms(m, 1, tokens, limits, element_bytes=e) for m in (c, deeper))
    weights = num_parameters(deeper) - num_parameters(c)
    of_a_block = below - here - 28e3 * weights / limits.bytes_per_s
    device_ms = here + c.num_layers * (block_ms - of_a_block)
    return max(device_ms, host_ms) if on_gpu else device_ms + host_ms


@pytest.mark.parametrize(
    ("name", "independent"),
    [
        ("time_runs", time_runs),
        ("interleaved", interleaved),
        ("train", train),
        ("train", train_with_maximum),
        ("train", train_that_launches_at_the_end),
        ("diagnose", diagnose),
        ("backward_roofline", backward_roofline),
        ("adamw", adamw),
        ("adamw", naive_adamw),
        ("forward", two_at_a_time),
        ("step_ms", step_ms),
    ],
)
def test_an_independent_answer_is_right(name, independent):
    exercise = dataclasses.replace(getattr(exercises, name), measure=None)
    assert verdict(exercise, independent, seed=0).startswith("right")


def test_the_queue_of_the_toy_runs_one_piece_after_the_other():
    gpu = ToyGPU([10, 5])
    gpu.run()
    gpu.run()
    assert gpu.clock() == 2
    gpu.wait()
    # the first starts when it is launched, at 1 ms
    assert gpu.clock() == 1 + 10 + 5
    gpu.wait()
    assert gpu.clock() == 16


def test_the_failing_call_shows_the_work_of_the_toy():
    text = verdict(exercises.time_runs, lambda gpu, warmup, samples: -1.0, seed=0)
    assert "ToyGPU(work_ms=[" in text


@pytest.mark.parametrize("number", [0.0, 100])
def test_the_larger_of_a_loss_and_a_number_is_found_on_the_device(number):
    gpu = ToyTrainer()
    loss = gpu.step(gpu.load(1))
    launched = gpu.now
    found = gpu.maximum(loss, number), gpu.maximum(number, loss)
    # two launches, and no wait
    assert gpu.now == launched + 2
    assert {larger.item() for larger in found} == {max(loss.item(), number)}


def test_a_loss_that_was_not_read_is_no_number():
    text = verdict(exercises.train, lambda gpu, batches: (gpu.step(gpu.load(1)),) * 2, seed=0)
    assert "a loss that is still on the device" in text


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss: loss > 0,
        lambda loss: loss <= 0,
        float,
        lambda loss: f"{loss:.2f}",
        lambda loss: loss.item(),
    ],
)
def test_whatever_needs_a_loss_on_the_host_waits_for_it(ask):
    gpu = ToyTrainer()
    loss = gpu.step(gpu.load(3))
    total = loss + 1
    assert gpu.now == 2 + 1 + 1
    ask(total)
    # 2 ms to load and 1 to launch, then 4 on the device
    assert gpu.now == 7
    assert gpu.spans[-1] == ("wait", 4, 7)


def test_a_loop_that_waits_or_launches_more_takes_longer():
    right = exercises.train.solve
    # the device takes 4 ms a step; a waiting loop adds what the host takes to prepare it
    assert loop_ms(right) == 3 + 20 * 4
    assert loop_ms(slow_train) > 1.6 * loop_ms(right)
    # a batch and three launches are 5 ms of host for 4 of GPU: launch-bound
    assert loop_ms(train_with_maximum) >= 20 * 5


class OwnCheckpoint(torch.autograd.Function):
    """As notebook 04 writes it; it holds the gradients a little longer than PyTorch's."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(gradient)
        return None, x.grad


def own_halves(blocks, x):
    half = len(blocks) // 2
    x = OwnCheckpoint.apply(nn.Sequential(*blocks[:half]), x)
    return OwnCheckpoint.apply(nn.Sequential(*blocks[half:]), x)


def own_every_second(blocks, x):
    for index, block in enumerate(blocks):
        x = block(x) if index % 2 else OwnCheckpoint.apply(block, x)
    return x


@pytest.mark.parametrize(
    ("attempt", "mistake"),
    [
        (own_halves, "the stack is two checkpoints"),
        (own_every_second, "only every second block is in a checkpoint"),
        (lambda blocks, x: OwnCheckpoint.apply(nn.Sequential(*blocks), x), "the whole stack is"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_too_few_checkpoints_are_named_with_the_notebooks_own(attempt, mistake, seed):
    text = verdict(REMEMBERED, attempt, seed=seed)
    assert "peak, % of a plain loop's: yours" in text
    assert "at most 50" in text
    assert f"It looks as if {mistake}" in text


def half_the_gradients(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
        x.register_hook(lambda gradient: gradient / 2)
    return x


def without_gradients(blocks, x):
    with torch.no_grad():
        return nn.Sequential(*blocks)(x)


@pytest.mark.parametrize(
    ("attempt", "found"),
    [
        (without_gradients, "gradient of x: yours None, expected <tensor of shape"),
        (half_the_gradients, "gradient of x, position (0, 0): yours"),
        (lambda blocks, x: 2 * x, "result, position (0, 0): yours"),
        (lambda blocks, x: x[:1], "result: yours has shape (1, "),
        (lambda blocks, x: None, "the result must be that of the last block, got None"),
        (lambda blocks, x: [x], "the result must be that of the last block, got [tensor"),
    ],
)
def test_a_wrong_result_is_told_from_wrong_and_from_missing_gradients(attempt, found):
    text = verdict(REMEMBERED, attempt, seed=0)
    assert found in text
    assert "It looks as if" not in text


def test_the_three_traces_are_of_three_kinds():
    found = {name: diagnose(kernels) for name, kernels in anonymous_traces().items()}
    assert found == {"A": "memory-bound", "B": "launch-bound", "C": "compute-bound"}


def test_the_peak_of_a_stack_counts_what_is_alive_at_once():
    blocks, x = make_stack(8, 8, 0), torch.ones(64, 8, requires_grad=True)

    def recomputed(blocks, x):
        for block in blocks:
            x = OwnCheckpoint.apply(block, x)
        return x

    # a block keeps at least its input and tanh of four times its width
    assert peak_bytes(plain, blocks, x) >= 8 * 5 * x.nbytes
    assert peak_bytes(recomputed, blocks, x) < peak_bytes(plain, blocks, x) / 2
    ours, theirs = (run_stack(way, Stack(8, 16, 0)) for way in (recomputed, two_at_a_time))
    costs = ("runs of a block", "peak, % of a plain loop's")
    assert [ours[name] for name in costs] == [theirs[name] for name in costs] == [2, 50]


def test_the_naive_update_is_the_one_of_the_notebook():
    cells = nbformat.read(ROOT / "notebooks/04_profiling.ipynb", as_version=4).cells
    lines = inspect.getsource(naive_adamw).splitlines()[2:]
    assert any(
        "def naive_adamw" in cell.source and "\n".join(lines) in cell.source for cell in cells
    )


def test_the_open_update_is_timed_beside_the_naive_one():
    _, figures = verdict(exercises.adamw, adamw, seed=0).splitlines()
    assert re.fullmatch(r"  yours .+ ms, the solution .+ ms, `naive_adamw` .+ ms", figures)


def test_an_update_that_returns_something_is_told_to_work_in_place():
    text = verdict(exercises.adamw, lambda p, g, m, v, lr: p, seed=0)
    assert "must change p, m and v, and return None" in text


def test_a_guess_at_a_plant_is_told_what_its_trace_would_show():
    text = verdict(exercises.cause, lambda plant: "heads", seed=0)
    assert "it is not 'heads': attention would have several times as many matmuls" in text
    text = verdict(exercises.cause, lambda plant: "rope", seed=0)
    assert "it returned 'rope'; the causes are 'one-hot', 'heads', 'mask'" in text


def test_a_loop_that_loads_everything_first_lets_the_gpu_idle():
    def loads_first(gpu, batches):
        losses = [gpu.step(batch) for batch in [gpu.load(batch) for batch in batches]]
        values = [loss.item() for loss in losses]
        return sum(values) / len(values), max(values)

    def on_the_device(gpu, batches):
        total = largest = None
        for batch in batches:
            loss = gpu.step(gpu.load(batch))
            total = loss if total is None else total + loss
            largest = loss if largest is None else gpu.maximum(largest, loss)
        return (total / len(batches)).item(), largest.item()

    assert "at too high a cost" in verdict(exercises.train, loads_first)
    assert verdict(exercises.train, on_the_device).startswith("right")
