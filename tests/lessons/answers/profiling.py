"""Answers to the exercises of notebook 04."""

import dataclasses
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lib.lessons.profiling import exercises
from lib.model.config import ModelConfig
from lib.model.costs import num_parameters
from lib.profiling.roofline import backward_costs, predicted_ms
from lib.profiling.trace import category_of
from tests.lessons.answers.table import right, wrong

# on a busy machine, times take long and tell nothing
ADAMW = dataclasses.replace(exercises.adamw, measure=None)


@right(exercises.time_runs)
def waits_too_often(gpu, warmup, samples):
    times = []
    for _ in range(warmup + samples):
        gpu.wait()
        start = gpu.clock()
        gpu.run()
        gpu.wait()
        times.append(gpu.clock() - start)
    times = sorted(times[warmup:])
    return (times[(samples - 1) // 2] + times[samples // 2]) / 2


@right(exercises.interleaved)
def by_index(runs, rounds, clock):
    """Slices that turn around."""
    times = [[None] * rounds for _ in runs]
    for one in range(rounds):
        for number in range(len(runs))[:: 1 - 2 * (one % 2)]:
            before = clock()
            runs[number]()
            times[number][one] = clock() - before
    return times


@right(exercises.train)
def sums_on_the_device(gpu, batches):
    losses = []
    for batch in batches:
        losses.append(gpu.step(gpu.load(batch)))
    mean = sum(losses) / len(losses)
    return mean.item(), max(float(loss) for loss in losses)


@right(exercises.train)
def all_on_the_device(gpu, batches):
    """A batch and three launches a step."""
    largest = total = None
    for batch in batches:
        loss = gpu.step(gpu.load(batch))
        largest = loss if largest is None else gpu.maximum(largest, loss)
        total = loss if total is None else total + loss
    return (total / len(batches)).item(), largest.item()


@wrong(exercises.train, "at too high a cost")
def loads_first(gpu, batches):
    losses = [gpu.step(batch) for batch in [gpu.load(batch) for batch in batches]]
    values = [loss.item() for loss in losses]
    return sum(values) / len(values), max(values)


@right(exercises.diagnose)
def diagnose_by_category(kernels):
    """From the whole busy time."""
    spent = Counter()
    for start, end, name in kernels:
        spent[category_of(name)] += end - start
    if 2 * spent.total() < max(k.end for k in kernels) - min(k.start for k in kernels):
        return "launch-bound"
    others = spent.total() - spent["matmul"] - spent["attention"]
    return "compute-bound" if others < spent.total() / 2 else "memory-bound"


@right(exercises.backward_roofline)
def roofline_by_lib(batch, length, d, heads, f, e, ridge):
    """Without the small FLOPs of what memory limits; lists in place of tuples."""
    sizes = {"vocab_size": 2, "context_length": length, "d_model": d, "num_heads": heads, "d_ff": f}
    shape = ModelConfig(**sizes, num_layers=1, positions="none")
    costs = backward_costs(shape, batch, length, element_bytes=e)
    for name in ("RMSNorm", "residual sum", "SiLU and gate"):
        costs[name] = dataclasses.replace(costs[name], flops=0)
    for name in ("RoPE", "scores", "mask and softmax", "value product"):
        del costs[name]
    return {
        name: [cost.flops, cost.num_bytes, "arithmetic" if cost.intensity > ridge else "memory"]
        for name, cost in costs.items()
    }


right(ADAMW)(exercises.naive_adamw)


@right(ADAMW)
def whole_tensors(p, g, m, v, lr):
    """PyTorch's words for the same."""
    m += 0.1 * (g - m)
    v += 0.05 * (g.square() - v)
    p -= lr * (m / (v.sqrt() + 1e-8) + 0.01 * p)


@wrong(ADAMW, "must change p, m and v, and return None")
def returns_what_it_is_given(p, g, m, v, lr):
    return p


@right(exercises.step_ms)
def step_by_lib(c, tokens, e, block_ms, limits, host_ms, on_gpu):
    """With the time of its blocks replaced by the given one."""
    c = dataclasses.replace(c, context_length=tokens)
    deeper = dataclasses.replace(c, num_layers=c.num_layers + 1)
    here, below = (predicted_ms(m, 1, tokens, limits, element_bytes=e) for m in (c, deeper))
    weights = num_parameters(deeper) - num_parameters(c)
    of_a_block = below - here - 28e3 * weights / limits.bytes_per_s
    device_ms = here + c.num_layers * (block_ms - of_a_block)
    return max(device_ms, host_ms) if on_gpu else device_ms + host_ms


wrong(exercises.cause, "not 'heads': attention would have several times as many")(lambda _: "heads")
wrong(exercises.cause, "it returned 'rope'; the causes are 'one-hot', 'heads'")(lambda _: "rope")


# The loss in chunks


@right(exercises.loss_in_chunks)
def autograd_in_chunks(hidden, weight, targets, chunk_tokens):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = 0.0
    for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens)):
        loss = F.cross_entropy(F.linear(h, weight), t, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    return total, hidden.grad, weight.grad


@wrong(exercises.loss_in_chunks, "as many numbers as the logits of")
def two_chunks_at_once(hidden, weight, targets, chunk_tokens):
    return exercises.loss_in_chunks.solve(hidden, weight, targets, 2 * chunk_tokens)


@wrong(exercises.loss_in_chunks, "tensor, as many numbers as the logits of all tokens")
def chunks_kept_in_a_list(hidden, weight, targets, chunk_tokens):
    logits = torch.cat([h @ weight.T for h in hidden.split(chunk_tokens)])
    gradient = (logits.softmax(-1) - F.one_hot(targets, len(weight))) / len(targets)
    return F.cross_entropy(logits, targets), gradient @ weight, gradient.T @ hidden


# A stack in checkpoints


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


def in_checkpoints(blocks, x, size):
    for first in range(0, len(blocks), size):
        x = OwnCheckpoint.apply(nn.Sequential(*blocks[first : first + size]), x)
    return x


@right(exercises.forward)
def one_at_a_time(blocks, x):
    return in_checkpoints(blocks, x, 1)


@right(exercises.forward)
def two_at_a_time(blocks, x):
    for first in range(0, len(blocks), 2):
        x = checkpoint(nn.Sequential(*blocks[first : first + 2]), x, use_reentrant=False)
    return x


@wrong(exercises.forward, "yours 100, at most 50\n  It looks as if nothing is checkpointed")
def a_plain_loop(blocks, x):
    return nn.Sequential(*blocks)(x)


@wrong(exercises.forward, "It looks as if the whole stack is one checkpoint")
def all_in_one(blocks, x):
    return in_checkpoints(blocks, x, len(blocks))


@wrong(exercises.forward, "It looks as if the stack is two checkpoints")
def in_halves(blocks, x):
    return in_checkpoints(blocks, x, len(blocks) // 2)


@wrong(exercises.forward, "gradient of x: yours None, expected <tensor of shape")
def without_gradients(blocks, x):
    with torch.no_grad():
        return nn.Sequential(*blocks)(x)


wrong(exercises.forward, "the result must be that of the last block, got [tens")(
    lambda blocks, x: [x]
)
