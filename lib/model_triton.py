"""The elementwise steps of a Transformer block that compilers leave slow, as Triton kernels.

Both are bound by memory: what counts is that each tensor is read and written once. Gradients are
written straight into the layout that the matrix product before them wants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split `qkv` and turn q and k by their positions, as `lib.model.RotaryEmbedding` does.

    Args:
        qkv: (batch, length, 3, heads, head_dim), contiguous.
        cos, sin: (at least length, head_dim / 2) float32.

    Returns:
        q, k, v: (batch, length, heads, head_dim); v is a view of `qkv`.

    Raises:
        ValueError: more tokens than angles.
    """
    if qkv.shape[1] > len(cos):
        raise ValueError(f"qkv has {qkv.shape[1]} tokens; right is: at most {len(cos)}")
    return _RotatedQKV.apply(qkv, cos, sin)


def swiglu(gate_and_value: Tensor) -> Tensor:
    """silu(gate) ⊙ value for (..., 2 d_ff) that holds the gate, then the value: (..., d_ff)."""
    return _SwiGLU.apply(gate_and_value)


class _RotatedQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin):
        batch, length, _, heads, head_dim = qkv.shape
        q = qkv.new_empty(batch, length, heads, head_dim)
        k = torch.empty_like(q)
        _split_kernel[(batch * length, 2)](
            qkv,
            q,
            k,
            cos,
            sin,
            length,
            WIDTH=heads * head_dim,
            HEAD_DIM=head_dim,
            BLOCK=triton.next_power_of_2(heads * head_dim),
        )
        ctx.save_for_backward(cos, sin)
        return q, k, qkv[:, :, 2]

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        cos, sin = ctx.saved_tensors
        grads = [g if g.stride(-1) == 1 else g.contiguous() for g in (grad_q, grad_k, grad_v)]
        batch, length, heads, head_dim = grad_q.shape
        # one tensor, and no views of it: torch.compile would copy for each view
        grad_qkv = grad_q.new_empty(batch, length, 3, heads, head_dim)
        _join_kernel[(batch * length, 3)](
            *grads,
            grad_qkv,
            cos,
            sin,
            *[stride for grad in grads for stride in grad.stride()[:3]],
            length,
            WIDTH=heads * head_dim,
            HEAD_DIM=head_dim,
            BLOCK=triton.next_power_of_2(heads * head_dim),
        )
        return grad_qkv, None, None


@triton.jit
def _turn(x, cos_ptr, sin_ptr, direction, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs in x, (BLOCK,), of one token; `cos_ptr` and `sin_ptr` are at its position."""
    pair = tl.arange(0, BLOCK // 2) % (HEAD_DIM // 2)
    cos = tl.load(cos_ptr + pair)
    sin = tl.load(sin_ptr + pair) * direction
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (BLOCK // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (BLOCK,)).to(x.dtype)


@triton.jit
def _split_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    length,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token's heads of q (program_id(1) = 0) or k (1)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    angles = row % length * (HEAD_DIM // 2)
    x = tl.load(qkv_ptr + row * 3 * WIDTH + part * WIDTH + columns, inside)
    x = _turn(x, cos_ptr + angles, sin_ptr + angles, 1.0, HEAD_DIM, BLOCK)
    if part == 0:
        tl.store(q_ptr + row * WIDTH + columns, x, inside)
    else:
        tl.store(k_ptr + row * WIDTH + columns, x, inside)


@triton.jit
def _join_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    length,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token's gradients of q (program_id(1) = 0), k (1) or v (2), q and k turned back."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    batch, token = row // length, row % length
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    head, d = columns // HEAD_DIM, columns % HEAD_DIM
    if part == 0:
        x = tl.load(q_ptr + batch * q_batch + token * q_token + head * q_head + d, inside)
    elif part == 1:
        x = tl.load(k_ptr + batch * k_batch + token * k_token + head * k_head + d, inside)
    else:
        x = tl.load(v_ptr + batch * v_batch + token * v_token + head * v_head + d, inside)
    if part < 2:
        angles = token * (HEAD_DIM // 2)
        x = _turn(x, cos_ptr + angles, sin_ptr + angles, -1.0, HEAD_DIM, BLOCK)
    tl.store(qkv_ptr + row * 3 * WIDTH + part * WIDTH + columns, x, inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_value):
        ctx.save_for_backward(gate_and_value)
        *shape, width = gate_and_value.shape
        out = gate_and_value.new_empty(*shape, width // 2)
        _launch_swiglu(_swiglu_kernel, gate_and_value, out, out)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        (gate_and_value,) = ctx.saved_tensors
        grad = torch.empty_like(gate_and_value)
        _launch_swiglu(_swiglu_backward_kernel, gate_and_value, grad_out.contiguous(), grad)
        return grad


def _launch_swiglu(kernel, gate_and_value: Tensor, second: Tensor, out: Tensor) -> None:
    d_ff = gate_and_value.shape[-1] // 2
    block = min(2048, triton.next_power_of_2(d_ff))
    grid = (gate_and_value.numel() // (2 * d_ff), triton.cdiv(d_ff, block))
    kernel[grid](gate_and_value, second, out, D_FF=d_ff, BLOCK=block, num_warps=8)


@triton.jit
def _swiglu_kernel(x_ptr, unused_ptr, out_ptr, D_FF: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D_FF
    gate = tl.load(x_ptr + row * 2 * D_FF + columns, inside).to(tl.float32)
    value = tl.load(x_ptr + row * 2 * D_FF + D_FF + columns, inside).to(tl.float32)
    out = gate * tl.sigmoid(gate) * value
    tl.store(out_ptr + row * D_FF + columns, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _swiglu_backward_kernel(x_ptr, grad_out_ptr, grad_ptr, D_FF: tl.constexpr, BLOCK: tl.constexpr):
    """d silu(g) / dg = sigmoid(g) (1 + g (1 - sigmoid(g)))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D_FF
    gate = tl.load(x_ptr + row * 2 * D_FF + columns, inside).to(tl.float32)
    value = tl.load(x_ptr + row * 2 * D_FF + D_FF + columns, inside).to(tl.float32)
    grad_out = tl.load(grad_out_ptr + row * D_FF + columns, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad_out * value * (sigmoid + silu * (1 - sigmoid))
    kind = grad_ptr.dtype.element_ty
    tl.store(grad_ptr + row * 2 * D_FF + columns, grad_gate.to(kind), inside)
    tl.store(grad_ptr + row * 2 * D_FF + D_FF + columns, (grad_out * silu).to(kind), inside)
