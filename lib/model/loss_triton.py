"""The loss of each token and the gradient of its logits, in one Triton kernel.

The kernel reads a row of logits twice, for its log-sum-exp and for the gradient, which overwrites
the logits. Nothing is written in between or stored in float32. Where a row fits in shared memory,
`lib.model.loss_gluon` reads it only once.
"""

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from lib.core.terminal import warn_once

try:
    from lib.model import loss_gluon
except ImportError:
    # Triton before 3.6
    loss_gluon = None

BLOCK = 4096
NUM_WARPS = 8
log = logging.getLogger(__name__)


def loss_and_grad(
    logits: Tensor, targets: Tensor, z_loss: float, grad_factor: float | None
) -> Tensor:
    """Return each token's cross-entropy plus z-loss; overwrite the logits by their gradient.

    Args:
        logits: (tokens, vocab) float32, bfloat16 or float16, rows contiguous; computed in float32.
        targets: (tokens,) int64, of any stride. The loss of one outside the vocabulary is NaN.
        grad_factor: scale of the gradient of the sum of losses; None: the logits stay.

    Returns:
        (tokens,) float32.
    """
    needs_grad, targets = grad_factor is not None, targets.contiguous()
    if loss_gluon is None and logits.is_cuda:
        warn_once(log, "the loss reads logits twice; Triton 3.6 or later has a faster kernel")
    if needs_grad and loss_gluon and loss_gluon.programs_per_multiprocessor(logits) >= 2:
        return loss_gluon.loss_and_grad(logits, targets, z_loss, grad_factor)
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _loss_kernel[(len(logits),)](
        logits,
        targets,
        losses,
        logits.shape[1],
        logits.stride(0),
        z_loss,
        grad_factor if needs_grad else 0.0,
        NEEDS_GRAD=needs_grad,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return losses


@triton.jit
def _loss_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    vocab_size,
    row_stride,
    z_loss,
    grad_factor,
    NEEDS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: log-sum-exp, loss, gradient."""
    # int64, since there may be more than 2³¹ logits
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    # a target outside the vocabulary must not read out of bounds
    is_valid = (target >= 0) & (target < vocab_size)
    target_logit = tl.load(logits_ptr + target, is_valid, other=float("nan")).to(tl.float32)

    # online softmax (Milakov and Gimelshein 2018), with one running maximum for the whole block and
    # a running total for each of its columns: one exponential per logit
    highest = tl.full((), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, columns < vocab_size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    row_total = tl.sum(total, 0)
    log_total = tl.log(row_total)
    lse = highest + log_total
    # not lse - target_logit: lse is rounded to a step of the largest logit
    loss = (highest - target_logit) + log_total + z_loss * lse * lse
    tl.store(losses_ptr + row, loss)

    if NEEDS_GRAD:
        weight = (1 + 2 * z_loss * lse) * grad_factor / row_total
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            x = tl.load(logits_ptr + columns, inside).to(tl.float32)
            grad = tl.exp(x - highest) * weight - tl.where(columns == target, grad_factor, 0.0)
            tl.store(logits_ptr + columns, grad.to(logits_ptr.dtype.element_ty), inside)


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x, contiguous, by the 0-dim float32 `factor` in place, in float32; return x."""
    _scale_kernel[(triton.cdiv(x.numel(), 4096),)](x, factor, x.numel(), BLOCK=4096)
    return x


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    # 1 is the usual case, where nothing comes after the loss
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, offsets < size).to(tl.float32) * factor
        tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), offsets < size)
