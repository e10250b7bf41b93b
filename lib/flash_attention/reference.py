"""FlashAttention-2 in plain PyTorch: exact attention, tile by tile (Dao 2023).

Of the score matrix only one tile exists at a time, so memory grows with the length and not with
its square. This is the version to read: comments name the lines of the paper's Algorithm 1
(forward) and Algorithm 2 (backward), and capitals are its names for tiles.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lib.flash_attention.inputs import autocast, check_is_no_tensor, check_kernel_inputs
from lib.flash_attention.operator import make_operator

# Rows of a tile of Q, and of a tile of K and V (B_q and B_k; the paper's B_r and B_c).
QUERY_TILE = 128
KEY_TILE = 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> Tensor:
    """softmax(scale · Q Kᵀ) V for each head.

    Args:
        q: (batch, heads, queries, head_dim), one of `DTYPES`; computed in at least float32.
        k, v: (batch, key_heads, keys, head_dim); `heads` is a multiple of `key_heads`, and
            neighboring heads of q share one of k and v (grouped-query attention).
        is_causal: whether query i sees only the keys up to i (top-left aligned).
        scale: factor of the scores, a number; 1 / sqrt(head_dim) by default.
        query_tile, key_tile: queries and keys of a tile.

    Returns:
        (batch, heads, queries, head_dim) in the dtype of q; zeros where there are no keys.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or `scale` is a tensor.
    """
    q, k, v = autocast(q, k, v)
    check_kernel_inputs(q, k, v, dtypes=DTYPES, max_head_dim=None)
    if q.shape[1] == k.shape[1]:
        return FlashAttention.apply(q, k, v, is_causal, scale, query_tile, key_tile)
    # grouped queries: broadcast each head of k and v over its group
    q = q.unflatten(1, (k.shape[1], -1))  # (batch, key_heads, group, queries, head_dim)
    k, v = k.unsqueeze(2), v.unsqueeze(2)  # (batch, key_heads, 1, keys, head_dim)
    out = FlashAttention.apply(q, k, v, is_causal, scale, query_tile, key_tile)
    return out.flatten(1, 2)  # (batch, heads, queries, head_dim)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, is_causal)` on q (..., queries, d) and k, v (..., keys, d).

    Leading dimensions are equal, or 1 in k and v. Saved for the backward pass: q, k, v, the output,
    and the natural log-sum-exp of each query's scores, (..., queries), -inf if there are no keys.
    """

    @staticmethod
    def forward(
        ctx, q, k, v, is_causal=False, scale=None, query_tile=QUERY_TILE, key_tile=KEY_TILE
    ):
        q, k, v = autocast(q, k, v)
        check_kernel_inputs(q, k, v, dtypes=DTYPES, max_head_dim=None, ndim=max(3, q.ndim))
        for name, tile in (("query_tile", query_tile), ("key_tile", key_tile)):
            if tile < 1:
                raise ValueError(f"{name} must be at least 1, got {tile}")
        check_is_no_tensor(scale)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        ctx.settings = (is_causal, scale, query_tile, key_tile)
        out, lse = _operator.forward(q, k, v, *ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        grads = _operator.backward(grad_out, *ctx.saved_tensors, *ctx.settings)
        return *grads, None, None, None, None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    query_tile: int,
    key_tile: int,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: the output, in shape and dtype as q, and the log-sum-exp, (..., queries).

    The log-sum-exp and all intermediate results are in float32, or float64 for float64 inputs.
    """
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    out, lse = _empty_results(q)
    with torch.autocast(q.device.type, enabled=False):
        for rows in _tiles(0, num_queries, query_tile):  # line 3
            Q = q[..., rows, :].to(lse.dtype)  # line 4; (..., B_q, d)
            O = torch.zeros_like(Q)  # line 5
            l = Q.new_zeros(*Q.shape[:-1], 1)  # sum of exp(S - m) so far; (..., B_q, 1)
            m = torch.full_like(l, -math.inf)  # maximum of S so far; (..., B_q, 1)
            # under a causal mask none of these queries sees a key after the last of them
            end = min(rows.stop, num_keys) if is_causal else num_keys
            for columns in _tiles(0, end, key_tile):  # line 6
                K, V = (x[..., columns, :].to(lse.dtype) for x in (k, v))  # line 7; (..., B_k, d)
                S = _scores(Q, K, rows, columns, is_causal, scale)  # line 8; (..., B_q, B_k)
                m_before, m = m, torch.maximum(m, S.amax(-1, keepdim=True))  # line 9
                # 0 in place of m where all scores so far are -inf: -inf - -inf is NaN
                safe = torch.where(m == -math.inf, 0, m)
                P = torch.exp(S - safe)
                shrink = torch.exp(m_before - safe)
                l = shrink * l + P.sum(-1, keepdim=True)
                O = shrink * O + P @ V  # line 10; (..., B_q, d)
            # l is at least 1, the term of the maximum itself, or 0 where all scores are -inf
            out[..., rows, :] = O / l.clamp(min=1)  # lines 12 and 14
            lse[..., rows] = (m + torch.log(l)).squeeze(-1)  # lines 13 and 15
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    query_tile: int,
    key_tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: the gradients of q, k and v, in their shapes and dtypes."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    dq = torch.zeros_like(q, dtype=lse.dtype)  # line 3
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    with torch.autocast(q.device.type, enabled=False):
        delta = (grad_out.to(lse.dtype) * out).sum(-1)  # line 4, the paper's D; (..., queries)
        # P is 0 for a query whose scores are all -inf
        lse = torch.where(lse == -math.inf, math.inf, lse)
        for columns in _tiles(0, num_keys, key_tile):  # line 5
            K, V = (x[..., columns, :].to(lse.dtype) for x in (k, v))  # line 6; (..., B_k, d)
            dK, dV = torch.zeros_like(K), torch.zeros_like(V)  # line 7
            # under a causal mask no query before the first of these keys sees any of them
            start = columns.start // query_tile * query_tile if is_causal else 0
            for rows in _tiles(start, num_queries, query_tile):  # line 8
                Q, dO = (
                    x[..., rows, :].to(lse.dtype) for x in (q, grad_out)
                )  # line 9; (..., B_q, d)
                S = _scores(Q, K, rows, columns, is_causal, scale)  # line 10; (..., B_q, B_k)
                P = torch.exp(S - lse[..., rows, None])  # line 11
                # heads of q that share a head of k and v add up their gradients
                dV += (P.mT @ dO).sum_to_size(V.shape)  # line 12
                dP = dO @ V.mT  # line 13
                dS = P * (dP - delta[..., rows, None])  # line 14
                dq[..., rows, :] += scale * (dS @ K)  # line 15
                dK += scale * (dS.mT @ Q).sum_to_size(K.shape)  # line 16
            dk[..., columns, :], dv[..., columns, :] = dK, dV  # line 18
    return dq.to(q.dtype), dk, dv


def _scores(
    Q: Tensor, K: Tensor, rows: slice, columns: slice, is_causal: bool, scale: float
) -> Tensor:
    """scale · Q Kᵀ of one tile, (..., B_q, B_k), -inf where the mask hides a key."""
    S = scale * (Q @ K.mT)
    # below the diagonal every query sees every key, and no mask is needed
    if is_causal and columns.stop - 1 > rows.start:
        query = torch.arange(rows.start, rows.stop, device=Q.device)
        key = torch.arange(columns.start, columns.stop, device=Q.device)
        S = S.masked_fill(key > query[:, None], -math.inf)
    return S


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield the slices of `size` from `start` to `stop`; the last one may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _empty_results(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Memory for the output and the log-sum-exp."""
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), torch.empty(q.shape[:-1], dtype=lse_dtype, device=q.device)


# For torch.compile, which would unroll the loops into thousands of small operators.
_operator = make_operator("flash_attention_torch", forward, backward, _empty_results)
