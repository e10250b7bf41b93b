"""RMSNorm and SwiGLU: the formulas, and which implementation of them runs on which device.

These steps are bound by memory, not arithmetic, so the fast versions save passes over memory: on a
CUDA GPU the Triton kernels of `lib.model.elementwise_triton`, on a CPU the hand-written backward
passes of `lib.model.elementwise_cpu`. The formulas below run everywhere else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.model import elementwise_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, rounded to the dtype of x.

    Computed in float32 because squares overflow in float16 and swallow `eps` in bfloat16.

    Args:
        x: (..., d_model), any floating-point type.
        weight: (d_model,).
    """
    wide = x.float()
    if x.device.type == "cpu":
        return elementwise_cpu.rms_norm(wide, weight.float(), eps).to(x.dtype)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
    return (wide * inverse_rms * weight).to(x.dtype)


def swiglu(gate_and_value: Tensor, *, use_kernels: bool = True) -> Tensor:
    """silu(gate) ⊙ value.

    Args:
        gate_and_value: (..., 2 · d_ff), the gate first.
        use_kernels: on a CUDA GPU, run the Triton kernel and not PyTorch's operators.

    Returns:
        (..., d_ff).
    """
    if use_kernels and gate_and_value.is_cuda:
        from lib.model.elementwise_triton import swiglu

        return swiglu(gate_and_value)
    if gate_and_value.device.type == "cpu":
        return elementwise_cpu.swiglu(gate_and_value)
    gate, value = gate_and_value.chunk(2, dim=-1)  # (..., d_ff) each
    return F.silu(gate) * value
