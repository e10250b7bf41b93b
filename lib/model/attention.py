"""Attention: every kernel behind one door, two naive implementations, and the KV cache.

All kernels compute softmax(scale · Q Kᵀ + mask) V (Vaswani et al. 2017, equation 1). They differ in
how often they go through memory. `attention` checks q, k and v, and `attend` runs a kernel on them;
`kernel_function` is the only place that looks kernels up.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.core.hardware import runs_triton
from lib.core.ranges import annotate
from lib.core.terminal import warn_once
from lib.flash_attention.inputs import check_qkv, check_scale
from lib.model.config import ATTENTION_KERNELS, ModelConfig
from lib.model.loss import softmax

log = logging.getLogger(__name__)
FLASH_KERNELS = ("flash_attention_torch", "flash_attention_triton", "flash_attention_cuda")


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
        k, v: (batch, heads, keys, head_dim). Fewer heads than q's are each shared by a group of
            neighboring heads of q (Ainslie et al. 2023, arXiv:2305.13245).
        kernel: one of `ATTENTION_KERNELS`, or `auto` for sdpa. The FlashAttention kernels support
            no mask but the causal one; with a `mask`, `sdpa` runs instead.
        is_causal: query i sees keys 0 to i (aligned at the top left).
        mask: (queries, keys) or broadcastable to (batch, heads, queries, keys), bool: True where a
            query sees a key. Excludes `is_causal`.
        scale: more than 0; default 1 / sqrt(head_dim).

    Returns:
        (batch, heads, queries, head_dim), in the dtype of `v`.

    Raises:
        ValueError: `kernel` is unknown or does not run on this device, both `is_causal` and `mask`
            are given, `mask` does not broadcast to the scores, or `scale`, head_dim or the numbers
            of heads are out of range.
    """
    scale = _check(q, k, v, is_causal, mask, scale)
    if mask is not None and mask.ndim < 2:
        mask = mask.expand(q.shape[-2], k.shape[-2])
    return attend(q, k, v, kernel=kernel, is_causal=is_causal, mask=mask, scale=scale)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str,
    is_causal: bool = True,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention` without its checks, for the model, whose q, k and v fit together."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // max(1, k.shape[1])
    with annotate("attention"):
        # FlashAttention
        if kernel in FLASH_KERNELS and mask is None:
            function = kernel_function(kernel, q.device)
            return function(q, k, v, is_causal=is_causal, scale=scale)
        if kernel in FLASH_KERNELS and not torch.compiler.is_compiling():
            warn_once(log, f"{kernel} takes no mask but the causal one: sdpa runs instead")

        # PyTorch's own, which picks one of its kernels
        if kernel in FLASH_KERNELS or kernel in ("sdpa", "auto"):
            options: dict = {"is_causal": is_causal, "scale": scale, "enable_gqa": group > 1}
            return F.scaled_dot_product_attention(q, k, v, mask, **options)

        # the naive kernels see the causal mask as any other, and a key of its own for each head
        function = kernel_function(kernel, q.device)
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        if is_causal:
            mask = causal_mask(q.shape[-2], k.shape[-2], q.device)
        return function(q, k, v, mask, scale)


def kernel_function(name: str, device: torch.device) -> Callable[..., Tensor]:
    """Return the function behind an attention kernel, imported when it is first needed.

    Raises:
        ValueError: there is no kernel called `name`, or it does not run on `device`.
    """
    needs_triton = ("flash_attention_triton", "vectorized_torch_compiled")
    if name in needs_triton and device.type == "cuda" and not runs_triton(device):
        raise ValueError(f"{name} needs Triton, which is not installed; use sdpa")
    if name == "flash_attention_torch":
        from lib.flash_attention import reference

        return reference.flash_attention
    if name == "flash_attention_triton":
        if not runs_triton(device):
            raise ValueError(f"device must be a CUDA GPU for {name}, got {device}; use sdpa")
        from lib.flash_attention import triton_attention

        return triton_attention.flash_attention
    if name == "flash_attention_cuda":
        if device.type != "cuda":
            raise ValueError(f"device must be a CUDA GPU for {name}, got {device}; use sdpa")
        from lib.flash_attention.cuda import attention as cuda_attention

        return cuda_attention.flash_attention
    if name == "vectorized_torch_compiled":
        return _compiled_attention()
    functions: dict[str, Callable[..., Tensor]] = {
        "scaled_dot_prod_attention": head_by_head_attention,
        "vectorized_torch": scaled_dot_product_attention,
        "sdpa": F.scaled_dot_product_attention,
    }
    if name not in functions:
        raise ValueError(f"kernel must be one of {', '.join(ATTENTION_KERNELS)}, got {name!r}")
    return functions[name]


def causal_mask(num_queries: int, num_keys: int, device: torch.device | str) -> Tensor:
    """The mask of causal attention, (num_queries, num_keys) bool: True where key j ≤ query i."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention as the paper writes it, over any leading dimensions; arguments as `attention`.

    It holds all scores, (..., queries, keys), so memory grows with the square of the length.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with annotate("scores"):
        scores = (q @ k.transpose(-2, -1)) * scale  # (..., queries, keys)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)

    with annotate("softmax"):
        weights = softmax(scores, dim=-1).to(v.dtype)  # (..., queries, keys)
    with annotate("value product"):
        return weights @ v  # (..., queries, head_dim)


def head_by_head_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """`scaled_dot_product_attention` of one head at a time: slow, with one score matrix in memory.

    q, k and v are (batch, heads, tokens, head_dim).
    """
    if mask is not None:
        mask = mask.expand(*q.shape[:2], q.shape[-2], k.shape[-2])

    # the scores of one head are freed before those of the next are made, unless autograd keeps them
    sequences = []
    for b in range(q.shape[0]):
        heads = [
            scaled_dot_product_attention(
                q[b, h], k[b, h], v[b, h], None if mask is None else mask[b, h], scale
            )
            for h in range(q.shape[1])
        ]
        sequences.append(torch.stack(heads))  # (heads, queries, head_dim)
    return torch.stack(sequences)


@functools.cache
def _compiled_attention() -> Callable[..., Tensor]:
    return torch.compile(scaled_dot_product_attention)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> float:
    """Reject arguments that no kernel supports; return the scale."""
    if mask is not None and is_causal:
        raise ValueError("is_causal must be False where a mask is given, got True")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a query sees a key, got {mask.dtype}")
    check_qkv(q, k, v)
    if mask is not None:
        scores = (*q.shape[:3], k.shape[2])
        sizes = zip(reversed(mask.shape), reversed(scores))
        if mask.ndim > 4 or any(size not in (1, whole) for size, whole in sizes):
            found = f"got {tuple(mask.shape)} for {scores}"
            raise ValueError(f"mask must broadcast to (batch, heads, queries, keys), {found}")
    return check_scale(scale, q.shape[-1])


class KVCache:
    """The keys and values of up to `context_length` tokens in every layer, for generation.

    Takes 2 · num_layers · batch_size · context_length · d_model elements of `dtype`. A model's
    forward pass over a prompt fills it. Use it under `torch.no_grad`: it is written in place.

    Attributes:
        keys, values: (layers, batch, heads, context_length, head_dim).
        length: number of tokens in the cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (config.num_layers, batch_size, config.num_heads, config.context_length)
        self.keys = torch.zeros(*shape, config.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append the keys and values of new tokens to one layer.

        Once all layers have appended theirs, the model calls `advance`.

        Args:
            k, v: (batch, heads, new, head_dim).

        Returns:
            All keys and all values, (batch, heads, length + new, head_dim) each, and the mask of
            which of them each new token sees, (new, length + new) bool.

        Raises:
            ValueError: the cache has no room for k and v, or is of another batch size or model.
        """
        # what does not fit would be broadcast; keys of another dtype could not meet the queries
        end = self.length + k.shape[-2]
        place = self.keys[layer, :, :, self.length : end]
        casts = torch.is_autocast_enabled(k.device.type)
        for name, part in (("k", k), ("v", v)):
            if part.shape != place.shape or (part.dtype != place.dtype and not casts):
                expected, found = (f"{tuple(x.shape)} {x.dtype}" for x in (place, part))
                raise ValueError(f"{name} must fit the cache, {expected}, got {found}")

        # write the new ones behind those of earlier tokens
        place.copy_(k)
        self.values[layer, :, :, self.length : end] = v

        # a new token sees all tokens up to its own
        positions = torch.arange(end, device=k.device)
        mask = positions[None, :] <= positions[self.length :, None]  # (new, length + new)
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end], mask

    def advance(self, count: int) -> None:
        """Count `count` more tokens, which every layer has appended."""
        self.length += count

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0
