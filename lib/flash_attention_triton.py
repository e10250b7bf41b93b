"""FlashAttention-2 as Triton kernels, forward and backward (Dao 2023, Algorithms 1 and 2).

No tile of scores or probabilities leaves the chip, and no tile that the causal mask hides is
visited. One kernel writes the output and the log-sum-exp of each row; the backward pass has one
for dQ and one for dK and dV, so that each element is added up by one program, in one order: the
result is the same every time. This is the portable form, for Triton 3.2 and later; what
`lib.flash_attention_hopper` supports goes there, where Triton is 3.6 or later.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lib.flash_attention_inputs import (
    autocast,
    check,
    check_device,
    empty_like_heads,
    strides,
    with_unit_stride,
)
from lib.flash_attention_tiles import Tiles, backward_tiles, forward_tiles, usable_precision

try:
    from lib import flash_attention_hopper as hopper
except ImportError:
    # a Triton without the Gluon it needs
    hopper = None

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Of products of float32, the default first
PRECISIONS = ("tf32x3", "ieee", "tf32")


@triton.jit
def _rows(
    ptr,
    start,
    stride,
    num_rows,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """(ROWS, WIDTH) from row `start`; zeros beyond the last row and the last column."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    # int64, as a token may be more than 2³¹ elements from the first
    places = ptr + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if EVEN and WIDTH == DIM:
        return tl.load(places)
    return tl.load(places, (start + row < num_rows)[:, None] & (column < DIM)[None, :], other=0.0)


@triton.jit
def _store_rows(
    ptr, x, start, stride, num_rows, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    places = ptr + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (start + row < num_rows)[:, None] & (column < DIM)[None, :]
    tl.store(places, x.to(ptr.dtype.element_ty), inside)


@triton.jit
def _turned_back(
    x,
    first,
    cos_ptr,
    sin_ptr,
    num_rows,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradient of rows before RoPE turned them by their positions, from that after."""
    HALF: tl.constexpr = WIDTH // 2
    row = tl.arange(0, ROWS)
    pair = tl.arange(0, HALF)
    places = tl.cast(first, tl.int64) * (DIM // 2) + row[:, None] * (DIM // 2) + pair[None, :]
    inside = (first + row < num_rows)[:, None] & (pair < DIM // 2)[None, :]
    cos = tl.load(cos_ptr + places, inside, other=0.0)
    sin = tl.load(sin_ptr + places, inside, other=0.0)
    # x is already rounded: half the bytes on their way to where the angles are
    even, odd = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    return tl.reshape(turned, (ROWS, WIDTH))


@triton.jit
def _visible(
    first_query,
    first_key,
    num_keys,
    IS_CAUSAL: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """(TILE_Q, TILE_K): which keys a query sees."""
    key = first_key + tl.arange(0, TILE_K)[None, :]
    last = num_keys - 1 + tl.zeros((TILE_Q, 1), tl.int32)
    if IS_CAUSAL:
        last = tl.minimum(last, first_query + tl.arange(0, TILE_Q)[:, None])
    return key <= last


@triton.jit
def _key_range(
    first_query, num_keys, IS_CAUSAL: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr
):
    """Where the keys end that a whole tile of queries sees, and where those end that any sees.

    Only the tiles between the two, on the diagonal or past the last key, need a mask.
    """
    end = tl.minimum(first_query + TILE_Q, num_keys) if IS_CAUSAL else num_keys
    seen_by_all = tl.minimum(first_query, num_keys) if IS_CAUSAL else num_keys
    return seen_by_all // TILE_K * TILE_K, end


@triton.jit
def _log2_sum_exp(places, row, num_queries, EVEN_Q: tl.constexpr):
    """The logarithm to base 2 of each row's sum of exponentials, +inf where p is to be 0.

    That is past the last query, and where a query sees nothing but scores of -inf.
    """
    if EVEN_Q:
        lse = tl.load(places)
    else:
        lse = tl.load(places, row < num_queries, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E)


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    out_batch,
    out_head,
    out_token,
    num_heads,
    group,
    num_queries,
    num_keys,
    scale,
    IS_CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of TILE_Q queries (Algorithm 1)."""
    num_tiles = tl.cdiv(num_queries, TILE_Q)
    tile = tl.program_id(0) % num_tiles
    if IS_CAUSAL:
        # the long rows first, so that short ones fill the gaps at the end
        tile = num_tiles - 1 - tile
    batch_head = tl.program_id(0) // num_tiles
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    out_ptr += batch * out_batch + head * out_head

    first = tile * TILE_Q
    q = _rows(q_ptr, first, q_token, num_queries, TILE_Q, DIM, WIDTH, EVEN_Q)
    scale_log2 = scale * LOG2_E
    acc = tl.zeros((TILE_Q, WIDTH), tl.float32)
    row_max = tl.full((TILE_Q,), -float("inf"), tl.float32)
    row_sum = tl.zeros((TILE_Q,), tl.float32)

    plain_end, end = _key_range(first, num_keys, IS_CAUSAL, TILE_Q, TILE_K)
    for phase in tl.static_range(2):
        lower = plain_end if phase == 1 else 0
        upper = end if phase == 1 else plain_end
        for start in range(lower, upper, TILE_K):
            k = _rows(k_ptr, start, k_token, num_keys, TILE_K, DIM, WIDTH, EVEN_K or phase == 0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if phase == 1:
                visible = _visible(first, start, num_keys, IS_CAUSAL, TILE_Q, TILE_K)
                scores = tl.where(visible, scores, -float("inf"))
            # exp2 is one instruction; the scale goes into its argument's multiply-add
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
            # where all scores so far are -inf, 0 in place of their maximum: -inf - -inf is NaN
            safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
            p = tl.exp2(scores * scale_log2 - safe_max[:, None])
            shrink = tl.exp2(row_max - safe_max)
            row_sum = row_sum * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            v = _rows(v_ptr, start, v_token, num_keys, TILE_K, DIM, WIDTH, EVEN_K or phase == 0)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            row_max = new_max

    # a query that sees keys of score -inf only gets zeros, as one that sees none
    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    _store_rows(out_ptr, out, first, out_token, num_queries, TILE_Q, DIM, WIDTH)
    row = first + tl.arange(0, TILE_Q)
    lse = row_max * LN_2 + tl.log(row_sum)
    tl.store(lse_ptr + batch_head.to(tl.int64) * num_queries + row, lse, row < num_queries)


@triton.jit
def _backward_queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    out_batch,
    out_head,
    out_token,
    grad_out_batch,
    grad_out_head,
    grad_out_token,
    grad_q_batch,
    grad_q_head,
    grad_q_token,
    cos_ptr,
    sin_ptr,
    num_heads,
    group,
    num_queries,
    num_keys,
    scale,
    IS_CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """dQ of TILE_Q queries, and delta = rowsum(dO ∘ O), which dK and dV need."""
    num_tiles = tl.cdiv(num_queries, TILE_Q)
    tile = tl.program_id(0) % num_tiles
    if IS_CAUSAL:
        tile = num_tiles - 1 - tile
    batch_head = tl.program_id(0) // num_tiles
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    out_ptr += batch * out_batch + head * out_head
    grad_out_ptr += batch * grad_out_batch + head * grad_out_head
    grad_q_ptr += batch * grad_q_batch + head * grad_q_head
    lse_ptr += batch_head.to(tl.int64) * num_queries
    delta_ptr += batch_head.to(tl.int64) * num_queries

    first = tile * TILE_Q
    row = first + tl.arange(0, TILE_Q)
    grad_out = _rows(grad_out_ptr, first, grad_out_token, num_queries, TILE_Q, DIM, WIDTH, EVEN_Q)
    out = _rows(out_ptr, first, out_token, num_queries, TILE_Q, DIM, WIDTH, EVEN_Q)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    tl.store(delta_ptr + row, delta, row < num_queries)
    q = _rows(q_ptr, first, q_token, num_queries, TILE_Q, DIM, WIDTH, EVEN_Q)
    lse = _log2_sum_exp(lse_ptr + row, row, num_queries, EVEN_Q)
    scale_log2 = scale * LOG2_E
    acc = tl.zeros((TILE_Q, WIDTH), tl.float32)

    plain_end, end = _key_range(first, num_keys, IS_CAUSAL, TILE_Q, TILE_K)
    for phase in tl.static_range(2):
        lower = plain_end if phase == 1 else 0
        upper = end if phase == 1 else plain_end
        for start in range(lower, upper, TILE_K):
            k = _rows(k_ptr, start, k_token, num_keys, TILE_K, DIM, WIDTH, EVEN_K or phase == 0)
            v = _rows(v_ptr, start, v_token, num_keys, TILE_K, DIM, WIDTH, EVEN_K or phase == 0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
            p = tl.exp2(scores * scale_log2 - lse[:, None])
            if phase == 1:
                visible = _visible(first, start, num_keys, IS_CAUSAL, TILE_Q, TILE_K)
                p = tl.where(visible, p, 0.0)
            grad_scores = p * (grad_p - delta[:, None])
            acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    acc = (acc * scale).to(grad_q_ptr.dtype.element_ty)
    if IS_TURNED:
        acc = _turned_back(acc, first, cos_ptr, sin_ptr, num_queries, TILE_Q, DIM, WIDTH)
    _store_rows(grad_q_ptr, acc, first, grad_q_token, num_queries, TILE_Q, DIM, WIDTH)


@triton.jit
def _backward_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    grad_out_batch,
    grad_out_head,
    grad_out_token,
    grad_k_batch,
    grad_k_head,
    grad_k_token,
    grad_v_batch,
    grad_v_head,
    grad_v_token,
    cos_ptr,
    sin_ptr,
    num_heads,
    group,
    num_queries,
    num_keys,
    scale,
    IS_CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """dK and dV of TILE_K keys; everything (keys, queries), so that no product needs a transpose
    of what was just computed."""
    num_tiles = tl.cdiv(num_keys, TILE_K)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    num_key_heads = num_heads // group
    batch = (batch_head // num_key_heads).to(tl.int64)
    key_head = (batch_head % num_key_heads).to(tl.int64)
    k_ptr += batch * k_batch + key_head * k_head
    v_ptr += batch * v_batch + key_head * v_head
    grad_k_ptr += batch * grad_k_batch + key_head * grad_k_head
    grad_v_ptr += batch * grad_v_batch + key_head * grad_v_head

    first = tile * TILE_K
    k = _rows(k_ptr, first, k_token, num_keys, TILE_K, DIM, WIDTH, EVEN_K)
    v = _rows(v_ptr, first, v_token, num_keys, TILE_K, DIM, WIDTH, EVEN_K)
    scale_log2 = scale * LOG2_E
    grad_k = tl.zeros((TILE_K, WIDTH), tl.float32)
    grad_v = tl.zeros((TILE_K, WIDTH), tl.float32)

    # queries before the first key see none of this tile; those on the diagonal see a part
    start_query = first // TILE_Q * TILE_Q if IS_CAUSAL else 0
    plain_start = tl.cdiv(first + TILE_K - 1, TILE_Q) * TILE_Q if IS_CAUSAL else 0
    plain_start = tl.minimum(plain_start, tl.cdiv(num_queries, TILE_Q) * TILE_Q)
    for member in range(group):
        head = key_head * group + member
        q_base = q_ptr + batch * q_batch + head * q_head
        grad_out_base = grad_out_ptr + batch * grad_out_batch + head * grad_out_head
        rows = (batch * num_heads + head) * num_queries
        for phase in tl.static_range(2):
            lower = start_query if phase == 0 else plain_start
            upper = plain_start if phase == 0 else num_queries
            for start in range(lower, upper, TILE_Q):
                row = start + tl.arange(0, TILE_Q)
                q = _rows(q_base, start, q_token, num_queries, TILE_Q, DIM, WIDTH, EVEN_Q)
                lse = _log2_sum_exp(lse_ptr + rows + row, row, num_queries, EVEN_Q)
                if EVEN_Q:
                    delta = tl.load(delta_ptr + rows + row)
                else:
                    delta = tl.load(delta_ptr + rows + row, row < num_queries, other=0.0)
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                p = tl.exp2(scores * scale_log2 - lse[None, :])
                if phase == 0:
                    key = first + tl.arange(0, TILE_K)
                    p = tl.where(key[:, None] <= row[None, :], p, 0.0)
                if not EVEN_Q:
                    # a key of -inf times the zeros past the last query is NaN
                    p = tl.where(row[None, :] < num_queries, p, 0.0)
                grad_out = _rows(
                    grad_out_base, start, grad_out_token, num_queries, TILE_Q, DIM, WIDTH, EVEN_Q
                )
                grad_v = tl.dot(p.to(v.dtype), grad_out, grad_v, input_precision=PRECISION)
                grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
                grad_scores = p * (grad_p - delta[None, :])
                grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    grad_k = (grad_k * scale).to(grad_k_ptr.dtype.element_ty)
    if IS_TURNED:
        grad_k = _turned_back(grad_k, first, cos_ptr, sin_ptr, num_keys, TILE_K, DIM, WIDTH)
    _store_rows(grad_k_ptr, grad_k, first, grad_k_token, num_keys, TILE_K, DIM, WIDTH)
    _store_rows(grad_v_ptr, grad_v, first, grad_v_token, num_keys, TILE_K, DIM, WIDTH)


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False)` on (batch, tokens, head_dim)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        heads = autocast(*(x.unsqueeze(1) for x in (q, k, v)))
        check(*heads)
        check_device(q.device)
        ctx.settings = (is_causal, 1 / math.sqrt(q.shape[-1]), PRECISIONS[0])
        out, lse = (x.squeeze(1) for x in _flash_attention(*heads, *ctx.settings))
        ctx.save_for_backward(*(x.squeeze(1) for x in heads), out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        heads = [x.unsqueeze(1) for x in (grad_out, *ctx.saved_tensors)]
        grads = _flash_attention_backward(*heads, *ctx.settings)
        return *(grad.squeeze(1) for grad in grads), None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    precision: str = PRECISIONS[0],
) -> Tensor:
    """softmax(scale · Q Kᵀ + mask) V, in memory linear in the number of tokens.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16, float16 or float32.
        k, v: (batch, key_heads, keys, head_dim); `key_heads` divides `heads` (grouped queries:
            Ainslie et al. 2023). Strides of batch, head and token are free.
        is_causal: query i sees the keys up to i (top-left aligned).
        scale: above 0; 1 / sqrt(head_dim) when left out.
        precision: of products of float32. `tf32x3` splits each factor in two and adds three
            products of tensor cores; its error is that of float32. `ieee` multiplies and adds in
            float32 itself, which takes several times as long. `tf32` rounds factors to 10 bits.

    Returns:
        (batch, heads, queries, head_dim) in the dtype of q; zeros where there are no keys.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or are not supported; names them.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; known: {', '.join(PRECISIONS)}")
    q, k, v = autocast(q, k, v)
    check(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale is {scale}; right is: above 0")
    check_device(q.device)
    return _flash_attention(q, k, v, is_causal, scale, precision)[0]


@torch.library.custom_op("workbook::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, precision: str
) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(q):
        return flash_forward(q, k, v, is_causal, scale, precision=precision)


@_flash_attention.register_fake
def _(q, k, v, is_causal, scale, precision):
    return empty_like_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("workbook::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(q):
        return flash_backward(grad_out, q, k, v, out, lse, is_causal, scale, precision=precision)


@_flash_attention_backward.register_fake
def _(grad_out, q, k, v, out, lse, is_causal, scale, precision):
    return empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.is_causal, ctx.scale, ctx.precision = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, grad_out, grad_lse):
    settings = (ctx.is_causal, ctx.scale, ctx.precision)
    return *_flash_attention_backward(grad_out, *ctx.saved_tensors, *settings), None, None, None


_flash_attention.register_autograd(_gradients, setup_context=_keep)


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
    """Output (batch, heads, queries, head_dim) and natural log-sum-exp (batch, heads, queries)."""
    if tiles is None and _uses_hopper(q, k, v):
        return hopper.flash_forward(q, k, v, is_causal, scale)
    batch, num_heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    out = empty_like_heads(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not num_keys:
        return out.zero_(), lse.fill_(-math.inf)
    if not out.numel():
        return out, lse
    q, k, v = map(with_unit_stride, (q, k, v))
    precision = usable_precision(q, precision)
    tiles = tiles or forward_tiles(q, precision=precision)
    grid = (triton.cdiv(num_queries, tiles.queries) * batch * num_heads,)
    _forward_kernel[grid](
        q,
        k,
        v,
        out,
        lse,
        *strides(q, k, v, out),
        num_heads,
        num_heads // k.shape[1],
        num_queries,
        num_keys,
        scale,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        grad_out, out: as the output; `lse`: as `flash_forward` gave it.
        tiles: of the kernel for q, and of that for k and v; then the portable kernels run.
        grads: where to write them, of any strides of batch, head and token.
        angles: cos and sin, (at least tokens, head_dim / 2) float32, of the positions by which q
            and k were turned (RoPE); the gradients are then those before the turn.
    """
    batch, num_heads, num_queries, head_dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    grads = grads or (empty_like_heads(q), empty_like_heads(k), empty_like_heads(v))
    if not num_keys or not q.numel():
        return tuple(grad.zero_() for grad in grads)
    written = grads
    if is_causal and num_keys > num_queries:
        # no query sees the keys after the last query; to say so costs a program for each tile more
        # than to write zeros
        for grad in grads[1:]:
            grad[:, :, num_queries:].zero_()
        k, v, *seen = (x[:, :, :num_queries] for x in (k, v, *grads[1:]))
        num_keys, written = num_queries, (grads[0], *seen)
    if tiles is None and _uses_hopper(q, k, v, *written):
        tensors = (grad_out, q, k, v, out, lse)
        hopper.flash_backward(*tensors, is_causal, scale, grads=written, angles=angles)
        return grads
    grad_q, grad_k, grad_v = written
    q, k, v, grad_out = map(with_unit_stride, (q, k, v, grad_out))
    precision = usable_precision(q, precision)
    for_queries, for_keys = tiles or backward_tiles(q, precision=precision)
    delta = torch.empty_like(lse)
    is_turned = angles is not None
    # without angles the kernels read nothing there
    cos, sin = angles if is_turned else (lse, lse)
    sizes = (cos, sin, num_heads, num_heads // key_heads, num_queries, num_keys, scale)
    shape = (is_causal, head_dim, num_queries, num_keys, precision)
    grid = (triton.cdiv(num_queries, for_queries.queries) * batch * num_heads,)
    _backward_queries_kernel[grid](
        q,
        k,
        v,
        out,
        grad_out,
        lse,
        delta,
        grad_q,
        *strides(q, k, v, out, grad_out, grad_q),
        *sizes,
        **constants(*shape, for_queries),
        IS_TURNED=is_turned,
    )
    grid = (triton.cdiv(num_keys, for_keys.keys) * batch * key_heads,)
    _backward_keys_kernel[grid](
        q,
        k,
        v,
        grad_out,
        lse,
        delta,
        grad_k,
        grad_v,
        *strides(q, k, v, grad_out, grad_k, grad_v),
        *sizes,
        **constants(*shape, for_keys),
        IS_TURNED=is_turned,
    )
    return grads


def _uses_hopper(*heads: Tensor) -> bool:
    return hopper is not None and hopper.supports(*heads)


def constants(
    is_causal: bool, head_dim: int, num_queries: int, num_keys: int, precision: str, tiles: Tiles
) -> dict:
    # fewer registers a thread let more programs share a multiprocessor
    limit = {"maxnreg": tiles.max_registers} if tiles.max_registers else {}
    return {
        "IS_CAUSAL": is_causal,
        "DIM": head_dim,
        # the least that a matrix product takes is 16
        "WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "TILE_Q": tiles.queries,
        "TILE_K": tiles.keys,
        "EVEN_Q": num_queries % tiles.queries == 0,
        "EVEN_K": num_keys % tiles.keys == 0,
        "PRECISION": precision,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **limit,
    }
