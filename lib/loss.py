"""Softmax, cross-entropy, and cross-entropy that never holds all logits in float32."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits that exist at a time.
CHUNK_BYTES = 1 << 30
# The logits' gradient is held times this: in float16 the gradient of a mean over many tokens would
# vanish, and that of their sum overflow.
GRAD_FACTOR = 1 / 128


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
        targets: (tokens,) int64.
        z_loss: adds z_loss · mean(logsumexp²), which keeps the logits' scale (PaLM, section 5).
        chunk_tokens: how many tokens at a time; as many as fit in 1 GiB by default.

    Returns:
        A float32 scalar; gradients flow to `hidden` and `weight`.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (len(weight) * hidden.element_size()))
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; right is: at least 1")
    return _LinearCrossEntropy.apply(hidden, weight, targets, z_loss, chunk_tokens)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward pass; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, z_loss, chunk_tokens):
        num_tokens = len(hidden)
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        losses = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = None
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = hidden[chunk] @ weight.T  # (chunk, vocab)
            losses[chunk] = _loss_and_grad(logits, targets[chunk], z_loss, needs_grad)
            if needs_grad:
                # the logits now hold their own gradient
                torch.mm(logits, weight, out=grad_hidden[chunk])
                part = logits.T @ hidden[chunk]
                if num_tokens > chunk_tokens:
                    part = part.float()
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
            del logits
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
            ctx.scale = 1 / (GRAD_FACTOR * num_tokens)
            ctx.is_used = False
        return losses.mean()

    @staticmethod
    def backward(ctx, grad_loss):
        if ctx.is_used:
            raise RuntimeError("linear_cross_entropy: its gradients can be taken only once")
        ctx.is_used = True
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_loss * ctx.scale
        if grad_hidden.is_cuda:
            # PyTorch's product of a bfloat16 tensor and a float32 scalar is four times as slow
            from lib.loss_triton import scale_

            return scale_(grad_hidden, scale), scale_(grad_weight, scale), None, None, None
        return grad_hidden.mul_(scale), grad_weight.mul_(scale), None, None, None


def _loss_and_grad(logits: Tensor, targets: Tensor, z_loss: float, needs_grad: bool) -> Tensor:
    """Each token's loss, (chunk,) float32; with `needs_grad` the logits become their gradient.

    It is that of the losses' sum, times GRAD_FACTOR:
    d loss / d logits = softmax(logits) (1 + 2 z_loss lse) - one_hot(target).
    """
    if logits.device.type == "cuda":
        from lib.loss_triton import loss_and_grad

        return loss_and_grad(logits, targets, z_loss, needs_grad, GRAD_FACTOR)
    x = logits.float()
    lse = log_sum_exp(x)
    losses = lse - x.gather(-1, targets.unsqueeze(-1)).squeeze(-1) + z_loss * lse**2
    if needs_grad:
        grad = x.sub_(lse.unsqueeze(-1)).exp_().mul_((1 + 2 * z_loss * lse).unsqueeze(-1))
        grad.scatter_add_(-1, targets.unsqueeze(-1), grad.new_full((len(grad), 1), -1.0))
        logits.copy_(grad.mul_(GRAD_FACTOR))
    return losses
