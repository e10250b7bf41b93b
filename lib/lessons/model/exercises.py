"""Exercises of notebook 02: the loss, attention, RoPE, what a model costs, a head made by hand."""

from __future__ import annotations

import functools
import inspect
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lib.lessons.exercise import Exercise, check, edited


def _draw_tensor(generator: random.Random, *shape: int) -> Tensor:
    # halves, which print short and exactly
    values = [generator.randint(-6, 6) / 2 for _ in range(math.prod(shape))]
    return torch.tensor(values).reshape(shape)


def _draw_length(generator: random.Random, most: int, width: int) -> int:
    # never the width: a row used as a column then fits nothing, and raises
    return generator.choice([length for length in range(1, most + 1) if length != width])


def _draw_logits(generator: random.Random, size: int) -> tuple:
    vocab_size = generator.randint(2, 2 + size)
    num_tokens = _draw_length(generator, 3 + size // 2, vocab_size)
    logits = _draw_tensor(generator, num_tokens, vocab_size)
    # some so large that their exponentials, or their differences', leave float32
    logits = logits * generator.choice([1, 1, 1, 50]) + generator.choice([0, 0, 0, 100])
    targets = [generator.randrange(vocab_size) for _ in range(num_tokens)]
    return logits, torch.tensor(targets)


def cross_entropy_loss(logits: Tensor, targets: Tensor) -> Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    log_sum_exp = shifted.exp().sum(-1).log()
    of_target = shifted[torch.arange(len(targets)), targets]
    return (log_sum_exp - of_target).mean()


def _overflowing_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -probabilities[torch.arange(len(targets)), targets].log().mean()


CROSS_ENTROPY = Exercise(
    cross_entropy_loss,
    _draw_logits,
    {
        "large logits overflow in exp; subtract the row's maximum first": _overflowing_softmax,
        "the maximum is that of all logits; in other rows, exp may become 0. Subtract each row's": (
            "logits.amax(-1, keepdim=True)",
            "logits.max()",
        ),
        "large logits overflow inside the sum; subtract the row's maximum first": (
            "logits - logits.amax(-1, keepdim=True)",
            "logits",
        ),
        "the logarithm is taken of a probability that has become 0; "
        "logit - maximum - log of the sum needs no probability": (
            "log_sum_exp - of_target",
            "-(of_target.exp() / shifted.exp().sum(-1)).log()",
        ),
        "the losses are added up; take their mean": ("mean()", "sum()"),
        "there is a loss for each token; take their mean": (".mean()", ""),
        "softmax runs over the tokens; each row of logits sums to 1 by itself": (
            "log_sum_exp - of_target",
            "-logits.log_softmax(0)[torch.arange(len(targets)), targets]",
        ),
        "the sign is missing; the loss is minus the logarithm": (
            "log_sum_exp - of_target",
            "of_target - log_sum_exp",
        ),
        "the logarithm is to base 2; the loss is in nats, by torch.log": (
            "mean()",
            "mean() / math.log(2)",
        ),
        "the rows' maxima or sums have lost their last dimension; keepdim=True keeps it": (
            ", keepdim=True",
            "",
        ),
        "the maximum is subtracted inside the sum only; subtract it from the target's logit too": (
            "of_target = shifted",
            "of_target = logits",
        ),
        "logits[:, targets] takes every target from every row; each row has one, "
        "logits[torch.arange(len(targets)), targets]": ("torch.arange(len(targets))", ":"),
        "the sum of exponentials runs over all tokens together; each row has its own, dim=-1": (
            "sum(-1)",
            "sum()",
        ),
        "maximum and sum run over all tokens together; each row has its own, dim=-1": (
            "amax(-1, keepdim=True)\n    log_sum_exp = shifted.exp().sum(-1)",
            "amax()\n    log_sum_exp = shifted.exp().sum()",
        ),
    },
)


# 2. The loss in chunks, with its gradients


def _draw_hidden(generator: random.Random, size: int) -> tuple:
    _load_dispatch()
    # so that the logits of all tokens are larger than any other tensor
    d_model, vocab_size = generator.randint(2, 3), generator.randint(4, 5 + size // 2)
    num_tokens = generator.choice([n for n in range(4, 7 + size) if n != vocab_size])
    hidden = _draw_tensor(generator, num_tokens, d_model) * generator.choice([1, 1, 1, 20])
    targets = torch.tensor([generator.randrange(vocab_size) for _ in range(num_tokens)])
    chunk_tokens = generator.choice([1, generator.randint(1, num_tokens - 1)])
    return hidden, _draw_tensor(generator, vocab_size, d_model), targets, chunk_tokens


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


def _mean_of_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens))
    parts = [loss_in_chunks(h, weight, y, chunk_tokens) for h, y in chunks]
    losses, d_hidden, d_weight = zip(*parts)
    count = len(parts)
    return sum(losses) / count, torch.cat(d_hidden) / count, sum(d_weight) / count


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> int:
    return math.ceil(len(hidden) / chunk_tokens)


def _backward_at_the_end(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens))
    losses = [F.cross_entropy(h @ weight.T, y, reduction="sum") for h, y in chunks]
    loss = torch.stack(losses).sum() / len(targets)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss, d_hidden, d_weight


def _backward_without_leaves(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int
) -> None:
    F.cross_entropy(hidden @ weight.T, targets).backward()


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes whose rows or columns are `width` long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.numbers, self.words = width, 0, ""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        is_wide = isinstance(result, Tensor) and self.width in result.shape
        if is_wide and result.numel() > self.numbers:
            self.numbers, shape = result.numel(), tuple(result.shape)
            name = op.overloadpacket.__name__
            self.words = f"logits of shape {shape}" if name in MATMULS else f"a {shape} tensor"
        return result


# PyTorch's own operations behind `@`.
MATMULS = ("mm", "addmm", "bmm", "matmul", "mv")
# With as many chunks, what autograd keeps for one of them is less than the logits of all.
MANY_CHUNKS = 12


class _Holder:
    """A tensor that autograd keeps; it dies when backward has used it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Kept:
    """Notes how many numbers autograd keeps at once in tensors whose rows are `width` long."""

    def __init__(self, width: int) -> None:
        self.width, self.numbers = width, 0
        self.alive: weakref.WeakSet[_Holder] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder(tensor)
        if tensor.shape[-1:] == (self.width,):
            self.alive.add(holder)
            self.numbers = max(self.numbers, sum(held.tensor.numel() for held in self.alive))
        return holder


@functools.cache
def _load_dispatch() -> None:
    """Have PyTorch import what a first operation under a mode needs, before calls are timed."""
    with _Largest(1):
        torch.zeros(1)


def frugal(attempt: Callable) -> Callable[..., Tensor]:
    """Return `attempt` with its three results as rows of one tensor: the loss, then the gradients.

    The function returned raises ValueError where the attempt makes more logits than those of a
    chunk, or another tensor as large, has autograd keep those of all chunks, or returns gradients
    of other shapes.
    """

    @functools.wraps(attempt)
    def run(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        num_logits, of_chunk = len(hidden) * len(weight), chunk_tokens * len(weight)
        kept = _Kept(len(weight))
        hooks = saved_tensors_hooks(kept.pack, lambda holder: holder.tensor)
        with _Largest(len(weight)) as largest, hooks:
            loss, d_hidden, d_weight = attempt(hidden, weight, targets, chunk_tokens)
        # the gradient of `weight` is as wide
        if largest.numbers > max(of_chunk, weight.numel()):
            whose = "all tokens" if largest.numbers >= num_logits else "several chunks"
            raise ValueError(
                f"it makes {largest.words}, as many numbers as the logits of {whose}; "
                f"chunk_tokens={chunk_tokens} allows {(chunk_tokens, len(weight))}"
            )
        if kept.numbers >= num_logits and len(hidden) >= MANY_CHUNKS * chunk_tokens:
            raise ValueError("autograd keeps the logits of all chunks at once")
        shapes = tuple(d_hidden.shape), tuple(d_weight.shape)
        if shapes != (tuple(hidden.shape), tuple(weight.shape)):
            raise ValueError(f"gradients have the shapes of hidden and weight, got {shapes}")
        loss_row = torch.as_tensor(loss).detach().expand(1, hidden.shape[1])
        return torch.cat((loss_row, d_hidden.detach(), d_weight.detach()))

    return run


def _wrong_loss(old: str, new: str) -> Callable[..., Tensor]:
    return frugal(edited(loss_in_chunks, old, new))


LOSS_IN_CHUNKS = Exercise(
    frugal(loss_in_chunks),
    _draw_hidden,
    {
        "all logits are made at once; go through the tokens chunk by chunk": _wrong_loss(
            "    for start", "    chunk_tokens = num_tokens\n    for start"
        ),
        "backward is called once, at the end, so autograd keeps every chunk's logits until then; "
        "call it for each chunk": frugal(_backward_at_the_end),
        "autograd does not track hidden and weight; call hidden.detach().requires_grad_(), and the "
        "same for weight": frugal(_backward_without_leaves),
        "the one-hot of the target is missing; the gradient is softmax - one-hot": _wrong_loss(
            "        d_logits[rows, targets[chunk]] -= 1\n", ""
        ),
        "the sign of the gradients is wrong; they are softmax - one-hot, and not the reverse": (
            _wrong_loss(
                "logits.softmax(-1)\n        d_logits[rows, targets[chunk]] -= 1",
                "-logits.softmax(-1)\n        d_logits[rows, targets[chunk]] += 1",
            )
        ),
        "d_weight keeps the last chunk alone; add up the chunks": _wrong_loss(
            "d_weight += ", "d_weight = "
        ),
        "the loss keeps the last chunk alone; add up the chunks": _wrong_loss(
            "loss -= logits", "loss = -logits"
        ),
        "the gradients are those of the sum; divide them by the number of tokens": _wrong_loss(
            "d_hidden / num_tokens, d_weight / num_tokens", "d_hidden, d_weight"
        ),
        "the loss is a sum; divide it by the number of tokens": _wrong_loss(
            "return loss / num_tokens", "return loss"
        ),
        "each chunk counts as much, though the last may be shorter; divide once, by the number of "
        "all tokens": frugal(_mean_of_chunks),
        "the means of the chunks are added up; divide once, by the number of all tokens": frugal(
            lambda *given: [_chunks(*given) * part for part in _mean_of_chunks(*given)]
        ),
        "the gradients are divided by the chunk's length; divide by the number of all tokens": (
            _wrong_loss("-= 1\n", "-= 1\n        d_logits *= num_tokens / len(rows)\n")
        ),
        "the loss is a mean over chunks, though the last may be shorter; add up all losses, and "
        "divide once": _wrong_loss(
            "].sum()", "].mean() * num_tokens / math.ceil(num_tokens / chunk_tokens)"
        ),
        "the last chunk is left out where it is shorter": _wrong_loss(
            "range(0, num_tokens, chunk_tokens)",
            "range(0, num_tokens - chunk_tokens + 1, chunk_tokens)",
        ),
        "exponentials overflow; subtract the row's maximum, or use log_softmax": _wrong_loss(
            "logits.log_softmax(-1)[rows", "(logits.exp() / logits.exp().sum(-1, True)).log()[rows"
        ),
    },
    "core",
    trials=60,
)


# 3. Attention with heads, which may share keys and values


def _draw_attention(generator: random.Random, size: int) -> tuple:
    head_dim, num_kv_heads = generator.randint(2, 3), generator.randint(1, 2)
    num_heads = num_kv_heads * generator.randint(1, 2 + size // 8)
    batch, length = generator.randint(1, 2), generator.randint(1, 2 + size // 2)
    # mostly not as wide as all heads together
    d_model = num_heads * head_dim + generator.randint(0, 2)
    x = _draw_tensor(generator, batch, length, d_model)
    rows = (num_heads, num_kv_heads, num_kv_heads)
    w_q, w_k, w_v = (_draw_tensor(generator, n * head_dim, d_model) / d_model for n in rows)
    return x, w_q, w_k, w_v, _draw_tensor(generator, d_model, num_heads * head_dim), num_heads


def attention(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_out: Tensor, num_heads: int
) -> Tensor:
    head_dim, length = len(w_q) // num_heads, x.shape[1]

    def split(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (batch, heads, length, head_dim)

    q, k, v = split(x @ w_q.T), split(x @ w_k.T), split(x @ w_v.T)
    group = num_heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)  # (batch, heads, queries, keys)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(-2)  # (batch, length, d_model)
    return out @ w_out.T


class _Without(TorchFunctionMode):
    """Raises ValueError where one of these functions of PyTorch is called."""

    def __init__(self, *functions: Callable) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.functions:
            raise ValueError(f"{function.__name__} does all of it; write it out")
        return function(*args, **(kwargs or {}))


def by_hand(attempt: Callable, *functions: Callable) -> Callable:
    """Return `attempt` as a function that must not call these functions of PyTorch."""

    @functools.wraps(attempt)
    def run(*arguments: Any) -> Any:
        with _Without(*functions):
            return attempt(*arguments)

    return run


ATTENTION = Exercise(
    attention,
    _draw_attention,
    {
        "the scale is missing; divide the scores by sqrt(head_dim)": (" / math.sqrt(head_dim)", ""),
        "the scale has the root of d_model; each head has scores of its own, so take head_dim": (
            "sqrt(head_dim)",
            "sqrt(x.shape[-1])",
        ),
        "there is no mask; a query must not see later keys": (
            ".masked_fill(~visible, -math.inf)",
            "",
        ),
        "the mask comes after the softmax, so weights no longer sum to 1; mask the scores before": (
            "scores.masked_fill(~visible, -math.inf).softmax(-1)",
            "scores.softmax(-1) * visible",
        ),
        "shared keys and values are not repeated; each serves num_heads // kv_heads queries": (
            "    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)\n",
            "",
        ),
        "scores are divided by head_dim; divide them by its root": (
            "math.sqrt(head_dim)",
            "head_dim",
        ),
        "hidden scores become 0, and exp(0) is 1; set them to -inf": ("-math.inf", "0"),
        "a query does not see its own key; key j is seen when j ≤ i": ("tril()", "tril(-1)"),
        # as above, but with the workbook's softmax, whose rows without a key are zeros
        "a query sees the keys before it but not its own; key j is seen when j ≤ i": (
            "tril()\n    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)",
            "tril(-1)\n    weights = scores.masked_fill(~visible, -math.inf)"
            ".softmax(-1).nan_to_num()",
        ),
        "each query sees the keys from its own on; it should see those up to its own": (
            "tril()",
            "triu()",
        ),
        "the softmax runs over the queries; each row of scores, dim=-1, sums to 1": (
            "softmax(-1)",
            "softmax(-2)",
        ),
        "heads are cut out of the wrong numbers: a head is head_dim neighbors of one token, so "
        "unflatten the last dimension, and then transpose": (
            "y.unflatten(-1, (-1, head_dim)).transpose(1, 2)",
            "y.reshape(len(y), -1, length, head_dim)",
        ),
        "heads are put together without being transposed back, which mixes tokens": (
            ".transpose(1, 2).flatten(-2)  # (batch, length, d_model)",
            ".reshape(x.shape)",
        ),
        "neighboring query heads get different keys; they form a group that shares one, so use "
        "repeat_interleave, and not repeat": (
            "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
            "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
        ),
        "the output projection is missing": ("out @ w_out.T", "out"),
        "w_out is not transposed; like all weights it is (out, in)": ("w_out.T", "w_out"),
        "the weights are not multiplied with the values": ("weights @ v", "weights @ k"),
        "only one head attends, across the whole width": (
            "head_dim, length = len(w_q) // num_heads",
            "head_dim, length = len(w_k)",
        ),
    },
    "core",
    trials=80,
)


# 4. RoPE in both layouts


def _draw_positions(generator: random.Random, size: int) -> tuple:
    head_dim = 2 * generator.randint(1, 2 + size // 4)
    x = _draw_tensor(generator, generator.randint(1, 2 + size // 2), head_dim)
    return x, generator.choice([10.0, 100.0, 10_000.0]), generator.choice(["pairs", "halves"])


def rotate(x: Tensor, theta: float, layout: str) -> Tensor:
    length, head_dim = x.shape
    frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)  # (head_dim / 2,)
    angles = torch.arange(length)[:, None] * frequencies  # (length, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()
    a, b = (x[:, 0::2], x[:, 1::2]) if layout == "pairs" else x.chunk(2, dim=-1)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    return torch.stack(rotated, -1).flatten(-2) if layout == "pairs" else torch.cat(rotated, -1)


ROTATE = Exercise(
    rotate,
    _draw_positions,
    {
        "both layouts are rotated in pairs of neighbors; in `halves`, coordinate i goes with "
        "i + head_dim / 2": lambda x, theta, layout: rotate(x, theta, "pairs"),
        "both layouts are rotated in halves; in `pairs`, coordinate 2i goes with 2i + 1": (
            lambda x, theta, layout: rotate(x, theta, "halves")
        ),
        "the two layouts are swapped": lambda x, theta, layout: rotate(
            x, theta, {"pairs": "halves", "halves": "pairs"}[layout]
        ),
        "the result of `pairs` comes in halves; stack a and b on a last dimension, and flatten": (
            'torch.stack(rotated, -1).flatten(-2) if layout == "pairs" else torch.cat(rotated, -1)',
            "torch.cat(rotated, -1)",
        ),
        "the result of `halves` comes in pairs; put a and b behind one another, with cat": (
            'torch.stack(rotated, -1).flatten(-2) if layout == "pairs" else torch.cat(rotated, -1)',
            "torch.stack(rotated, -1).flatten(-2)",
        ),
        "the rotation goes the other way; (a, b) becomes (a cos - b sin, a sin + b cos)": (
            "(a * cos - b * sin, a * sin + b * cos)",
            "(a * cos + b * sin, b * cos - a * sin)",
        ),
        "a sign is wrong in the first coordinate; it is a cos - b sin": (
            "a * cos - b * sin",
            "a * cos + b * sin",
        ),
        "a sign is wrong in the second coordinate; it is a sin + b cos": (
            "a * sin + b * cos",
            "a * sin - b * cos",
        ),
        "a is overwritten before b is computed, which needs the old one": (
            "    rotated = (a * cos - b * sin, a * sin + b * cos)",
            "    a = a * cos - b * sin\n    rotated = (a, a * sin + b * cos)",
        ),
        "the exponent is -i / head_dim; pair i has -2i / head_dim": (
            "torch.arange(0, head_dim, 2)",
            "torch.arange(head_dim // 2)",
        ),
        "the exponent is -4i / head_dim; pair i has -2i / head_dim": (
            "/ head_dim)",
            "/ (head_dim // 2))",
        ),
        "frequencies rise from pair to pair; the exponent is negative": (
            "(-torch.arange(0, head_dim, 2)",
            "(torch.arange(0, head_dim, 2)",
        ),
        "the first position is 1; positions begin at 0, which is not rotated": (
            "torch.arange(length)[:, None]",
            "torch.arange(1, length + 1)[:, None]",
        ),
        "in `pairs` the angles come in halves, as of `torch.cat((angles, angles), -1)`; both "
        "coordinates of a pair have the same angle, so use repeat_interleave": (
            "    a, b = (x[:, 0::2]",
            '    if layout == "pairs":\n'
            "        both = torch.cat((angles, angles), -1)\n"
            "        turned = torch.stack((-x[:, 1::2], x[:, 0::2]), -1).flatten(-2)\n"
            "        return x * both.cos() + turned * both.sin()\n"
            "    a, b = (x[:, 0::2]",
        ),
        "theta is 10,000 whatever is given; take the argument": ("theta **", "10_000.0 **"),
        "all pairs rotate at the speed of the first one": (
            "[:, None] * frequencies",
            "[:, None] * frequencies**0",
        ),
    },
    "core",
    trials=100,
)


# 5. What a model costs


def _draw_shape(generator: random.Random, size: int) -> tuple:
    kv_heads = generator.randint(1, 3)
    heads = kv_heads * generator.randint(1, 3)
    d_model = heads * generator.randint(1, 2 + size)
    layers, d_ff = generator.randint(1, 1 + size), generator.randint(1, 4 + 9 * size)
    vocab_size, context = generator.randint(5, 10 * size + 10), generator.randint(2, 2 + 9 * size)
    return d_model, d_ff, layers, heads, kv_heads, vocab_size, context


def bill(
    d_model: int,
    d_ff: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab_size: int,
    context: int,
) -> dict[str, int]:
    kv_width = d_model // heads * kv_heads
    matrices = layers * (2 * d_model**2 + 2 * d_model * kv_width + 3 * d_model * d_ff)
    head = vocab_size * d_model
    norms = (2 * layers + 1) * d_model
    return {
        "parameters": matrices + 2 * head + norms,
        "training FLOPs per token": 6 * (matrices + head) + 12 * layers * context * d_model,
        "KV cache bytes": 2 * layers * kv_width * context * 2,
    }


BILL = Exercise(
    bill,
    _draw_shape,
    {
        "norms have no FLOPs here but weights all the same: two in a layer, and one before the "
        "head": (" + norms", ""),
        "the norms of the layers are missing; each layer has two": (
            "(2 * layers + 1) * d_model",
            "d_model",
        ),
        "the norm before the head is missing": ("(2 * layers + 1)", "2 * layers"),
        "one of embedding and head is missing; both are vocab_size · d_model": ("2 * head", "head"),
        "the embedding has FLOPs; a lookup is no matmul": (
            "6 * (matrices + head)",
            "6 * (matrices + 2 * head)",
        ),
        "the norms have FLOPs of matmuls; 6 goes with each weight of a matrix": (
            "6 * (matrices + head)",
            "6 * (matrices + head + norms)",
        ),
        "all parameters count 6 FLOPs; an embedding is a lookup, and norms are no matmuls": (
            "6 * (matrices + head)",
            "6 * (matrices + 2 * head + norms)",
        ),
        "the head has no FLOPs; it is a matmul like any other": (
            "6 * (matrices + head)",
            "6 * matrices",
        ),
        "the FLOPs are those of the forward pass; backward takes twice as many again": (
            "6 * (matrices + head) + 12 *",
            "2 * (matrices + head) + 4 *",
        ),
        "attention between tokens is missing from the FLOPs: 12 · layers · context · d_model": (
            " + 12 * layers * context * d_model",
            "",
        ),
        "attention is counted for one layer; every layer has scores": (
            "12 * layers * context",
            "12 * context",
        ),
        "the scores that the mask hides are left out; here they count": (
            "12 * layers * context",
            "6 * layers * context",
        ),
        "scores are counted for key heads; every query head has its own, so they cost d_model": (
            "context * d_model",
            "context * kv_width",
        ),
        "the output projection is missing; attention has four matrices": (
            "2 * d_model**2 +",
            "d_model**2 +",
        ),
        "keys and values are as wide as queries everywhere; they have kv_heads · head_dim": (
            "d_model // heads * kv_heads",
            "d_model",
        ),
        "key and value projections have the width of the queries; they have kv_heads · head_dim": (
            "2 * d_model**2 + 2 * d_model * kv_width",
            "4 * d_model**2",
        ),
        "the cache holds keys and values of every query head; it holds kv_heads of them": (
            "2 * layers * kv_width * context * 2",
            "2 * layers * d_model * context * 2",
        ),
        "the cache counts heads; each key and each value has head_dim numbers": (
            "2 * layers * kv_width * context * 2",
            "2 * layers * kv_heads * context * 2",
        ),
        "the cache holds one layer; every layer has keys and values": (
            "2 * layers * kv_width * context * 2",
            "2 * kv_width * context * 2",
        ),
        "the cache is half as large as it should be: it holds both keys and values, of 2 bytes": (
            "2 * layers * kv_width * context * 2",
            "2 * layers * kv_width * context",
        ),
        "SwiGLU has two matrices; it has three": ("3 * d_model * d_ff", "2 * d_model * d_ff"),
    },
)


# 6. A head that looks at the token before

CONTEXT = 128
# The root of the mean square of a query's and a key's coordinates.
MOST_RMS = 2.0
WIDTHS = (16, 32, 64)


def previous_token_head(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    pairs = len(frequencies)
    # the fastest pairs tell neighbors apart; several of them, so that no other distance fits all
    size = torch.tensor([1.0] * 4 + [0.0] * (pairs - 4))
    size *= MOST_RMS * math.sqrt(2 * pairs) / size.norm()
    key = torch.stack([size, torch.zeros(pairs)], -1).flatten()
    # a query one position further on has been rotated by `frequencies` more than the key
    query = torch.stack([size * frequencies.cos(), -size * frequencies.sin()], -1).flatten()
    return query, key


def weights_by_distance(query: Tensor, key: Tensor, frequencies: Tensor) -> Tensor:
    """The attention that each position gives to the token 0, 1, 2, … before it.

    Args:
        query, key: (head_dim,), the same for all tokens, before RoPE rotates them in pairs.
        frequencies: (head_dim / 2,), in radians a token.

    Returns:
        (CONTEXT - 1, CONTEXT): the first position is left out, and nothing lies before it.
    """
    q, k = (torch.view_as_complex(x.reshape(-1, 2).contiguous()) for x in (query, key))
    distances = torch.arange(CONTEXT)[:, None]  # of the query from the key
    turns = torch.polar(torch.ones(CONTEXT, len(q)), distances * frequencies)
    scores = (q * k.conj() * turns).real.sum(-1) / math.sqrt(len(query))  # by distance
    outside = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
    return scores.expand(CONTEXT, -1).masked_fill(outside, -math.inf).softmax(-1)[1:]


def frequencies_of(head_dim: int) -> Tensor:
    """RoPE's, with θ = 10,000."""
    return 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)


def aimed(attempt: Callable) -> Callable[[Tensor], dict[str, Any]]:
    """Return `attempt` as a function that says what its head does, from the worst position."""

    @functools.wraps(attempt)
    def run(frequencies: Tensor) -> dict[str, Any]:
        query, key = (torch.as_tensor(x).detach().float() for x in attempt(frequencies))
        head_dim, shapes = 2 * len(frequencies), [tuple(query.shape), tuple(key.shape)]
        if shapes != [(head_dim,)] * 2:
            raise ValueError(f"query and key must each be ({head_dim},), got {shapes}")
        rms = max(x.square().mean().sqrt().item() for x in (query, key))
        weights = weights_by_distance(query, key, frequencies)
        worst = weights[weights[:, 1].argmin()].clone()
        worst[1] = 0
        next_best = "one beside it" if worst.argmax() <= 2 else "one further back"
        on_previous = f"the most, but less than half; {next_best} comes next"
        if rms < 0.9 * MOST_RMS:
            on_previous += ", and the arrows may be longer"
        if weights[:, 1].min() > 0.5:
            on_previous = "more than half"
        elif (weights.argmax(-1) != 1).any():
            on_previous = "less than another one"
        return {
            "RMS of query and key": "at most 2" if rms <= MOST_RMS + 1e-3 else "more than 2",
            "attention that the token before gets": on_previous,
        }

    return run


def missed_percent(attempt: Callable) -> float:
    """Percent of the attention that goes elsewhere, from the worst position, for head_dim 32."""
    frequencies = frequencies_of(32)
    query, key = (torch.as_tensor(x).detach() for x in inspect.unwrap(attempt)(frequencies))
    return 100 * (1 - weights_by_distance(query, key, frequencies)[:, 1].min().item())


def _draw_width(generator: random.Random, size: int) -> tuple:
    return (frequencies_of(WIDTHS[size % len(WIDTHS)]),)


def _wrong_head(old: str, new: str) -> Callable[[Tensor], dict[str, Any]]:
    return aimed(edited(previous_token_head, old, new))


PREVIOUS_TOKEN_HEAD = Exercise(
    aimed(previous_token_head),
    _draw_width,
    {
        "another token gets the most, as where query and key point the same way, or the query is "
        "rotated forward; rotate it back by one position": _wrong_head(
            "size * frequencies.cos(), -size * frequencies.sin()", "size, torch.zeros(pairs)"
        ),
        "narrow heads fail alone; give long arrows to three or more of the fastest pairs, as slow "
        "ones hardly tell neighbors apart": _wrong_head(
            "[1.0] * 4 + [0.0] * (pairs - 4)", "[1.0] * (pairs // 4) + [0.0] * (pairs - pairs // 4)"
        ),
        "arrows are too short to tell neighbors apart; drop the slow pairs, and make the fast ones "
        "as long as allowed": _wrong_head(
            "[1.0] * 4 + [0.0] * (pairs - 4))\n    size *= MOST_RMS",
            "[1.0] * pairs)\n    size *= 1",
        ),
        "slow pairs take length from the fast ones, which tell neighbors apart; let some be 0": (
            _wrong_head("[1.0] * 4 + [0.0] * (pairs - 4)", "[1.0] * pairs")
        ),
        "one or two pairs are too few; the fastest comes around after 6.28 tokens": _wrong_head(
            "[1.0] * 4 + [0.0] * (pairs - 4)", "[1.0] + [0.0] * (pairs - 1)"
        ),
        "query and key are longer than allowed; their mean square is at most 4": _wrong_head(
            "MOST_RMS * math", "2 * MOST_RMS * math"
        ),
    },
    "open",
    trials=6,
    measure=missed_percent,
    unit="% of the attention misses",
)


def check_cross_entropy(attempt: Callable) -> None:
    """Check `cross_entropy(logits, targets)`: (tokens, vocab), (tokens,) -> a scalar."""
    check(CROSS_ENTROPY, by_hand(attempt, F.cross_entropy))


def check_loss_in_chunks(attempt: Callable) -> None:
    """Check `loss_in_chunks(hidden, weight, targets, chunk_tokens)` -> the loss, its gradients."""
    check(LOSS_IN_CHUNKS, frugal(attempt))


def check_attention(attempt: Callable) -> None:
    """Check `attention(x, w_q, w_k, w_v, w_out, num_heads)` -> (batch, length, d_model)."""
    whole = F.scaled_dot_product_attention, F.multi_head_attention_forward
    check(ATTENTION, by_hand(attempt, *whole))


def check_rotate(attempt: Callable) -> None:
    """Check `rotate(x, theta, layout)`: (length, head_dim) -> the same."""
    check(ROTATE, attempt)


def check_bill(attempt: Callable) -> None:
    """Check `bill(d_model, d_ff, layers, heads, kv_heads, vocab_size, context)` -> three counts."""
    check(BILL, attempt)


def check_previous_token_head(attempt: Callable) -> None:
    """Check `previous_token_head(frequencies)` -> query, key; show how much attention misses."""
    check(PREVIOUS_TOKEN_HEAD, aimed(attempt))
