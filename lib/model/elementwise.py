"""RMSNorm and SwiGLU: the formulas, and faster implementations of them.

These steps are bound by memory, not arithmetic, so the fast versions save passes over memory: on a
CUDA GPU the Triton kernels of `lib.model.elementwise_triton`, on a CPU backward passes derived by
hand, below. The formulas themselves run everywhere else.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lib.core.hardware import runs_triton
from lib.core.terminal import warn_once
from lib.flash_attention.inputs import DTYPES

log = logging.getLogger(__name__)


def kernels_for(x: Tensor) -> Literal["triton", "cpu"] | None:
    """Which fast implementation runs on x; None: PyTorch's operators.

    `triton`: on a CUDA GPU with Triton installed, in at most float32. `cpu`: on a CPU.
    """
    if not x.is_cuda or x.dtype not in DTYPES:
        return "cpu" if x.device.type == "cpu" else None
    if runs_triton(x.device):
        return "triton"
    if not torch.compiler.is_compiling():
        message = "Triton is not installed: norms, SwiGLU, RoPE and the loss run as PyTorch's own"
        warn_once(log, f"{message} operators, which are slower")
    return None


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

    # with its backward pass by hand
    if kernels_for(wide) == "cpu":
        return RMSNormByHand.apply(wide, weight.to(wide.dtype), eps).to(x.dtype)

    # the formula, whose backward pass is autograd's
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
    return (wide * inverse_rms * weight).to(x.dtype)


class RMSNormByHand(torch.autograd.Function):
    """With x̂ = x / rms and g = grad · weight: dx = (g - x̂ mean(g x̂)) / rms, dweight = Σ grad x̂.

    Every operator is one more pass over memory, and autograd's backward of the formula takes twice
    as many: a small model trains faster on a CPU.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)  # (..., 1)
        x_hat = x * inverse_rms
        ctx.save_for_backward(x_hat, weight, inverse_rms)
        return x_hat * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x_hat, weight, inverse_rms = ctx.saved_tensors
        grad_times_x_hat = grad * x_hat
        # mean(g x̂) as a matrix-vector multiply, which is faster than multiply and sum
        mean = (grad_times_x_hat @ weight / len(weight)).unsqueeze(-1)  # (..., 1)
        grad_x = torch.addcmul(grad * weight, x_hat, mean, value=-1).mul_(inverse_rms)
        return grad_x, grad_times_x_hat.reshape(-1, len(weight)).sum(0), None


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
    kernels = kernels_for(gate_and_value)

    # in one kernel
    if kernels == "triton" and use_kernels:
        from lib.model.elementwise_triton import swiglu

        return swiglu(gate_and_value)

    # With its backward pass by hand. The compiler cannot trace its writes into parts of a tensor;
    # PyTorch 2.11 does so all the same, and its gradients are wrong.
    if kernels == "cpu" and not torch.compiler.is_compiling():
        return SwiGLUByHand.apply(gate_and_value)

    # the formula, whose backward pass is autograd's
    gate, value = gate_and_value.chunk(2, dim=-1)  # (..., d_ff) each
    return F.silu(gate) * value


class SwiGLUByHand(torch.autograd.Function):
    """With s = sigmoid(gate): d silu / d gate = s (1 + gate (1 - s))."""

    @staticmethod
    def forward(ctx, gate_and_value):
        ctx.save_for_backward(gate_and_value)
        gate, value = gate_and_value.chunk(2, dim=-1)  # (..., d_ff) each
        return F.silu(gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (gate_and_value,) = ctx.saved_tensors
        gate, value = gate_and_value.chunk(2, dim=-1)
        silu = F.silu(gate)
        # both gradients go straight into one tensor, (..., 2 · d_ff)
        grads = torch.empty_like(gate_and_value)
        grad_gate, grad_value = grads.chunk(2, dim=-1)
        torch.ops.aten.silu_backward(grad * value, gate, grad_input=grad_gate)
        torch.mul(grad, silu, out=grad_value)
        return grads
