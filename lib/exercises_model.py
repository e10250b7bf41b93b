"""Exercises of notebook 02: cross-entropy, causal attention, RMSNorm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from lib.attention import causal_mask, scaled_dot_product_attention
from lib.exercises import Exercise, check
from lib.loss import cross_entropy, softmax


def _draw_tensor(generator: random.Random, *shape: int) -> Tensor:
    # halves, which print short and exactly
    values = [generator.randint(-6, 6) / 2 for _ in range(math.prod(shape))]
    return torch.tensor(values).reshape(shape)


def _draw_length(generator: random.Random, most: int, width: int) -> int:
    # never the width: a row in the place of a column then fits nothing, and raises
    return generator.choice([length for length in range(1, most + 1) if length != width])


def _draw_logits(generator: random.Random, size: int) -> tuple:
    vocab_size = generator.randint(2, 2 + size)
    num_tokens = _draw_length(generator, 3 + size // 2, vocab_size)
    logits = _draw_tensor(generator, num_tokens, vocab_size)
    # some so large that their exponentials, or their differences', leave float32
    logits = logits * generator.choice([1, 1, 1, 50]) + generator.choice([0, 0, 0, 100])
    targets = [generator.randrange(vocab_size) for _ in range(num_tokens)]
    return logits, torch.tensor(targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    # in float64, since the order of operations shows in float32
    return cross_entropy(logits.double(), targets)


def _losses(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities[torch.arange(len(targets)), targets]


def _overflowing(logits: Tensor, targets: Tensor) -> Tensor:
    exponentials = logits.exp()
    return _losses((exponentials / exponentials.sum(-1, keepdim=True)).log(), targets).mean()


def _overflowing_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return _losses(logits - logits.exp().sum(-1, keepdim=True).log(), targets).mean()


def _log_of_rounded(logits: Tensor, targets: Tensor) -> Tensor:
    return _losses(softmax(logits, dim=-1).log(), targets).mean()


def _sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets) * len(targets)


def _each_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return _losses(logits.log_softmax(-1), targets)


def _over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return _losses(logits.log_softmax(0), targets).mean()


def _without_minus(logits: Tensor, targets: Tensor) -> Tensor:
    return -cross_entropy(logits, targets)


def _in_bits(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets) / math.log(2)


def _maximum_lost(logits: Tensor, targets: Tensor) -> Tensor:
    highest = logits.amax(-1, keepdim=True)
    return _losses(logits - (logits - highest).exp().sum(-1, keepdim=True).log(), targets).mean()


def _every_target(logits: Tensor, targets: Tensor) -> Tensor:
    log_sum_exp = logits.logsumexp(-1)
    return (log_sum_exp - logits[:, targets]).mean()


def _summed_over_everything(logits: Tensor, targets: Tensor) -> Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return _losses(shifted - shifted.exp().sum().log(), targets).mean()


def _softmax_over_everything(logits: Tensor, targets: Tensor) -> Tensor:
    return _losses(logits - logits.flatten().logsumexp(0), targets).mean()


def _column_lost(logits: Tensor, targets: Tensor) -> Tensor:
    # fits a single token only
    return _losses(logits - logits.logsumexp(-1), targets).mean()


CROSS_ENTROPY = Exercise(
    solve=_cross_entropy,
    draw=_draw_logits,
    mistakes={
        "large logits overflow in exp; take the row's maximum off first": _overflowing,
        "large logits overflow inside the sum; take the row's maximum off first": _overflowing_sum,
        "the logarithm is taken of a probability that has become 0; "
        "logit - maximum - log of the sum needs no probability": _log_of_rounded,
        "the losses are added up; take their mean": _sum_of_losses,
        "there is a loss for each token; take their mean": _each_loss,
        "softmax runs over the tokens; each row of logits sums to 1 by itself": _over_tokens,
        "the sign is missing; the loss is minus the logarithm": _without_minus,
        "the logarithm is to base 2; the loss is in nats, by torch.log": _in_bits,
        "the rows' maxima or sums have lost their last dimension; keepdim=True keeps it": (
            _column_lost
        ),
        "the maximum is taken off inside the sum only; take it off the target's logit too": (
            _maximum_lost
        ),
        "logits[:, targets] takes every target from every row; each row has one, "
        "logits[torch.arange(len(targets)), targets]": _every_target,
        "the sum of exponentials runs over all tokens together; each row has its own, dim=-1": (
            _summed_over_everything
        ),
        "maximum and sum run over all tokens together; each row has its own, dim=-1": (
            _softmax_over_everything
        ),
    },
)


def _draw_heads(generator: random.Random, size: int) -> tuple:
    shape = generator.randint(1, 1 + size), generator.randint(2, 4)
    return tuple(_draw_tensor(generator, *shape) for _ in range(3))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, causal_mask(len(q), len(k), q.device))


def _scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q @ k.T / math.sqrt(q.shape[-1]), causal_mask(len(q), len(k), q.device)


def _without_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, causal_mask(len(q), len(k), q.device), scale=1.0)


def _divided_by_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = causal_mask(len(q), len(k), q.device)
    return scaled_dot_product_attention(q, k, v, mask, scale=1 / q.shape[-1])


def _scaled_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = causal_mask(len(q), len(k), q.device)
    return scaled_dot_product_attention(q, k, v, mask, scale=1 / math.sqrt(len(q)))


def _without_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def _masked_after_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return scores.softmax(-1) * mask @ v


def _masked_with_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return (scores * mask).softmax(-1) @ v


def _mask_inverted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return scores.masked_fill(mask, -math.inf).softmax(-1) @ v


def _mask_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return scores.masked_fill(~mask.T, -math.inf).softmax(-1) @ v


def _not_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return scores.masked_fill(~mask.tril(-1), -math.inf).softmax(-1) @ v


def _softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return scores.masked_fill(~mask, -math.inf).softmax(0) @ v


def _swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(k, q, v)


def _scaled_at_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _without_scale(q, k, v) / math.sqrt(q.shape[-1])


def _without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return scores.masked_fill(~mask, -math.inf) @ v


def _weights_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, mask = _scores(q, k)
    return scores.masked_fill(~mask, -math.inf).softmax(-1)


CAUSAL_ATTENTION = Exercise(
    solve=_attend,
    draw=_draw_heads,
    mistakes={
        "the scale is missing; divide the scores by sqrt(head_dim)": _without_scale,
        "the scores are divided by head_dim; divide by its square root": _divided_by_width,
        "the scale has the root of the length; head_dim is the last dimension": _scaled_by_length,
        "there is no mask; a query must not see later keys": _without_mask,
        "the mask comes after the softmax, so that rows no longer sum to 1; "
        "set hidden scores to -inf before it": _masked_after_softmax,
        "hidden scores become 0, and exp(0) is 1; set them to -inf": _masked_with_zero,
        "the mask is inverted: it hides what it should show": _mask_inverted,
        "each query sees the keys from its own on; it should see those up to its own": (
            _mask_transposed
        ),
        "a query does not see its own key; key j is seen when j ≤ i": _not_itself,
        "the softmax runs over the queries; each row of scores, dim=-1, sums to 1": (
            _softmax_over_queries
        ),
        "queries and keys have changed places; rows of the scores belong to queries": _swapped,
        "the scale comes after the product with v; divide the scores, before the softmax": (
            _scaled_at_the_end
        ),
        "the softmax is missing; it makes weights of the scores": _without_softmax,
        "these are the weights; the result is their product with v": _weights_alone,
    },
)


def _draw_norm(generator: random.Random, size: int) -> tuple:
    d_model = generator.randint(2, 2 + size // 2)
    x = _draw_tensor(generator, _draw_length(generator, 3 + size // 3, d_model), d_model)
    # rows of zeros, and an eps that matters
    x[0] *= generator.choice([0, 1, 1, 1])
    return x, _draw_tensor(generator, d_model), generator.choice([1e-5, 0.25, 1.0])


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _mean_not_squared(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.mean(-1, keepdim=True) + eps).sqrt() * weight


def _mean_squared(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.mean(-1, keepdim=True).square() + eps).sqrt() * weight


def _sum_of_squares(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt() * weight


def _without_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps) * weight


def _eps_outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight


def _without_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, weight, 0.0)


def _without_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, torch.ones_like(weight), eps)


def _over_everything(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def _over_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(0) + eps).sqrt() * weight


def _centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x - x.mean(-1, keepdim=True), weight, eps)


def _by_deviation(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.std(-1, keepdim=True) + eps) * weight


def _by_length(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + eps) * weight


def _mean_without_column(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1) + eps).sqrt() * weight


RMS_NORM = Exercise(
    solve=_norm,
    draw=_draw_norm,
    mistakes={
        "x is not squared; take the mean of x²": _mean_not_squared,
        "the mean is squared; square first, and then take the mean": _mean_squared,
        "the squares are added up; take their mean": _sum_of_squares,
        "the square root is missing": _without_root,
        "eps is added behind the root; it belongs under it": _eps_outside,
        "eps is missing; a row of zeros is divided by 0": _without_eps,
        "the weight is missing": _without_weight,
        "the rows' means have lost their last dimension; mean(-1, keepdim=True) keeps it": (
            _mean_without_column
        ),
        "the mean runs over all tokens together; each row has its own, dim=-1": _over_everything,
        "the mean runs over the tokens; it belongs to the last dimension, dim=-1": _over_rows,
        "the mean of x is taken off, as in LayerNorm; RMSNorm leaves it": _centred,
        "x.std is the deviation from the mean of x; RMSNorm takes the root of the mean of x²": (
            _by_deviation
        ),
        "x.norm is the root of the sum of squares; take the root of their mean": _by_length,
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
