"""The elementwise steps of a Transformer block as Triton kernels: RoPE, sum and RMSNorm, SwiGLU.

All are bound by memory, so what counts is that each tensor is read and written once. Gradients go
straight into the layout that the backward of the preceding matmul wants. Everything is computed in
float32 and rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lib.core.ranges import annotate
from lib.flash_attention.inputs import DTYPES, check_device, check_kernel_inputs
from lib.flash_attention.operator import make_operator
from lib.flash_attention.triton_attention import flash_backward, flash_forward, prepare

# The tile of SwiGLU's programs: narrow, so that few threads are past the last column. Those load
# nothing, and memory is busy only while enough loads are in flight.
SWIGLU_ROWS, SWIGLU_COLUMNS = 8, 256
# In the norm's backward pass: the number of programs, two for each multiprocessor of a large GPU,
# and the number of elements in the tile that each works on.
NORM_PROGRAMS = 264
NORM_ELEMENTS = 4096


def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split `qkv`, and rotate q and k by their positions as `RotaryEmbedding` does.

    Args:
        qkv: (batch, length, 3, heads, head_dim), bfloat16, float16 or float32.
        cos, sin: (at least length, head_dim / 2) float32.

    Returns:
        q, k, v: (batch, length, heads, head_dim) each; v is a view of `qkv`, if that is contiguous.

    Raises:
        ValueError: a shape or dtype is not as above, or there are more tokens than angles.
    """
    return _RotatedQKV.apply(*_checked(qkv, cos, sin))


def rotated_attention(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal FlashAttention of `rotated_qkv`, scaled by 1 / sqrt(head_dim).

    The backward kernels undo the rotation of the gradients of q and k, and write all three
    gradients into one tensor.

    Args:
        qkv: (batch, length, 3, heads, head_dim) bfloat16, float16 or float32.
        cos, sin: (at least length, head_dim / 2) float32.

    Returns:
        (batch, length, heads, head_dim).

    Raises:
        ValueError: as `rotated_qkv`, or `lib.flash_attention.inputs` refuses q, k and v.
    """
    qkv, cos, sin = _checked(qkv, cos, sin)
    check_kernel_inputs(*qkv.transpose(1, 3).unbind(2))  # (batch, heads, length, head_dim) each
    with annotate("attention"):
        return _rotated_attention.call(qkv, cos, sin)


def _checked(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments, contiguous, if the kernels can address them and read no table past its end."""
    check_device(qkv.device, qkv.dtype)
    fits = qkv.ndim == 5 and qkv.shape[2] == 3 and qkv.shape[4] % 2 == 0 and qkv.dtype in DTYPES
    if not fits:
        found = f"{tuple(qkv.shape)} {qkv.dtype}"
        known = ", ".join(map(str, DTYPES))
        raise ValueError(
            f"qkv must be (batch, length, 3, heads, even head_dim), one of {known}, got {found}"
        )
    pairs = qkv.shape[4] // 2
    for table in (cos, sin):
        if table.shape[1:] != (pairs,) or table.dtype != torch.float32:
            found = f"{tuple(table.shape)} {table.dtype}"
            raise ValueError(f"cos and sin must be (tokens, {pairs}) float32, got {found}")
        if qkv.shape[1] > len(table):
            raise ValueError(f"length of qkv must be at most {len(table)}, got {qkv.shape[1]}")
    return qkv.contiguous(), cos.contiguous(), sin.contiguous()


def _rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated copies of q and k, (batch, length, heads, head_dim) each."""
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
    return q, k


def _rotated_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, its log-sum-exp, and the rotated q and k, (batch, length, heads, head_dim)."""
    with torch.cuda.device_of(qkv):
        q, k = _rotate(qkv, cos, sin)
        # (batch, heads, length, head_dim) each
        q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, qkv[:, :, 2]))
        settings = {"has_gradients": qkv.requires_grad, "has_rope": True}
        prepare(q_heads, k_heads, v_heads, True, **settings)
        out, lse = flash_forward(q_heads, k_heads, v_heads, True, qkv.shape[-1] ** -0.5)
    return out.transpose(1, 2), lse, q, k


def _empty_results(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length, _, heads, head_dim = qkv.shape
    out = qkv.new_empty(batch, length, heads, head_dim)
    lse = qkv.new_empty(batch, heads, length, dtype=torch.float32)
    return out, lse, torch.empty_like(out), torch.empty_like(out)


def _rotated_backward(
    grad_out: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """The gradient of qkv, from what `_rotated_forward` was given and returned."""
    grad_qkv = torch.empty_like(qkv)
    # (batch, heads, length, head_dim) each; the gradients are views of `grad_qkv`
    tensors = (grad_out, q, k, qkv[:, :, 2], out)
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in tensors)
    grad_q, grad_k, grad_v = grad_qkv.transpose(1, 3).unbind(2)
    scale = qkv.shape[-1] ** -0.5
    with torch.cuda.device_of(qkv):
        inputs, grads = (grad_out, q, k, v, out, lse), (grad_q, grad_k, grad_v)
        flash_backward(*inputs, True, scale, grads=grads, angles=(cos, sin))
    return grad_qkv


# An operator, so that torch.compile neither traces into it nor makes a copy for each view.
_rotated_attention = make_operator(
    "rotated_attention", _rotated_forward, _rotated_backward, _empty_results, num_grads=1
)


class _RotatedQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin):
        ctx.save_for_backward(cos, sin)
        return *_rotate(qkv, cos, sin), qkv[:, :, 2]

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        cos, sin = ctx.saved_tensors
        # attention kernels leave gradients in various layouts: the kernel takes their strides
        grads = [g if g.stride(-1) == 1 else g.contiguous() for g in (grad_q, grad_k, grad_v)]
        batch, length, heads, head_dim = grad_q.shape
        # written as one tensor: torch.compile would make a copy for each view of it
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
def _rotate_pairs(x, cos_ptr, sin_ptr, direction, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate the pairs in x, (BLOCK,), all heads of one token, forward (direction 1) or back (-1).

    `cos_ptr` and `sin_ptr` point at the token's angles.
    """
    pair = tl.arange(0, BLOCK // 2) % (HEAD_DIM // 2)
    cos = tl.load(cos_ptr + pair)
    sin = tl.load(sin_ptr + pair) * direction
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (BLOCK // 2, 2)))
    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(rotated, (BLOCK,)).to(x.dtype)


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
    """Rotate all heads of one token (axis 0 of the grid), of q (axis 1: 0) or of k (1)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    angles = row % length * (HEAD_DIM // 2)
    # q and k lie one after the other in a row of qkv
    x = tl.load(qkv_ptr + row * 3 * WIDTH + part * WIDTH + columns, inside)
    x = _rotate_pairs(x, cos_ptr + angles, sin_ptr + angles, 1.0, HEAD_DIM, BLOCK)
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
    """Copy one token's gradients of q (axis 1 of the grid: 0), k (1) or v (2) into those of qkv.

    Those of q and k are rotated back. The arguments q_batch to v_head are strides.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    batch, token = row // length, row % length
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    head, d = columns // HEAD_DIM, columns % HEAD_DIM

    # read the gradient of q, k or v, each in its own layout
    if part == 0:
        x = tl.load(q_ptr + batch * q_batch + token * q_token + head * q_head + d, inside)
    elif part == 1:
        x = tl.load(k_ptr + batch * k_batch + token * k_token + head * k_head + d, inside)
    else:
        x = tl.load(v_ptr + batch * v_batch + token * v_token + head * v_head + d, inside)

    # undo the rotation of q and k: the inverse of a rotation is that by the negative angle
    if part < 2:
        angles = token * (HEAD_DIM // 2)
        x = _rotate_pairs(x, cos_ptr + angles, sin_ptr + angles, -1.0, HEAD_DIM, BLOCK)
    tl.store(qkv_ptr + row * 3 * WIDTH + part * WIDTH + columns, x, inside)


def swiglu(gate_and_value: Tensor) -> Tensor:
    """silu(gate) ⊙ value: (..., 2 · d_ff), the gate first -> (..., d_ff).

    Raises:
        ValueError: an odd number of columns, or a dtype that the kernels do not support.
    """
    _check_dtype("gate_and_value", gate_and_value)
    if gate_and_value.shape[-1] % 2:
        width = gate_and_value.shape[-1]
        raise ValueError(f"gate_and_value must have an even number of columns, got {width}")
    return _SwiGLU.apply(gate_and_value.contiguous())


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_value):
        ctx.save_for_backward(gate_and_value)
        *shape, width = gate_and_value.shape
        out = gate_and_value.new_empty(*shape, width // 2)
        _launch_swiglu(_swiglu_kernel, gate_and_value, out)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        (gate_and_value,) = ctx.saved_tensors
        grad = torch.empty_like(gate_and_value)
        _launch_swiglu(_swiglu_backward_kernel, gate_and_value, grad_out.contiguous(), grad)
        return grad


def _launch_swiglu(kernel, gate_and_value: Tensor, *others: Tensor) -> None:
    """Launch one program for each tile of rows and columns, of which a thread has 8 neighbors."""
    d_ff = gate_and_value.shape[-1] // 2
    num_rows = gate_and_value.numel() // (2 * d_ff)
    # in one dimension, as the others have at most 65,535 programs
    grid = (triton.cdiv(num_rows, SWIGLU_ROWS) * triton.cdiv(d_ff, SWIGLU_COLUMNS),)
    kernel[grid](
        gate_and_value,
        *others,
        num_rows,
        D_FF=d_ff,
        ROWS=SWIGLU_ROWS,
        COLUMNS=SWIGLU_COLUMNS,
        num_warps=8,
    )


@triton.jit
def _swiglu_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    D_FF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, columns, inside = _swiglu_tile(num_rows, D_FF, ROWS, COLUMNS)
    gate = tl.load(x_ptr + rows * 2 * D_FF + columns, inside).to(tl.float32)
    value = tl.load(x_ptr + rows * 2 * D_FF + D_FF + columns, inside).to(tl.float32)
    out = gate * tl.sigmoid(gate) * value
    tl.store(out_ptr + rows * D_FF + columns, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _swiglu_backward_kernel(
    x_ptr,
    grad_out_ptr,
    grad_ptr,
    num_rows,
    D_FF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """d silu(g) / dg = sigmoid(g) (1 + g (1 - sigmoid(g)))."""
    rows, columns, inside = _swiglu_tile(num_rows, D_FF, ROWS, COLUMNS)
    gate = tl.load(x_ptr + rows * 2 * D_FF + columns, inside).to(tl.float32)
    value = tl.load(x_ptr + rows * 2 * D_FF + D_FF + columns, inside).to(tl.float32)
    grad_out = tl.load(grad_out_ptr + rows * D_FF + columns, inside).to(tl.float32)

    # the product rule, with SiLU's derivative for the gate
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad_out * value * (sigmoid + silu * (1 - sigmoid))

    # both into one tensor, the gradient that the matmul before wants
    kind = grad_ptr.dtype.element_ty
    tl.store(grad_ptr + rows * 2 * D_FF + columns, grad_gate.to(kind), inside)
    tl.store(grad_ptr + rows * 2 * D_FF + D_FF + columns, (grad_out * silu).to(kind), inside)


@triton.jit
def _swiglu_tile(num_rows, D_FF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows of a program, (ROWS, 1), its columns, (1, COLUMNS), and which of them there are."""
    # neighbors in memory are worked on at the same time
    tiles_of_row: tl.constexpr = (D_FF + COLUMNS - 1) // COLUMNS
    down, across = tl.program_id(0) // tiles_of_row, tl.program_id(0) % tiles_of_row
    # int64, as tensors may have more than 2³¹ elements
    rows = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows, columns, (rows < num_rows) & (columns < D_FF)


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + branch, and its RMSNorm; x and branch are (..., d_model).

    Raises:
        ValueError: they have unequal shapes, `weight` is not (d_model,), or a dtype is not one that
            the kernels support.
    """
    if branch.shape != x.shape:
        found = f"got {tuple(branch.shape)} and {tuple(x.shape)}"
        raise ValueError(f"branch must have the shape of x, {found}")
    _check_dtype("branch", branch)
    _check_weight(x, weight)
    return _AddRMSNorm.apply(x.contiguous(), branch.contiguous(), weight.contiguous(), eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMSNorm of x, (..., d_model).

    Raises:
        ValueError: `weight` is not (d_model,), or the kernels do not support the dtype of x.
    """
    _check_weight(x, weight)
    return _RMSNorm.apply(x.contiguous(), weight.contiguous(), eps)


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ValueError(f"{name} must be one of {known}, in which kernels compute, got {x.dtype}")


def _check_weight(x: Tensor, weight: Tensor) -> None:
    _check_dtype("x", x)
    # written out only here, as a message about sizes compiles anew for each of them
    if weight.shape != x.shape[-1:]:
        found = f"got {tuple(weight.shape)} for x {tuple(x.shape)}"
        raise ValueError(f"weight must have shape (d_model,), {found}")


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, weight, eps):
        total, normed, inverse_rms = _norm(x, branch, weight, eps)
        ctx.save_for_backward(total, weight, inverse_rms)
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        grad, grad_weight = _norm_backward(grad_total, grad_normed, *ctx.saved_tensors)
        return grad, grad, grad_weight, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x, normed, inverse_rms = _norm(x, None, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return normed

    @staticmethod
    def backward(ctx, grad_normed):
        return *_norm_backward(None, grad_normed, *ctx.saved_tensors), None


def _norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch (None: just x), its norm, and 1 / rms of each row."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    inverse_rms = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _add_rms_norm_kernel[(num_rows,)](
        x,
        x if branch is None else branch,
        weight,
        total,
        normed,
        inverse_rms,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        HAS_BRANCH=branch is not None,
    )
    return total, normed, inverse_rms


def _norm_backward(
    grad_total: Tensor | None,
    grad_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of the sum and of the weight, from those of the sum (None: zero) and its norm.

    Each program loops over many rows, which leaves few partial sums of the weight's gradient.
    """
    width = total.shape[-1]
    num_rows = total.numel() // width
    block = triton.next_power_of_2(width)
    rows_at_once = max(1, NORM_ELEMENTS // block)
    num_programs = min(triton.cdiv(num_rows, rows_at_once), NORM_PROGRAMS)
    parts = torch.empty(num_programs, width, dtype=torch.float32, device=total.device)
    grad, grad_normed = torch.empty_like(total), grad_normed.contiguous()
    _add_rms_norm_backward_kernel[(num_programs,)](
        grad_normed if grad_total is None else grad_total.contiguous(),
        grad_normed,
        total,
        weight,
        inverse_rms,
        grad,
        parts,
        num_rows,
        WIDTH=width,
        ROWS=rows_at_once,
        BLOCK=block,
        HAS_TOTAL=grad_total is not None,
    )
    return grad, parts.sum(0).to(weight.dtype)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    inverse_rms_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BRANCH: tl.constexpr = True,
):
    """One row: the sum, 1 / rms of it, and the norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH

    # the residual sum, kept for the next one and for backward
    total = tl.load(x_ptr + row * WIDTH + columns, inside, other=0.0)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + row * WIDTH + columns, inside, other=0.0)
        # rounded before the norm, as if the two were computed one after the other
        total = (total.to(tl.float32) + branch.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + row * WIDTH + columns, total, inside)

    # its norm, while the row is still in registers
    total = total.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(total * total, 0) / WIDTH + eps)
    tl.store(inverse_rms_ptr + row, inverse_rms)
    weight = tl.load(weight_ptr + columns, inside).to(tl.float32)
    normed = (total * inverse_rms * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * WIDTH + columns, normed, inside)


@triton.jit
def _add_rms_norm_backward_kernel(
    grad_total_ptr,
    grad_normed_ptr,
    total_ptr,
    weight_ptr,
    inverse_rms_ptr,
    grad_ptr,
    parts_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TOTAL: tl.constexpr = True,
):
    """With x̂ = x · inverse_rms and g = grad_normed · weight: dx = inverse_rms (g - x̂ mean(g x̂)).

    The gradient of the sum itself is added to that. Each program writes its part of the weight's
    gradient, Σ grad_normed x̂, into its row of `parts`.
    """
    # int64, as tensors may have more than 2³¹ elements
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    weight_grad = tl.zeros((BLOCK,), tl.float32)

    # software pipelining: the loads of three tiles are in flight at a time
    for first in tl.range(program * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=3):
        rows = first + tl.arange(0, ROWS)
        offsets = rows[:, None] * WIDTH + columns[None, :]  # (ROWS, BLOCK)
        mask = (rows < num_rows)[:, None] & inside[None, :]

        # x̂ again from the sum, which is cheaper than storing it
        inverse_rms = tl.load(inverse_rms_ptr + rows, rows < num_rows, other=0.0)[:, None]
        grad_normed = tl.load(grad_normed_ptr + offsets, mask, other=0.0).to(tl.float32)
        x = tl.load(total_ptr + offsets, mask, other=0.0).to(tl.float32) * inverse_rms
        weight_grad += tl.sum(grad_normed * x, 0)

        # through the norm, and past it along the residual stream
        g = grad_normed * weight[None, :]
        grad = inverse_rms * (g - x * (tl.sum(g * x, 1)[:, None] / WIDTH))
        if HAS_TOTAL:
            grad += tl.load(grad_total_ptr + offsets, mask, other=0.0).to(tl.float32)
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask)
    tl.store(parts_ptr + program * WIDTH + columns, weight_grad, inside)
