"""Attention: the textbook, a batched form, FlashAttention and PyTorch's own, behind one function.

All kernels compute softmax(scale · Q Kᵀ + mask) V (Vaswani et al. 2017, equation 1) on
(batch, heads, tokens, head_dim) tensors. They differ in how often they go through memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config_training import ATTENTION_KERNELS
from lib.hardware import runs_triton
from lib.loss import softmax
from lib.profiling import annotate


@annotate("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str = "sdpa",
    is_causal: bool = True,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention by the kernel called `kernel`.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, heads, keys, head_dim); for the two of FlashAttention also fewer heads, each
            for a group of those of q.
        kernel: one of `ATTENTION_KERNELS`. The two of FlashAttention know no mask but the causal
            one: with a `mask` they leave the work to `sdpa`.
        is_causal: query i sees the keys up to i (top-left aligned).
        mask: (queries, keys) or broadcastable to (batch, heads, queries, keys), bool: True where a
            query sees a key. Instead of `is_causal`.
        scale: above 0; 1 / sqrt(head_dim) when left out.

    Returns:
        (batch, heads, queries, head_dim), in the dtype of `v`; zeros where there are no keys.

    Raises:
        ValueError: `kernel` is unknown or does not run on this device, both `is_causal` and `mask`
            are given, or `scale` or numbers of heads do not fit.
    """
    if kernel not in ATTENTION_KERNELS:
        raise ValueError(f"kernel is {kernel!r}; known: {', '.join(ATTENTION_KERNELS)}")
    if mask is not None and is_causal:
        raise ValueError("is_causal is True and mask is given; right is: one of them")
    if q.shape[-1] < 1:
        raise ValueError("q has head_dim 0; right is: at least 1")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale is {scale}; right is: above 0")
    if q.shape[1] != k.shape[1] and not (kernel.startswith("flash") and mask is None):
        raise ValueError(
            f"q has {q.shape[1]} heads, k {k.shape[1]}, which {kernel} does not group; right is: "
            "as many, or a kernel of FlashAttention without a mask"
        )
    if kernel.startswith("flash") and mask is None:
        return flash_attention(kernel, q.device)(q, k, v, is_causal=is_causal, scale=scale)
    if kernel == "sdpa" or kernel.startswith("flash"):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
    if is_causal:
        mask = causal_mask(q.shape[-2], k.shape[-2], q.device)
    if kernel == "scaled_dot_prod_attention":
        return _one_by_one(q, k, v, mask, scale)
    if kernel == "vectorized_torch":
        return scaled_dot_product_attention(q, k, v, mask, scale)
    return _compiled()(q, k, v, mask, scale)


def flash_attention(kernel: str, device: torch.device) -> Callable[..., Tensor]:
    """The function of the kernel called `kernel`, imported when it is first needed.

    Raises:
        ValueError: Triton cannot run on `device`.
    """
    if kernel == "flash_attention_torch":
        from lib.flash_attention import flash_attention

        return flash_attention
    if not runs_triton(device):
        raise ValueError(f"{kernel} runs on a CUDA GPU and not on {device}; right is: sdpa")
    from lib.flash_attention_triton import flash_attention

    return flash_attention


def causal_mask(num_queries: int, num_keys: int, device: torch.device | str) -> Tensor:
    """(num_queries, num_keys) bool: True where key j ≤ query i."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention as the paper writes it, over any leading dimensions; arguments as `attention`.

    The scores, (…, queries, keys), are held in full: memory grows with the square of the length.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with annotate("scores"):
        scores = (q @ k.transpose(-2, -1)) * scale  # (..., queries, keys)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
    if not k.shape[-2]:
        # a softmax of nothing has no maximum; a sum of nothing is 0
        return scores.to(v.dtype) @ v
    with annotate("softmax"):
        weights = softmax(scores, dim=-1).to(v.dtype)
    with annotate("value product"):
        return weights @ v


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One head of one sequence after the other: slow, and holds one score matrix at a time."""
    if not q.numel():
        return scaled_dot_product_attention(q, k, v, mask, scale)
    if mask is not None:
        mask = mask.expand(*q.shape[:2], q.shape[-2], k.shape[-2])
    rows = []
    for b in range(q.shape[0]):
        heads = [
            scaled_dot_product_attention(
                q[b, h], k[b, h], v[b, h], None if mask is None else mask[b, h], scale
            )
            for h in range(q.shape[1])
        ]
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@functools.cache
def _compiled():
    return torch.compile(scaled_dot_product_attention)
