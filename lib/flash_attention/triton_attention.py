"""FlashAttention-2 in Triton, forward and backward (Dao 2023, Algorithms 1 and 2).

No tile of scores or probabilities leaves the chip, and no tile that the causal mask hides is
visited. One kernel writes the output and the log-sum-exp of each row; in the backward pass one
computes dQ and one dK and dV, so that each number is summed by one program in one order and results
repeat to the bit. This is the portable version, for Triton 3.2 and later. Inputs that
`lib.flash_attention.hopper.launch` supports go there, with a Triton of `HOPPER_TRITON`.
"""

import logging
import math

import torch
import triton
from torch import Tensor

from lib.core.terminal import warn_once
from lib.flash_attention.inputs import (
    HOPPER_TRITON,
    autocast,
    check_device,
    check_kernel_inputs,
    check_scale,
    empty_like_heads,
    empty_results,
    strides,
    with_unit_stride,
)
from lib.flash_attention.operator import make_operator
from lib.flash_attention.tiles import (
    Tiles,
    backward_tiles,
    compute_capability,
    forward_tiles,
    usable_precision,
)
from lib.flash_attention.triton_kernels import (
    _backward_keys_kernel,
    _backward_queries_kernel,
    _forward_kernel,
)

if ".".join(triton.__version__.split(".")[:2]) in HOPPER_TRITON:
    from lib.flash_attention.hopper import launch as hopper
else:
    hopper = None

log = logging.getLogger(__name__)
# Precisions of float32 matmuls, the default first.
PRECISIONS = ("tf32x3", "ieee", "tf32")


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal)` on (batch, tokens, head_dim).

    Saved for the backward pass: q, k, v, the output, and the natural log-sum-exp, (batch, queries).
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = autocast(q, k, v)
        check_kernel_inputs(q, k, v, ndim=3)
        check_device(q.device, q.dtype)
        heads = [x.unsqueeze(1) for x in (q, k, v)]  # (batch, 1, tokens, head_dim)
        ctx.settings = (is_causal, 1 / math.sqrt(q.shape[-1]), PRECISIONS[0], True)
        q, k, v = heads
        prepare(q, k, v, is_causal, has_gradients=any(ctx.needs_input_grad))
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    precision: str = PRECISIONS[0],
    deterministic: bool = True,
) -> Tensor:
    """softmax(scale · Q Kᵀ + mask) V, in memory linear in the number of tokens.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16, float16 or float32.
        k, v: (batch, key_heads, keys, head_dim); `key_heads` divides `heads` (grouped queries:
            Ainslie et al. 2023). The strides of batch, head and token can be any.
        is_causal: whether query i sees only the keys up to i (top-left aligned).
        scale: factor of the scores, more than 0; 1 / sqrt(head_dim) by default.
        precision: of float32 matmuls. `tf32x3` splits each operand in two and adds three matmuls
            of tensor cores; its error is that of float32. `ieee` multiplies and adds in float32
            itself, which takes several times as long. `tf32` rounds operands to 10 bits.
        deterministic: whether gradients repeat to the bit. A Hopper GPU computes those of long
            sequences in one kernel, whose blocks add to the gradient of q: one after another, or in
            any order, which can be a few percent faster. It takes 4 bytes of memory for each number
            of q while it runs.

    Returns:
        (batch, heads, queries, head_dim) in the dtype of q; zeros where there are no keys.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together or are not supported.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be {', '.join(PRECISIONS)}, got {precision!r}")
    q, k, v = autocast(q, k, v)
    check_kernel_inputs(q, k, v)
    scale = check_scale(scale, q.shape[-1])
    check_device(q.device, q.dtype)
    return _flash_attention.call(q, k, v, is_causal, scale, precision, deterministic)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    # only the backward pass looks at `deterministic`
    with torch.cuda.device_of(q):
        has_gradients = q.requires_grad or k.requires_grad or v.requires_grad
        prepare(q, k, v, is_causal, has_gradients=has_gradients)
        return flash_forward(q, k, v, is_causal, scale, precision=precision)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (grad_out, q, k, v, out, lse)
    with torch.cuda.device_of(q):
        return flash_backward(
            *tensors, is_causal, scale, precision=precision, deterministic=deterministic
        )


_flash_attention = make_operator(
    "flash_attention", _forward, _backward, empty_results, empty_like_heads
)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    *,
    has_gradients: bool,
    has_rope: bool = False,
) -> None:
    """Start to compile the kernels of both passes side by side, on a Hopper GPU.

    Args:
        q, k, v, is_causal: of the `flash_forward` that follows.
        has_gradients: whether `flash_backward` will follow, and `has_rope`, whether with `angles`.
    """
    # PyTorch's compiler, which would look into this, leaves it to the operator
    if hopper is not None and not torch.compiler.is_compiling():
        settings = {"has_gradients": has_gradients, "has_rope": has_rope}
        hopper.prepare(q, k, v, is_causal, **settings)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    *,
    precision: str = PRECISIONS[0],
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, queries, head_dim) and natural log-sum-exp (batch, heads, queries).

    Args:
        q, k, v, is_causal, scale, precision: as for `flash_attention`.
        tiles: run the portable kernel with these.
    """
    # a Hopper GPU has kernels of its own
    if tiles is None and _uses_hopper(q, k, v):
        return hopper.flash_forward(q, k, v, is_causal, scale)

    # results, and the cases that need no kernel: no keys, or no queries
    batch, num_heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    out = empty_like_heads(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not num_keys:
        return out.zero_(), lse.fill_(-math.inf)
    if not out.numel():
        return out, lse

    # one program for each tile of queries of each head
    q, k, v = map(with_unit_stride, (q, k, v))
    precision = usable_precision(q, precision)
    tiles = tiles or forward_tiles(q, precision=precision)
    grid = (triton.cdiv(num_queries, tiles.queries) * batch * num_heads,)
    _forward_kernel[grid](
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=lse,
        **strides(q=q, k=k, v=v, out=out),
        num_heads=num_heads,
        group=num_heads // k.shape[1],
        num_queries=num_queries,
        num_keys=num_keys,
        scale=scale,
        **constants(is_causal, head_dim, num_queries, num_keys, precision, tiles),
    )
    return out, lse


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    *,
    precision: str = PRECISIONS[0],
    tiles: tuple[Tiles, Tiles] | None = None,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        grad_out: gradient of the output.
        q, k, v, out, lse: inputs and results of `flash_forward`; `is_causal`, `scale`,
            `precision` and `deterministic` as for `flash_attention`.
        tiles: run the portable kernels, for dQ and for dK and dV, with these.
        grads: the tensors to write, with any strides of batch, head and token.
        angles: cos and sin of the angles by which RoPE rotated q and k, (at least tokens,
            head_dim / 2) float32; the gradients are then those before RoPE.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    grads = grads or (empty_like_heads(q), empty_like_heads(k), empty_like_heads(v))
    if not num_keys or not q.numel():
        for grad in grads:
            grad.zero_()
        return grads
    written = grads
    if is_causal and num_keys > num_queries:
        # no query sees a key after the last query: zeros here, rather than programs that find none
        for grad in grads[1:]:
            grad[:, :, num_queries:].zero_()
        k, v, grad_k, grad_v = (x[:, :, :num_queries] for x in (k, v, *grads[1:]))
        written = (grads[0], grad_k, grad_v)
    tensors = (grad_out, q, k, v, out, lse)
    if tiles is None and _uses_hopper(q, k, v, *written):
        hopper.flash_backward(
            *tensors, is_causal, scale, grads=written, angles=angles, deterministic=deterministic
        )
    else:
        _portable_backward(*tensors, is_causal, scale, precision, tiles, written, angles)
    return grads


def _portable_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
    tiles: tuple[Tiles, Tiles] | None,
    grads: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor] | None,
) -> None:
    """Launch the portable kernels: first dQ and delta, then dK and dV."""
    batch, num_heads, num_queries, head_dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    grad_q, grad_k, grad_v = grads
    q, k, v, grad_out = map(with_unit_stride, (q, k, v, grad_out))
    precision = usable_precision(q, precision)
    for_queries, for_keys = tiles or backward_tiles(q, precision=precision)
    # without angles the kernels do not read these pointers
    cos, sin = angles or (lse, lse)
    shared = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "grad_out_ptr": grad_out,
        "lse_ptr": lse,
        "delta_ptr": torch.empty_like(lse),
        "cos_ptr": cos,
        "sin_ptr": sin,
        "num_heads": num_heads,
        "group": num_heads // key_heads,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "scale": scale,
        "HAS_ROPE": angles is not None,
        **strides(q=q, k=k, v=v, grad_out=grad_out),
    }
    shape = (is_causal, head_dim, num_queries, num_keys, precision)
    grid = (triton.cdiv(num_queries, for_queries.queries) * batch * num_heads,)
    _backward_queries_kernel[grid](
        out_ptr=out,
        grad_q_ptr=grad_q,
        **strides(out=out, grad_q=grad_q),
        **shared,
        **constants(*shape, for_queries),
    )
    grid = (triton.cdiv(num_keys, for_keys.keys) * batch * key_heads,)
    _backward_keys_kernel[grid](
        grad_k_ptr=grad_k,
        grad_v_ptr=grad_v,
        **strides(grad_k=grad_k, grad_v=grad_v),
        **shared,
        **constants(*shape, for_keys),
    )


def _uses_hopper(*heads: Tensor) -> bool:
    """Whether Hopper's kernels take q, k, v and gradients; on a Hopper GPU logs once why not."""
    if hopper is not None and hopper.supports(*heads):
        return True
    q, k = heads[:2]
    # up to 32 columns the portable kernels are faster
    is_meant = q.dtype != torch.float32 and q.shape[3] > 32 and q.numel() > 0 and k.numel() > 0
    if is_meant and q.is_cuda and torch.version.cuda and compute_capability(q.device)[0] == 9:
        reason = f"need Triton {' or '.join(HOPPER_TRITON)}, got {triton.__version__}"
        if hopper is not None:
            sizes = f"{hopper.HEAD_DIMS[0]} to {hopper.HEAD_DIMS[-1]}"
            reason = (
                f"take head_dim {sizes} in steps of 8, got {q.shape[3]}, and rows that start at "
                "multiples of 16 bytes"
            )
        message = "attention runs its portable kernels, slower than those for Hopper GPUs, which"
        warn_once(log, f"{message} {reason}")
    return False


def constants(
    is_causal: bool, head_dim: int, num_queries: int, num_keys: int, precision: str, tiles: Tiles
) -> dict:
    """The compile-time arguments of a kernel; `tiles` are its own."""
    # with fewer registers for each thread, more programs share a multiprocessor
    limit = {"maxnreg": tiles.max_registers} if tiles.max_registers else {}
    return {
        "IS_CAUSAL": is_causal,
        "D": head_dim,
        # a matmul takes at least 16 columns
        "BD": max(16, triton.next_power_of_2(head_dim)),
        "BQ": tiles.queries,
        "BK": tiles.keys,
        "EVEN_Q": num_queries % tiles.queries == 0,
        "EVEN_K": num_keys % tiles.keys == 0,
        "PRECISION": precision,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **limit,
    }
