"""The exercises of notebook 04 against independent answers; their mistakes: test_exercise.py."""

import dataclasses
import inspect
from collections import Counter

import nbformat
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lib.core.files import ROOT
from lib.lessons.exercise import verdict
from lib.lessons.profiling import exercises
from lib.lessons.profiling.exercises import naive_adamw
from lib.lessons.profiling.records import anonymous_traces
from lib.lessons.profiling.simulated import ToyTrainer
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.roofline import backward_costs, predicted_ms
from lib.profiling.trace import category_of


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


def loads_first(gpu, batches):
    losses = [gpu.step(batch) for batch in [gpu.load(batch) for batch in batches]]
    values = [loss.item() for loss in losses]
    return sum(values) / len(values), max(values)


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


def in_checkpoints(num_segments=None):
    """Checkpoints of the notebook, of one block each, or of a number of segments."""

    def forward(blocks, x):
        size = len(blocks) // num_segments if num_segments else 1
        for first in range(0, len(blocks), size):
            x = OwnCheckpoint.apply(nn.Sequential(*blocks[first : first + size]), x)
        return x

    return forward


def without_gradients(blocks, x):
    with torch.no_grad():
        return nn.Sequential(*blocks)(x)


@pytest.mark.parametrize(
    ("name", "independent"),
    [
        ("time_runs", time_runs),
        ("interleaved", interleaved),
        ("train", train),
        ("train", train_with_maximum),
        ("diagnose", diagnose),
        ("backward_roofline", backward_roofline),
        ("adamw", adamw),
        ("adamw", naive_adamw),
        ("forward", two_at_a_time),
        ("forward", in_checkpoints()),
        ("step_ms", step_ms),
    ],
)
def test_an_independent_answer_is_right(name, independent):
    exercise = getattr(exercises, name)
    # on a busy machine, times take long and tell nothing
    exercise = dataclasses.replace(exercise, measure=None) if name == "adamw" else exercise
    assert verdict(exercise, independent, seed=0).startswith("right")


@pytest.mark.parametrize(
    ("name", "attempt", "words"),
    [
        ("train", loads_first, "at too high a cost"),
        ("adamw", lambda p, g, m, v, lr: p, "must change p, m and v, and return None"),
        ("cause", lambda plant: "heads", "not 'heads': attention would have several times as many"),
        ("cause", lambda plant: "rope", "it returned 'rope'; the causes are 'one-hot', 'heads'"),
        ("forward", in_checkpoints(1), "It looks as if the whole stack is one checkpoint"),
        ("forward", in_checkpoints(2), "It looks as if the stack is two checkpoints"),
        ("forward", without_gradients, "gradient of x: yours None, expected <tensor of shape"),
        ("forward", lambda blocks, x: [x], "the result must be that of the last block, got [tens"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(name, attempt, words):
    text = verdict(getattr(exercises, name), attempt, seed=0)
    assert text.startswith("not yet")
    assert words in text


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss: loss > 0,
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


def test_the_three_traces_are_of_three_kinds():
    found = {name: diagnose(kernels) for name, kernels in anonymous_traces().items()}
    assert found == {"A": "memory-bound", "B": "launch-bound", "C": "compute-bound"}


def test_the_naive_update_is_the_one_of_the_notebook():
    cells = nbformat.read(ROOT / "notebooks/04_profiling.ipynb", as_version=4).cells
    lines = inspect.getsource(naive_adamw).splitlines()[2:]
    assert any(
        "def naive_adamw" in cell.source and "\n".join(lines) in cell.source for cell in cells
    )
