"""Softmax, cross-entropy, and the loss of the head without all logits in memory at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lib.flash_attention.inputs import autocast
from lib.model.costs import CHUNK_BYTES
from lib.model.elementwise import kernels_for

# The most logits in memory at once on a GPU, as a fraction of its memory.
CHUNK_PART = 1 / 32
# float16 logits hold their gradient scaled by this: the gradient of a mean over many tokens would
# underflow, and that of a sum overflow.
FLOAT16_GRAD_FACTOR = 1 / 128


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / Σ exp(x) along `dim`, computed in at least float32.

    softmax(x - c) = softmax(x), and with the maximum as c no exponential overflows. A row of
    nothing but -inf gives zeros.
    """
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    # where the maximum is -inf, -inf less -inf would be no number
    highest = x.amax(dim, keepdim=True)
    exponentials = torch.exp(x - highest.masked_fill(highest == -torch.inf, 0))
    total = exponentials.sum(dim, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log softmax(logits)[target], in nats per token.

    Args:
        logits: (..., vocab), any floating-point type; computed in at least float32.
        targets: (...) int64.

    Returns:
        A scalar.

    Raises:
        ValueError: there is not one target for each row of logits.
    """
    # those of other shapes would be read in part
    if targets.shape != logits.shape[:-1]:
        expected, shape = tuple(logits.shape[:-1]), tuple(targets.shape)
        raise ValueError(f"targets must have shape {expected} of the logits' rows, got {shape}")
    x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    # the maximum is subtracted from the target's logit too: the difference of two large logits is
    # exact, that of a log-sum-exp and a logit is not. It has no gradient, as it cancels out.
    shifted = x - x.detach().amax(-1, keepdim=True)  # (..., vocab)
    log_sum_exp = shifted.exp().sum(-1).log()  # (...)
    of_target = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # (...)
    return (log_sum_exp - of_target).mean()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T, targets)` without all logits in memory at once.

    The head is applied to a chunk of tokens at a time. The chunk's gradients are computed at once,
    in the forward pass, so that its logits can be freed: what remains for backward has the size of
    `hidden` and `weight`.

    Args:
        hidden: (tokens, d_model).
        weight: (vocab, d_model).
        targets: (tokens,) int64, from 0 to vocab - 1. Any other raises RuntimeError on a CPU and
            makes the loss NaN on a GPU, where checking would wait for the device.
        z_loss: adds z_loss · mean(logsumexp²), which keeps logits from drifting (PaLM, section 5).
        chunk_tokens: tokens in a chunk; by default as many as give 16 MiB of logits on a CPU, and
            1/32 of its memory on a GPU.

    Returns:
        A scalar, float32 (float64 for float64 `hidden`). Its gradients can be taken once.

    Raises:
        ValueError: `targets` does not have one id per token, there are no tokens, `chunk_tokens`
            is below 1, or `z_loss` is negative or NaN.
    """
    if not z_loss >= 0:
        raise ValueError(f"z_loss must be at least 0, got {z_loss}")
    if targets.shape != hidden.shape[:1] or not len(hidden):
        raise ValueError(
            "targets must be (tokens,) and hidden (tokens, d_model) with at least one token, got "
            f"{tuple(targets.shape)} and {tuple(hidden.shape)}"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")

    # under autocast, in its dtype, as any matmul; float64 stays
    device = hidden.device
    hidden, weight = autocast(hidden, weight)

    # as many tokens as give logits of this size
    if chunk_tokens is None:
        chunk_bytes: float = CHUNK_BYTES
        if device.type == "cuda":
            chunk_bytes = CHUNK_PART * torch.cuda.get_device_properties(device).total_memory
        chunk_tokens = max(1, int(chunk_bytes) // (len(weight) * hidden.element_size()))

    # decided here, since inside the autograd function inputs require gradients under no_grad too
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, targets, z_loss, chunk_tokens, needs_grad)


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute loss and gradients chunk by chunk in the forward pass; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, z_loss, chunk_tokens, needs_grad):
        num_tokens = len(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(num_tokens, dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = None

        # the loss is a mean, so each token's gradient counts 1 / num_tokens
        is_float16 = hidden.dtype == torch.float16
        factor = FLOAT16_GRAD_FACTOR if is_float16 else 1 / num_tokens

        # chunk by chunk: logits, losses, and at once the gradients that need these logits
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = hidden[chunk] @ weight.T  # (chunk, vocab)
            grad_factor = factor if needs_grad else None
            losses[chunk] = _loss_and_grad(logits, targets[chunk], z_loss, grad_factor)
            if needs_grad:
                # the logits have been overwritten by their gradient
                torch.mm(logits, weight, out=grad_hidden[chunk])  # (chunk, d_model)
                part = logits.T @ hidden[chunk]  # (vocab, d_model)
                # summed over chunks in float32
                if num_tokens > chunk_tokens:
                    part = part.to(wide)
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
            # freed before the next chunk's are made
            del logits

        # for backward: tensors of the size of `hidden` and `weight`
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
            ctx.scale = 1 / (factor * num_tokens) if is_float16 else 1.0
            ctx.is_used = False
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        if ctx.is_used:
            raise RuntimeError("gradients of linear_cross_entropy can be taken only once")
        ctx.is_used = True
        grad_hidden, grad_weight = ctx.saved_tensors

        # in place, by the chain rule
        scale = grad_loss * ctx.scale
        if kernels_for(grad_hidden) == "triton":
            # PyTorch takes four times as long for a bfloat16 tensor times a float32 scalar
            from lib.model.loss_triton import scale_

            return scale_(grad_hidden, scale), scale_(grad_weight, scale), None, None, None, None
        return grad_hidden.mul_(scale), grad_weight.mul_(scale), None, None, None, None


def _loss_and_grad(
    logits: Tensor, targets: Tensor, z_loss: float, grad_factor: float | None
) -> Tensor:
    """Return each token's loss, (chunk,), computed in at least float32.

    With a `grad_factor` the logits, (chunk, vocab), are overwritten by the gradient of the sum of
    losses times that factor:
    d loss / d logits = softmax(logits) (1 + 2 z_loss lse) - one_hot(target).
    """
    if kernels_for(logits) == "triton":
        from lib.model.loss_triton import loss_and_grad

        return loss_and_grad(logits, targets, z_loss, grad_factor)

    # the log-sum-exp; in place, with one exponential per logit: each pass over the logits counts
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = x.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # (chunk,)
    highest = x.amax(-1)
    exponentials = x.sub_(highest.unsqueeze(-1)).exp_()
    total = exponentials.sum(-1)
    log_total = total.log()
    lse = highest + log_total

    # the gradient: the probabilities, less 1 at the target
    if grad_factor is not None:
        weight = (1 + 2 * z_loss * lse) * grad_factor / total
        grad = exponentials.mul_(weight.unsqueeze(-1))
        grad.scatter_add_(-1, targets.unsqueeze(-1), grad.new_full((len(grad), 1), -grad_factor))
        if grad is not logits:
            logits.copy_(grad)

    # the loss; not lse - target_logits: lse is rounded to a step of the largest logit
    return (highest - target_logits) + log_total + z_loss * lse**2
