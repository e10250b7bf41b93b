"""FlashAttention-2 in CUDA C++, forward and backward, for the T4 and every later NVIDIA GPU.

The kernels are in `forward.cu`, `backward_queries.cu` and `backward_keys.cu`. Triton emits no
tensor-core instructions for a T4; these do.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lib.flash_attention.cuda.launch import DIMS, flash_backward, flash_forward
from lib.flash_attention.inputs import (
    autocast,
    check_kernel_inputs,
    check_scale,
    empty_like_heads,
    empty_results,
)
from lib.flash_attention.operator import make_operator

# What the kernels take.
LIMITS: dict[str, Any] = {
    "dtypes": (torch.float16, torch.bfloat16),
    "max_head_dim": DIMS[-1],
    "instead": "; flash_attention_triton takes float32 and head_dim up to 256",
}


class FlashAttentionCUDA(torch.autograd.Function):
    """`FlashAttentionCUDA.apply(q, k, v, is_causal)` on (batch, tokens, head_dim).

    Saved for the backward pass: q, k, v, the output, and the natural log-sum-exp, (batch, queries).
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = autocast(q, k, v)
        check_kernel_inputs(q, k, v, **LIMITS, ndim=3)
        heads = [x.unsqueeze(1) for x in (q, k, v)]  # (batch, 1, tokens, head_dim)
        ctx.settings = (is_causal, 1 / math.sqrt(q.shape[-1]))
        out, lse = (x.squeeze(1) for x in _flash_attention.forward(*heads, *ctx.settings))
        ctx.save_for_backward(*(x.squeeze(1) for x in heads), out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        heads = [x.unsqueeze(1) for x in (grad_out, *ctx.saved_tensors)]
        grads = _flash_attention.backward(*heads, *ctx.settings)
        return *(grad.squeeze(1) for grad in grads), None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, scale: float | None = None
) -> Tensor:
    """softmax(scale · Q Kᵀ + mask) V, in memory linear in the number of tokens.

    Args:
        q: (batch, heads, queries, head_dim), float16, or bfloat16 from compute capability 8.0 on;
            head_dim is at most 128.
        k, v: (batch, key_heads, keys, head_dim); `key_heads` divides `heads` (grouped queries:
            Ainslie et al. 2023). Strides of batch, head and token that are multiples of 8 cost no
            copy, nor does such a head_dim.
        is_causal: whether query i sees only the keys up to i (top-left aligned).
        scale: factor of the scores, more than 0; 1 / sqrt(head_dim) by default.

    Returns:
        (batch, heads, queries, head_dim) in the dtype of q; zeros where there are no keys.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together or are not supported.
        RuntimeError: there is no compiler for the kernels.
    """
    q, k, v = autocast(q, k, v)
    check_kernel_inputs(q, k, v, **LIMITS)
    scale = check_scale(scale, q.shape[-1])
    return _flash_attention.call(q, k, v, is_causal, scale)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernels run on `device` in `dtype`."""
    if device.type != "cuda":
        raise ValueError(
            f"q must be on a CUDA device, got {device}; flash_attention_torch and sdpa run there"
        )
    if torch.version.cuda is None:
        raise ValueError(
            f"flash_attention_cuda needs PyTorch for CUDA, got {torch.__version__}; use sdpa"
        )
    capability = torch.cuda.get_device_capability(device)
    version = ".".join(map(str, capability))
    chip = f"{torch.cuda.get_device_name(device)} (compute capability {version})"
    if capability < (7, 5):
        raise ValueError(f"device must have compute capability 7.5 or more, got {chip}; use sdpa")
    if dtype == torch.bfloat16 and capability < (8, 0):
        raise ValueError(f"q must be float16 on {chip}, which has no bfloat16, got {dtype}")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    # here, since torch.compile cannot look at devices
    check_device(q.device, q.dtype)
    with torch.cuda.device_of(q):
        return flash_forward(q, k, v, is_causal, scale)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(q):
        return flash_backward(grad_out, q, k, v, out, lse, is_causal, scale)


_flash_attention = make_operator(
    "flash_attention_cuda", _forward, _backward, empty_results, empty_like_heads
)
