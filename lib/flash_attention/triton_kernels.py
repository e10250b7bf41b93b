"""The portable Triton kernels: forward, dQ, and dK with dV (Dao 2023, Algorithms 1 and 2).

A program computes one tile of one head. Tensors are (batch, heads, tokens, head_dim); `q_batch`,
`q_head` and `q_token` are the strides of q in elements, from one sequence, head and token to the
next, and the last stride is 1. Names in capitals are compile-time constants: D is head_dim, BD the
power of two that a tile of D columns is padded to, and EVEN_Q and EVEN_K say that tiles of BQ
queries and of BK keys fit the lengths, so that loads need no mask.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_rows(
    ptr,
    start,
    stride,
    num_rows,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load (ROWS, BD) from row `start` on; zeros past the last row and the last column."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BD)
    # int64: a token may be more than 2³¹ elements past the first
    pointers = ptr + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if EVEN and BD == D:
        return tl.load(pointers)
    return tl.load(pointers, (start + row < num_rows)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _store_rows(
    ptr, x, start, stride, num_rows, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """Write x, (ROWS, BD), to the rows from `start` on."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BD)
    pointers = ptr + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    is_inside = (start + row < num_rows)[:, None] & (column < D)[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), is_inside)


@triton.jit
def _unrotate(
    x,
    first,
    cos_ptr,
    sin_ptr,
    num_rows,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Rotate the gradient of rows back through RoPE, whose pairs are neighboring columns."""
    HALF: tl.constexpr = BD // 2
    row = tl.arange(0, ROWS)
    pair = tl.arange(0, HALF)
    offsets = tl.cast(first, tl.int64) * (D // 2) + row[:, None] * (D // 2) + pair[None, :]
    is_inside = (first + row < num_rows)[:, None] & (pair < D // 2)[None, :]
    cos = tl.load(cos_ptr + offsets, is_inside, other=0.0)
    sin = tl.load(sin_ptr + offsets, is_inside, other=0.0)
    # x is rounded already, which halves the bytes moved to the layout of the angles
    even, odd = tl.split(tl.reshape(x, (ROWS, HALF, 2)))  # (ROWS, HALF) each
    unrotated = tl.join(even * cos + odd * sin, odd * cos - even * sin)  # (ROWS, HALF, 2)
    return tl.reshape(unrotated, (ROWS, BD))


@triton.jit
def _visible_keys(
    first_query,
    first_key,
    num_keys,
    IS_CAUSAL: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """(BQ, BK) bool: which keys each query sees."""
    key = first_key + tl.arange(0, BK)[None, :]
    last = num_keys - 1 + tl.zeros((BQ, 1), tl.int32)
    if IS_CAUSAL:
        last = tl.minimum(last, first_query + tl.arange(0, BQ)[:, None])
    return key <= last


@triton.jit
def _key_range(first_query, num_keys, IS_CAUSAL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """The end of the keys that all queries of a tile see, and of those that any of them sees.

    Only the tiles of keys between the two, on the diagonal or past the last key, need a mask.
    """
    end = tl.minimum(first_query + BQ, num_keys) if IS_CAUSAL else num_keys
    seen_by_all = tl.minimum(first_query, num_keys) if IS_CAUSAL else num_keys
    return seen_by_all // BK * BK, end


@triton.jit
def _load_lse_log2(pointers, row, num_queries, EVEN_Q: tl.constexpr):
    """The log-sum-exp of each row in base 2, +inf where all of its probabilities must be 0.

    That is past the last query, and for a query whose scores are all -inf.
    """
    if EVEN_Q:
        lse = tl.load(pointers)
    else:
        lse = tl.load(pointers, row < num_queries, other=float("inf"))
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
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of BQ queries (Algorithm 1)."""
    # which tile of which head
    num_tiles = tl.cdiv(num_queries, BQ)
    tile = tl.program_id(0) % num_tiles
    if IS_CAUSAL:
        # long rows first, so that short ones fill the gaps at the end
        tile = num_tiles - 1 - tile
    batch_head = tl.program_id(0) // num_tiles
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    out_ptr += batch * out_batch + head * out_head

    # the queries, and the state of online softmax
    first = tile * BQ
    q = _load_rows(q_ptr, first, q_token, num_queries, BQ, D, BD, EVEN_Q)
    scale_log2 = scale * LOG2_E
    acc = tl.zeros((BQ, BD), tl.float32)
    row_max = tl.full((BQ,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BQ,), tl.float32)

    # phase 0: tiles of keys that all queries see; phase 1: those that need a mask
    plain_end, end = _key_range(first, num_keys, IS_CAUSAL, BQ, BK)
    for phase in tl.static_range(2):
        lower = plain_end if phase == 1 else 0
        upper = end if phase == 1 else plain_end
        for start in range(lower, upper, BK):
            k = _load_rows(k_ptr, start, k_token, num_keys, BK, D, BD, EVEN_K or phase == 0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BQ, BK)
            if phase == 1:
                visible = _visible_keys(first, start, num_keys, IS_CAUSAL, BQ, BK)
                scores = tl.where(visible, scores, -float("inf"))
            # exp2 is one instruction; the scale joins the multiply-add of its argument
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)  # (BQ,)
            # 0 in place of the maximum where all scores so far are -inf: -inf - -inf is NaN
            safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
            p = tl.exp2(scores * scale_log2 - safe_max[:, None])
            shrink = tl.exp2(row_max - safe_max)
            row_sum = row_sum * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            v = _load_rows(v_ptr, start, v_token, num_keys, BK, D, BD, EVEN_K or phase == 0)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BQ, BD)
            row_max = new_max

    # zeros, and not NaN, for a query whose scores are all -inf
    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    _store_rows(out_ptr, out, first, out_token, num_queries, BQ, D, BD)
    row = first + tl.arange(0, BQ)
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
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """dQ of BQ queries, and delta = rowsum(dO ∘ O), which dK and dV need."""
    # which tile of which head
    num_tiles = tl.cdiv(num_queries, BQ)
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

    # the queries, their dO, delta and log-sum-exp
    first = tile * BQ
    row = first + tl.arange(0, BQ)
    grad_out = _load_rows(grad_out_ptr, first, grad_out_token, num_queries, BQ, D, BD, EVEN_Q)
    out = _load_rows(out_ptr, first, out_token, num_queries, BQ, D, BD, EVEN_Q)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    tl.store(delta_ptr + row, delta, row < num_queries)
    q = _load_rows(q_ptr, first, q_token, num_queries, BQ, D, BD, EVEN_Q)
    lse = _load_lse_log2(lse_ptr + row, row, num_queries, EVEN_Q)
    scale_log2 = scale * LOG2_E
    acc = tl.zeros((BQ, BD), tl.float32)

    # phase 0: tiles of keys that all queries see; phase 1: those that need a mask
    plain_end, end = _key_range(first, num_keys, IS_CAUSAL, BQ, BK)
    for phase in tl.static_range(2):
        lower = plain_end if phase == 1 else 0
        upper = end if phase == 1 else plain_end
        for start in range(lower, upper, BK):
            k = _load_rows(k_ptr, start, k_token, num_keys, BK, D, BD, EVEN_K or phase == 0)
            v = _load_rows(v_ptr, start, v_token, num_keys, BK, D, BD, EVEN_K or phase == 0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BQ, BK)
            grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
            p = tl.exp2(scores * scale_log2 - lse[:, None])
            if phase == 1:
                visible = _visible_keys(first, start, num_keys, IS_CAUSAL, BQ, BK)
                p = tl.where(visible, p, 0.0)
            grad_scores = p * (grad_p - delta[:, None])
            acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    acc = (acc * scale).to(grad_q_ptr.dtype.element_ty)
    if HAS_ROPE:
        acc = _unrotate(acc, first, cos_ptr, sin_ptr, num_queries, BQ, D, BD)
    _store_rows(grad_q_ptr, acc, first, grad_q_token, num_queries, BQ, D, BD)


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
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """dK and dV of BK keys.

    Tiles of scores are (keys, queries), so that nothing that was computed has to be transposed.
    """
    # which tile of which head of keys
    num_tiles = tl.cdiv(num_keys, BK)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    num_key_heads = num_heads // group
    batch = (batch_head // num_key_heads).to(tl.int64)
    key_head = (batch_head % num_key_heads).to(tl.int64)
    k_ptr += batch * k_batch + key_head * k_head
    v_ptr += batch * v_batch + key_head * v_head
    grad_k_ptr += batch * grad_k_batch + key_head * grad_k_head
    grad_v_ptr += batch * grad_v_batch + key_head * grad_v_head

    # the keys and values
    first = tile * BK
    k = _load_rows(k_ptr, first, k_token, num_keys, BK, D, BD, EVEN_K)
    v = _load_rows(v_ptr, first, v_token, num_keys, BK, D, BD, EVEN_K)
    scale_log2 = scale * LOG2_E
    grad_k = tl.zeros((BK, BD), tl.float32)
    grad_v = tl.zeros((BK, BD), tl.float32)

    # queries before the first key see none of this tile, those on the diagonal a part of it
    start_query = first // BQ * BQ if IS_CAUSAL else 0
    plain_start = tl.cdiv(first + BK - 1, BQ) * BQ if IS_CAUSAL else 0
    plain_start = tl.minimum(plain_start, tl.cdiv(num_queries, BQ) * BQ)
    # the queries of every head that shares these keys
    for member in range(group):
        head = key_head * group + member
        q_base = q_ptr + batch * q_batch + head * q_head
        grad_out_base = grad_out_ptr + batch * grad_out_batch + head * grad_out_head
        rows = (batch * num_heads + head) * num_queries
        for phase in tl.static_range(2):
            lower = start_query if phase == 0 else plain_start
            upper = plain_start if phase == 0 else num_queries
            for start in range(lower, upper, BQ):
                row = start + tl.arange(0, BQ)
                q = _load_rows(q_base, start, q_token, num_queries, BQ, D, BD, EVEN_Q)
                lse = _load_lse_log2(lse_ptr + rows + row, row, num_queries, EVEN_Q)
                if EVEN_Q:
                    delta = tl.load(delta_ptr + rows + row)
                else:
                    delta = tl.load(delta_ptr + rows + row, row < num_queries, other=0.0)
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BK, BQ)
                p = tl.exp2(scores * scale_log2 - lse[None, :])
                if phase == 0:
                    key = first + tl.arange(0, BK)
                    p = tl.where(key[:, None] <= row[None, :], p, 0.0)
                if not EVEN_Q:
                    # past the last query q is 0, and 0 times a key of -inf is NaN
                    p = tl.where(row[None, :] < num_queries, p, 0.0)
                grad_out = _load_rows(
                    grad_out_base, start, grad_out_token, num_queries, BQ, D, BD, EVEN_Q
                )
                grad_v = tl.dot(p.to(v.dtype), grad_out, grad_v, input_precision=PRECISION)
                grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
                grad_scores = p * (grad_p - delta[None, :])
                grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    grad_k = (grad_k * scale).to(grad_k_ptr.dtype.element_ty)
    if HAS_ROPE:
        grad_k = _unrotate(grad_k, first, cos_ptr, sin_ptr, num_keys, BK, D, BD)
    _store_rows(grad_k_ptr, grad_k, first, grad_k_token, num_keys, BK, D, BD)
    _store_rows(grad_v_ptr, grad_v, first, grad_v_token, num_keys, BK, D, BD)
