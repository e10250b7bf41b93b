"""RMSNorm and SwiGLU: the formulas, and which implementation of them runs on which device.

These steps are bound by memory, not arithmetic, so the fast versions save passes over memory: on a
CUDA GPU the Triton kernels of `lib.model.elementwise_triton`, on a CPU the hand-written backward
passes of `lib.model.elementwise_cpu`. The formulas below run everywhere else.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.core.hardware import runs_triton
from lib.core.terminal import warn_once
from lib.model import elementwise_cpu

# The kernels in Triton compute in float32.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
log = logging.getLogger(__name__)


def is_transformed() -> bool:
    """Whether `torch.func` transforms the call (vmap, grad): it takes PyTorch's operators alone."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def takes_triton(x: Tensor) -> bool:
    """Whether kernels in Triton run on x: at most float32, on a CUDA GPU, with Triton installed."""
    if not x.is_cuda or x.dtype not in KERNEL_DTYPES or is_transformed():
        return False
    if runs_triton(x.device):
        return True
    if not torch.compiler.is_compiling():
        message = "Triton is not installed: norms, SwiGLU, RoPE and the loss run as PyTorch's own"
        warn_once(log, f"{message} operators, which are slower")
    return False


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, rounded to the dtype of x.

    Computed in at least float32 because squares overflow in float16 and swallow `eps` in bfloat16.

    Args:
        x: (..., d_model), any floating-point type.
        weight: (d_model,).

    Raises:
        ValueError: x has another width, or holds no floating-point numbers.
    """
    # one number would be multiplied by all weights
    if x.shape[-1:] != weight.shape or not x.is_floating_point():
        found = f"{tuple(x.shape)} {x.dtype}"
        raise ValueError(f"x must be (..., {len(weight)}) floating-point numbers, got {found}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.device.type == "cpu" and not is_transformed():
        return elementwise_cpu.rms_norm(wide, weight.to(wide.dtype), eps).to(x.dtype)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
    return (wide * inverse_rms * weight).to(x.dtype)


def swiglu(gate_and_value: Tensor, *, use_kernels: bool = True) -> Tensor:
    """silu(gate) ⊙ value.

    Args:
        gate_and_value: (..., 2 · d_ff), the gate first.
        use_kernels: on a CUDA GPU, run the Triton kernel and not PyTorch's operators.

    Returns:
        (..., d_ff).

    Raises:
        ValueError: an odd number of columns.
    """
    if gate_and_value.shape[-1] % 2:
        width = gate_and_value.shape[-1]
        raise ValueError(f"gate_and_value must have an even number of columns, got {width}")
    if use_kernels and takes_triton(gate_and_value):
        from lib.model.elementwise_triton import swiglu

        return swiglu(gate_and_value)
    if gate_and_value.device.type == "cpu" and not is_transformed():
        return elementwise_cpu.swiglu(gate_and_value)
    gate, value = gate_and_value.chunk(2, dim=-1)  # (..., d_ff) each
    return F.silu(gate) * value
