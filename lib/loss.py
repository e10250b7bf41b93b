"""Softmax, cross-entropy, and cross-entropy that never holds all logits in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits that exist at a time: on a CPU so many bytes, on a GPU this part of its memory.
CHUNK_BYTES = 16 << 20
CHUNK_PART = 1 / 32
# In float16 the logits' gradient is held times this: that of a mean over many tokens would vanish,
# and that of their sum overflow.
FLOAT16_GRAD_FACTOR = 1 / 128


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / Σ exp(x) along `dim`, computed in at least float32, with the maximum taken off.

    softmax(x - c) = softmax(x), and with c the maximum no exponential overflows. A row that is
    -inf throughout gives zeros.
    """
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    highest = x.amax(dim, keepdim=True)
    exponentials = torch.exp(x - highest.masked_fill(highest == -torch.inf, 0))
    total = exponentials.sum(dim, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1)


def log_sum_exp(x: Tensor) -> Tensor:
    """log Σ exp(x) over the last dimension, without overflow."""
    highest = x.amax(-1, keepdim=True)
    return (x - highest).exp().sum(-1).log() + highest.squeeze(-1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[target], in nats.

    Args:
        logits: (..., vocab), any floating-point type; computed in at least float32.
        targets: (...) int64.

    Returns:
        A scalar.
    """
    x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    of_target = x.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (log_sum_exp(x) - of_target).mean()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T, targets)` without all the logits at once.

    The language-model head is applied to some tokens at a time, and their gradients are taken right
    there, so that their logits can go: what stays has the size of `hidden` and `weight`.

    Args:
        hidden: (tokens, d_model).
        weight: (vocab, d_model).
        targets: (tokens,) int64, from 0 to vocab - 1. Any other raises RuntimeError on a CPU and
            makes the loss NaN on a GPU, where to look would take time.
        z_loss: adds z_loss · mean(logsumexp²), which keeps the logits' scale (PaLM, section 5).
        chunk_tokens: how many tokens at a time; by default as many as give 16 MiB of logits, on a
            GPU a 32nd of its memory.

    Returns:
        A float32 scalar (float64 for float64 `hidden`); gradients flow to `hidden` and `weight`,
        once.

    Raises:
        ValueError: `targets` is not one id for each token, there are no tokens, or `chunk_tokens`
            is below 1.
    """
    if targets.shape != hidden.shape[:1] or not len(hidden):
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and hidden {tuple(hidden.shape)}; right is: "
            "(tokens,) and (tokens, d_model), with at least one token"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if chunk_tokens is None:
        chunk_tokens = max(
            1, int(_chunk_bytes(hidden.device)) // (len(weight) * hidden.element_size())
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; right is: at least 1")
    # asked here: inside the function, under no_grad too, its inputs still say that they need one
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, targets, z_loss, chunk_tokens, needs_grad)


def _chunk_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return CHUNK_BYTES
    return CHUNK_PART * torch.cuda.get_device_properties(device).total_memory


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward pass; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, z_loss, chunk_tokens, needs_grad):
        num_tokens = len(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(num_tokens, dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = None
        is_float16 = hidden.dtype == torch.float16
        factor = FLOAT16_GRAD_FACTOR if is_float16 else 1 / num_tokens
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = hidden[chunk] @ weight.T  # (chunk, vocab)
            grad_factor = factor if needs_grad else None
            losses[chunk] = _loss_and_grad(logits, targets[chunk], z_loss, grad_factor)
            if needs_grad:
                # the logits now hold their own gradient
                torch.mm(logits, weight, out=grad_hidden[chunk])
                part = logits.T @ hidden[chunk]
                if num_tokens > chunk_tokens:
                    part = part.to(wide)
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
            del logits
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
            ctx.scale = 1 / (factor * num_tokens) if is_float16 else 1.0
            ctx.is_used = False
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        if ctx.is_used:
            raise RuntimeError("linear_cross_entropy: its gradients can be taken only once")
        ctx.is_used = True
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_loss * ctx.scale
        if grad_hidden.is_cuda:
            # PyTorch's product of a bfloat16 tensor and a float32 scalar is four times as slow
            from lib.loss_triton import scale_

            return scale_(grad_hidden, scale), scale_(grad_weight, scale), None, None, None, None
        return grad_hidden.mul_(scale), grad_weight.mul_(scale), None, None, None, None


def _loss_and_grad(
    logits: Tensor, targets: Tensor, z_loss: float, grad_factor: float | None
) -> Tensor:
    """Each token's loss, (chunk,), computed in at least float32.

    With a `grad_factor` the logits become that much of the gradient of the losses' sum:
    d loss / d logits = softmax(logits) (1 + 2 z_loss lse) - one_hot(target).
    """
    if logits.device.type == "cuda":
        from lib.loss_triton import loss_and_grad

        return loss_and_grad(logits, targets, z_loss, grad_factor)
    # in place and with one exponential: on a CPU each pass over the logits counts
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_target = x.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    highest = x.amax(-1)
    exponentials = x.sub_(highest.unsqueeze(-1)).exp_()
    total = exponentials.sum(-1)
    lse = total.log() + highest
    if grad_factor is not None:
        weight = (1 + 2 * z_loss * lse) * grad_factor / total
        grad = exponentials.mul_(weight.unsqueeze(-1))
        grad.scatter_add_(-1, targets.unsqueeze(-1), grad.new_full((len(grad), 1), -grad_factor))
        if grad is not logits:
            logits.copy_(grad)
    return lse - of_target + z_loss * lse**2
