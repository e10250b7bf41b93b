"""The elementwise steps of a Transformer block for a CPU, with the backward pass written out.

Each operation of PyTorch goes through memory once more, and autograd's derivation of these formulas
has many. Derived by hand they need half as many, which a small model on a CPU feels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as in `lib.model.RMSNorm`: x (..., d_model) and weight (d_model,) in one dtype."""
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate_and_value: Tensor) -> Tensor:
    """silu(gate) ⊙ value for (..., 2 d_ff) that holds the gate, then the value: (..., d_ff)."""
    return _SwiGLU.apply(gate_and_value)


class _RMSNorm(torch.autograd.Function):
    """With x̂ = x / rms and g = grad · weight: dx = (g - x̂ mean(g x̂)) / rms."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        unit = x * inverse_rms
        ctx.save_for_backward(unit, weight, inverse_rms)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        unit, weight, inverse_rms = ctx.saved_tensors
        product = grad * unit
        # a product with a vector sums faster than multiplying and summing
        mean = (product @ weight / len(weight)).unsqueeze(-1)
        grad_x = torch.addcmul(grad * weight, unit, mean, value=-1).mul_(inverse_rms)
        return grad_x, product.reshape(-1, len(weight)).sum(0), None


class _SwiGLU(torch.autograd.Function):
    """With s = sigmoid(gate): d silu / d gate = s (1 + gate (1 - s))."""

    @staticmethod
    def forward(ctx, gate_and_value):
        ctx.save_for_backward(gate_and_value)
        gate, value = gate_and_value.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (gate_and_value,) = ctx.saved_tensors
        gate, value = gate_and_value.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        if torch.compiler.is_compiling():
            # the compiler does not trace writing into parts of a tensor, and saves the copy itself
            grad_gate = torch.ops.aten.silu_backward(grad * value, gate)
            return torch.cat((grad_gate, grad * silu), dim=-1)
        grads = torch.empty_like(gate_and_value)
        grad_gate, grad_value = grads.chunk(2, dim=-1)
        torch.ops.aten.silu_backward(grad * value, gate, grad_input=grad_gate)
        torch.mul(grad, silu, out=grad_value)
        return grads
