"""Solutions to the kernels of notebook 06: a program does one tile of one head.

Tensors are (heads, n, D), contiguous; lse and delta are (heads, n) float32. The grid is (tiles of a
head, heads). BQ queries make a tile, and BK keys.
"""

import torch
import triton
import triton.language as tl


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


def attention_backward(q, k, v, out, lse, grad_out, queries_kernel, keys_kernel):
    heads, n, D = q.shape
    scale = D**-0.5
    delta = (grad_out * out).sum(-1)  # (heads, n)
    given = (q, k, v, grad_out.contiguous(), lse, delta)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    sizes, grid = {"D": D, "BQ": 16, "BK": 16}, (triton.cdiv(n, 16), heads)
    queries_kernel[grid](*given, grad_q, n, scale, **sizes)
    keys_kernel[grid](*given, grad_k, grad_v, n, scale, **sizes)
    return grad_q, grad_k, grad_v
