"""Kernels that solve the puzzles of notebook 05; without `triton.jit`, so that edits of them run.

Matrices are row-major and contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(y_ptr + offsets, x, mask=inside)


def add_bias(x_ptr, bias_ptr, y_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offsets = rows[:, None] * N + columns[None, :]  # (ROWS, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + offsets, mask=inside)
    bias = tl.load(bias_ptr + columns, mask=columns < N)  # (COLUMNS,)
    tl.store(y_ptr + offsets, x + bias[None, :], mask=inside)


def transpose(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=inside)
    tl.store(y_ptr + columns[None, :] * M + rows[:, None], x, mask=inside)


def row_sums(x_ptr, sums_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
    tl.store(sums_ptr + row, tl.sum(x, axis=0))


def softmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    y = weights / tl.sum(weights, axis=0)
    tl.store(y_ptr + row * N + columns, y, mask=columns < N)


def rms_norm(x_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    squares = 0.0
    for start in range(0, N, BLOCK):  # for the sum
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)  # adds nothing
        squares += tl.sum(x * x, axis=0)
    scale = 1 / tl.sqrt(squares / N + eps)
    for start in range(0, N, BLOCK):  # once more
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
        tl.store(y_ptr + row * N + columns, x * scale, mask=columns < N)


def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a_mask = (rows < M)[:, None] & (k < K)[None, :]
        b_mask = (k < K)[:, None] & (columns < N)[None, :]
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + columns[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=inside)


@triton.jit
def grouped_matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    # the tile of this program: down the columns of a group of rows, then to the next group
    program, tiles = tl.program_id(0), tl.cdiv(N, COLUMNS)
    first = program // (GROUP * tiles) * GROUP
    height = tl.minimum(GROUP, tl.cdiv(M, ROWS) - first)
    inside = program % (GROUP * tiles)
    rows = (first + inside % height) * ROWS + tl.arange(0, ROWS)
    columns = inside // height * COLUMNS + tl.arange(0, COLUMNS)

    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a_mask = (rows < M)[:, None] & (k < K)[None, :]
        b_mask = (k < K)[:, None] & (columns < N)[None, :]
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + columns[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    inside_c = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=inside_c)


@triton.jit
def linear_relu_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x_mask = (rows < M)[:, None] & (k < K)[None, :]
        w_mask = (k < K)[:, None] & (columns < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + k[:, None] * N + columns[None, :], mask=w_mask, other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
    y = tl.maximum(total + bias[None, :], 0.0)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + rows[:, None] * N + columns[None, :], y, mask=inside)


def linear_relu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    (M, K), N = x.shape, w.shape[1]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    linear_relu_kernel[grid](x, w, bias, y, M, N, K, ROWS=16, COLUMNS=16, DEPTH=16)
    return y
