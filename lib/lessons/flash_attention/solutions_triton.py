"""Kernels that readers write in notebook 06, with their mistakes: a program does one tile.

Tensors are (heads, n, D), contiguous; lse and delta are (heads, n) float32. The grid is (tiles of a
head, heads). BQ queries make a tile, and BK keys.
"""

from __future__ import annotations

import triton.language as tl

from lib.lessons.exercise import exercise
from lib.lessons.flash_attention.kernel_task import (
    KERNEL,
    AttentionTask,
    draw_for_backward,
    draw_heads,
)

# What a forward kernel stores, and the dimensions of each.
OUT = {"out": 3, "lse": 2}


@exercise("core", draw_heads, harness=AttentionTask("k", OUT, is_causal=False, factor=2), **KERNEL)
def flash_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    n,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Output and log-sum-exp of a tile of queries, which see all keys."""
    head = tl.program_id(1) * n  # rows of the heads before this one
    query, channel = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    q_rows = (head + query[:, None]) * D + channel[None, :]  # (BQ, D)
    q = tl.load(q_ptr + q_rows, mask=query[:, None] < n, other=0.0)
    m, l = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    out = tl.zeros((BQ, D), tl.float32)
    for start in range(0, n, BK):
        key = start + tl.arange(0, BK)
        k_rows = (head + key[:, None]) * D + channel[None, :]  # (BK, D)
        k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        v = tl.load(v_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BQ, BK)
        scores = tl.where(key[None, :] < n, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p, shrink = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
        l = l * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new_m
    tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)
    tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)


flash_forward.mistakes = """
out * shrink[:, None] => out | the output so far is not rescaled when the maximum grows
* scale  # (BQ, BK) => | the scores are not multiplied by scale
m - new_m) => new_m - m)
    | all is NaN because the earlier sums are rescaled the wrong way round (the factor is exp(old
    maximum - new maximum)), or a mask is multiplied by infinity (0 · inf is NaN; use tl.where)
m = new_m => pass | the maximum is not carried on: the next tile needs m = new_m
* scale  # (BQ, BK) => * (1 / tl.sqrt(float(D)))  # (BQ, BK)
    | the argument scale is not used; here it is not 1 over the root of D
tl.where(key[None, :] < n, scores, float("-inf")) => scores
    | keys beyond the last have a score of 0, and exp(0) is 1; give them -inf
"""


@exercise("core", draw_heads, harness=AttentionTask("k", OUT), **KERNEL)
def causal_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    n,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Output and log-sum-exp of a tile of queries, which see no later key."""
    head = tl.program_id(1) * n  # rows of the heads before this one
    query, channel = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    q_rows = (head + query[:, None]) * D + channel[None, :]  # (BQ, D)
    q = tl.load(q_ptr + q_rows, mask=query[:, None] < n, other=0.0)
    m, l = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    out = tl.zeros((BQ, D), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BQ, n)  # no tile behind the diagonal
    for start in range(0, end, BK):
        key = start + tl.arange(0, BK)
        k_rows = (head + key[:, None]) * D + channel[None, :]  # (BK, D)
        k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        v = tl.load(v_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BQ, BK)
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p, shrink = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
        l = l * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new_m
    tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)
    tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)


causal_forward.mistakes = """
range(0, end, BK) => range(0, n, BK)
    | the result is right, but tiles behind the diagonal are loaded too: let the loop end with the
    last query of the tile
key[None, :] <= query[:, None] => key[None, :] < n | there is no mask
key[None, :] <= query => key[None, :] < query
    | a query does not see its own key; key j is visible if j ≤ i
key[None, :] <= query => key[None, :] >= query | the mask is turned around: it hides earlier keys
tl.minimum((tl.program_id(0) + 1) * BQ, n) => (tl.program_id(0) + 1) * BQ
    | the last tile of queries reaches beyond n, and so does the loop: let it end at
    tl.minimum(…, n)
(tl.program_id(0) + 1) * BQ, n => tl.program_id(0) * BQ, n
    | the loop ends before the diagonal; it must go on to the tile's last query
"""


@exercise("core", draw_for_backward, harness=AttentionTask("k", {"grad_q": 3}), **KERNEL)
def backward_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
    n,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """dQ of a tile of queries, causal."""
    head = tl.program_id(1) * n
    query, channel = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    q_rows = (head + query[:, None]) * D + channel[None, :]  # (BQ, D)
    q = tl.load(q_ptr + q_rows, mask=query[:, None] < n, other=0.0)
    grad_out = tl.load(grad_out_ptr + q_rows, mask=query[:, None] < n, other=0.0)
    lse = tl.load(lse_ptr + head + query, mask=query < n, other=0.0)
    delta = tl.load(delta_ptr + head + query, mask=query < n, other=0.0)
    grad_q = tl.zeros((BQ, D), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BQ, n)
    for start in range(0, end, BK):
        key = start + tl.arange(0, BK)
        k_rows = (head + key[:, None]) * D + channel[None, :]  # (BK, D)
        k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        v = tl.load(v_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BQ, BK)
        p = tl.exp(scores - lse[:, None])
        p = tl.where(key[None, :] <= query[:, None], p, 0.0)
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision="ieee")  # (BQ, BK)
        grad_scores = p * (grad_p - delta[:, None])
        grad_q += tl.dot(grad_scores.to(k.dtype), k, input_precision="ieee")
    tl.store(grad_q_ptr + q_rows, grad_q * scale, mask=query[:, None] < n)


backward_queries.mistakes = """
- delta[:, None] => | delta is missing: dS is P ∘ (dP - delta)
- delta[:, None] => + delta[:, None] | delta is added; dS is P ∘ (dP - delta)
p = tl.where(key[None, :] <= query[:, None], p, 0.0) => pass
    | there is no mask; hidden weights are 0
- lse[:, None] => | lse is missing: P is exp(S - lse)
grad_q * scale => grad_q | dQ is not scaled: S is scale · Q Kᵀ
grad_q += => grad_q = | each tile of keys overwrites dQ; add to it
"""


@exercise(
    "core", draw_for_backward, harness=AttentionTask("q", {"grad_k": 3, "grad_v": 3}), **KERNEL
)
def backward_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    n,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """dK and dV of a tile of keys, causal."""
    head = tl.program_id(1) * n
    first = tl.program_id(0) * BK
    key, channel = first + tl.arange(0, BK), tl.arange(0, D)
    k_rows = (head + key[:, None]) * D + channel[None, :]  # (BK, D)
    k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
    v = tl.load(v_ptr + k_rows, mask=key[:, None] < n, other=0.0)
    grad_k, grad_v = tl.zeros((BK, D), tl.float32), tl.zeros((BK, D), tl.float32)
    for start in range(first // BQ * BQ, n, BQ):  # no tile before the diagonal
        query = start + tl.arange(0, BQ)
        q_rows = (head + query[:, None]) * D + channel[None, :]  # (BQ, D)
        q = tl.load(q_ptr + q_rows, mask=query[:, None] < n, other=0.0)
        grad_out = tl.load(grad_out_ptr + q_rows, mask=query[:, None] < n, other=0.0)
        lse = tl.load(lse_ptr + head + query, mask=query < n, other=0.0)
        delta = tl.load(delta_ptr + head + query, mask=query < n, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale  # (BK, BQ)
        p = tl.exp(scores - lse[None, :])
        p = tl.where(key[:, None] <= query[None, :], p, 0.0)
        grad_v += tl.dot(p.to(q.dtype), grad_out, input_precision="ieee")
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision="ieee")  # (BK, BQ)
        grad_scores = p * (grad_p - delta[None, :])
        grad_k += tl.dot(grad_scores.to(q.dtype), q, input_precision="ieee")
    tl.store(grad_k_ptr + k_rows, grad_k * scale, mask=key[:, None] < n)
    tl.store(grad_v_ptr + k_rows, grad_v, mask=key[:, None] < n)


backward_keys.mistakes = """
range(first // BQ * BQ, n, BQ) => range(tl.program_id(0) * BQ, n, BQ)
    | the loop starts at i * BQ; the keys of program i start at i * BK
key[:, None] <= query[None, :] => key[:, None] >= query[None, :]
    | the mask is that of (queries, keys); these scores are (keys, queries)
- lse[None, :] => | lse is missing: P is exp(S - lse)
grad_k * scale => grad_k | dK is not scaled: S is scale · Q Kᵀ
- delta[None, :] => + delta[None, :] | delta is added; dS is P ∘ (dP - delta)
grad_k_ptr + k_rows, grad_k * scale => grad_k_ptr + k_rows, grad_v
    && grad_v_ptr + k_rows, grad_v, => grad_v_ptr + k_rows, grad_k * scale,
    | dK and dV are exchanged; dS gives dK, and P gives dV
"""
