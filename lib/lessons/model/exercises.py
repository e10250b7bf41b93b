"""Exercises of notebook 02: cross-entropy, causal attention, RMSNorm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from lib.lessons.exercise import Exercise, check


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


def _draw_heads(generator: random.Random, size: int) -> tuple:
    shape = generator.randint(1, 1 + size), generator.randint(2, 4)
    return tuple(_draw_tensor(generator, *shape) for _ in range(3))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length, head_dim = q.shape
    scores = q @ k.T / math.sqrt(head_dim)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return weights @ v


CAUSAL_ATTENTION = Exercise(
    causal_attention,
    _draw_heads,
    {
        "the scale is missing; divide the scores by sqrt(head_dim)": (" / math.sqrt(head_dim)", ""),
        "the scores are divided by head_dim; divide by its square root": (
            "math.sqrt(head_dim)",
            "head_dim",
        ),
        "the scale has the root of the length; head_dim is the last dimension": (
            "sqrt(head_dim)",
            "sqrt(length)",
        ),
        "there is no mask; a query must not see later keys": (
            ".masked_fill(~visible, -math.inf)",
            "",
        ),
        "the mask comes after the softmax, so that rows no longer sum to 1; "
        "set hidden scores to -inf before it": (
            "scores.masked_fill(~visible, -math.inf).softmax(dim=-1)",
            "scores.softmax(dim=-1) * visible",
        ),
        "hidden scores become 0, and exp(0) is 1; set them to -inf": ("-math.inf", "0"),
        "the mask is inverted: it hides what it should show": ("~visible", "visible"),
        "each query sees the keys from its own on; it should see those up to its own": (
            "tril()",
            "triu()",
        ),
        "a query does not see its own key; key j is seen when j ≤ i": ("tril()", "tril(-1)"),
        "the softmax runs over the queries; each row of scores, dim=-1, sums to 1": (
            "dim=-1",
            "dim=0",
        ),
        "queries and keys are swapped; rows of the scores belong to queries": (
            "q @ k.T",
            "k @ q.T",
        ),
        "the scale comes after the matmul with v; divide the scores, before the softmax": (
            lambda q, k, v: causal_attention(q * q.shape[1] ** 0.5, k, v) / q.shape[1] ** 0.5
        ),
        "the softmax is missing; it turns scores into weights": (".softmax(dim=-1)", ""),
        "these are the weights; the result is their matmul with v": ("weights @ v", "weights"),
    },
)


def _draw_norm(generator: random.Random, size: int) -> tuple:
    d_model = generator.randint(2, 2 + size // 2)
    x = _draw_tensor(generator, _draw_length(generator, 3 + size // 3, d_model), d_model)
    # rows of zeros, and an eps that matters
    x[0] *= generator.choice([0, 1, 1, 1])
    return x, _draw_tensor(generator, d_model), generator.choice([1e-5, 0.25, 1.0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x / (mean_square + eps).sqrt() * weight


RMS_NORM = Exercise(
    rms_norm,
    _draw_norm,
    {
        "x is not squared; take the mean of x²": (".square()", ""),
        "the mean is squared; square first, and then take the mean": (
            "x.square().mean(dim=-1, keepdim=True)",
            "x.mean(dim=-1, keepdim=True).square()",
        ),
        "the squares are added up; take their mean": ("mean(", "sum("),
        "the square root is missing": (".sqrt()", ""),
        "eps is added outside the root; it belongs under it": (
            "(mean_square + eps).sqrt()",
            "(mean_square.sqrt() + eps)",
        ),
        "eps is missing; a row of zeros is divided by 0": (" + eps", ""),
        "the weight is missing": (" * weight", ""),
        "the rows' means have lost their last dimension; mean(-1, keepdim=True) keeps it": (
            ", keepdim=True",
            "",
        ),
        "the mean runs over all tokens together; each row has its own, dim=-1": (
            "dim=-1, keepdim=True",
            "",
        ),
        "the mean runs over the tokens; it belongs to the last dimension, dim=-1": (
            "dim=-1, keepdim=True",
            "dim=0",
        ),
        "the mean of x is subtracted, as in LayerNorm; RMSNorm leaves it": (
            "    mean_square",
            "    x = x - x.mean(dim=-1, keepdim=True)\n    mean_square",
        ),
        "x.std is the deviation from the mean of x; RMSNorm takes the root of the mean of x²": (
            "(mean_square + eps).sqrt()",
            "(x.std(dim=-1, keepdim=True) + eps)",
        ),
        "x.norm is the root of the sum of squares; take the root of their mean": (
            "(mean_square + eps).sqrt()",
            "(x.norm(dim=-1, keepdim=True) + eps)",
        ),
    },
)


def check_cross_entropy(attempt: Callable) -> None:
    """Check `cross_entropy(logits, targets)`: (tokens, vocab), (tokens,) -> a scalar."""
    check(CROSS_ENTROPY, attempt)


def check_causal_attention(attempt: Callable) -> None:
    """Check `causal_attention(q, k, v)`: three of (length, head_dim) -> the same."""
    check(CAUSAL_ATTENTION, attempt)


def check_rms_norm(attempt: Callable) -> None:
    """Check `rms_norm(x, weight, eps)`: (tokens, d_model), (d_model,) -> (tokens, d_model)."""
    check(RMS_NORM, attempt)
