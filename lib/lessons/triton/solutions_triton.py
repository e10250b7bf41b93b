"""Puzzles of notebook 05: kernels that readers write, with their mistakes; and a fused layer.

Matrices are row-major and contiguous.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lib.lessons.differences import shown
from lib.lessons.exercise import exercise
from lib.lessons.triton.kernels import Launch, Puzzle


def puzzle(launch: Callable[..., Launch], *example: Any) -> dict[str, Any]:
    """The harness that the puzzles share; the inputs of an exercise are those of `launch`."""

    def show(*given: Any) -> str:
        pairs = zip(inspect.signature(launch).parameters, given)
        return ", ".join(f"{name} = {shown(value)}" for name, value in pairs)

    return {"harness": Puzzle(launch, example), "trials": 5, "seconds": 20, "show": show}


def floats(generator: random.Random, *shape: int, scale: float = 1.0) -> Tensor:
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    return scale * torch.randn(shape, generator=seeded)


def empty(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def ceil(n: int, block: int) -> int:
    return -(-n // block)


def counted(*shape: int) -> Tensor:
    """The numbers 0, 1, … in that shape."""
    return torch.arange(float(math.prod(shape))).view(shape)


def length(generator: random.Random, size: int, tile: int) -> int:
    """A length of at most one tile at first, and in later trials of more than one."""
    low, high = (1, tile) if size < 8 else (tile + 1, 2 * tile)
    return generator.randint(low, high)


# 1. Copy


def draw_vector(generator: random.Random, size: int) -> tuple:
    return (floats(generator, length(generator, size, 4)),)


def launch_copy(x: Tensor) -> Launch:
    y = empty(len(x), like=x)
    return Launch({"y": y}, (ceil(len(x), 4),), (x, y, len(x)), {"BLOCK": 4})


@exercise("warm-up", draw_vector, **puzzle(launch_copy, counted(10)))
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(y_ptr + offsets, x, mask=inside)


copy.mistakes = """
offsets < n => offsets >= 0
    | the load of the last program reaches beyond the end; its mask is missing or too long
x, mask=inside => x | the store has no mask
tl.program_id(0) * BLOCK => 0 | every program starts at 0: its number is missing
tl.program_id(0) * BLOCK => tl.program_id(0)
    | programs start one element apart: multiply the number of the program by BLOCK
offsets < n => offsets < n - 1 | the mask is one too short
"""


# 2. Add a bias


def draw_bias(generator: random.Random, size: int) -> tuple:
    # the grid has more rows than columns
    M, N = 9 + length(generator, size, 4), length(generator, size, 8)
    N += M == N
    return floats(generator, M, N), floats(generator, N)


def launch_add_bias(x: Tensor, bias: Tensor) -> Launch:
    (M, N), y = x.shape, empty(*x.shape, like=x)
    grid = (ceil(M, 4), ceil(N, 8))
    return Launch({"y": y}, grid, (x, bias, y, M, N), {"ROWS": 4, "COLUMNS": 8})


@exercise("warm-up", draw_bias, **puzzle(launch_add_bias, counted(6, 10), counted(10)))
def add_bias(x_ptr, bias_ptr, y_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offsets = rows[:, None] * N + columns[None, :]  # (ROWS, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + offsets, mask=inside)
    bias = tl.load(bias_ptr + columns, mask=columns < N)  # (COLUMNS,)
    tl.store(y_ptr + offsets, x + bias[None, :], mask=inside)


add_bias.mistakes = """
rows[:, None] * N => rows[:, None] * M
    | the stride is wrong: from a row to the next it is N elements, not M
(rows < M)[:, None] => (rows >= 0)[:, None]
    | rows are not masked: their mask is missing, joined by `and` where `&` belongs, or without the
    parentheses that `&` needs around each comparison
& (columns < N)[None, :] => & (columns >= 0)[None, :]
    | columns are not masked, so that a tile reaches into the next row
(rows < M)[:, None] & (columns < N)[None, :] => offsets < M * N
    | the mask only knows where the matrix ends: mask rows and columns, each by its own
columns, mask=columns < N) => columns) | the load of the bias has no mask
rows[:, None] * N => rows[:, None] * COLUMNS
    | the stride is wrong: COLUMNS is the width of a tile, and from a row to the next it is N
"""


# 3. A transposed store


def draw_tall(generator: random.Random, size: int) -> tuple:
    # the grid has more rows than columns
    return (floats(generator, 4 + length(generator, size, 4), length(generator, size, 4)),)


def launch_transpose(x: Tensor) -> Launch:
    (M, N), y = x.shape, empty(x.shape[1], x.shape[0], like=x)
    return Launch({"y": y}, (ceil(M, 4), ceil(N, 4)), (x, y, M, N), {"BLOCK": 4})


@exercise("core", draw_tall, **puzzle(launch_transpose, counted(10, 6)))
def transpose(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=inside)
    tl.store(y_ptr + columns[None, :] * M + rows[:, None], x, mask=inside)


transpose.mistakes = """
columns[None, :] * M => columns[None, :] * N
    | the stride of y is wrong: a row of y has M elements
columns[None, :] * M + rows[:, None] => rows[:, None] * N + columns[None, :]
    | the elements are stored where they were, not transposed
columns[None, :] * M + rows[:, None] => columns[:, None] * M + rows[None, :]
    | the offsets in y are those of a tile that was turned around, but x or the mask was not; turn
    all three, or none
rows[:, None] * N => rows[:, None] * M | the stride of x is wrong: a row of x has N elements
tl.program_id(0) * BLOCK => tl.program_id(1) * BLOCK
    && columns = tl.program_id(1) * BLOCK => columns = tl.program_id(0) * BLOCK
    | the two axes of the grid are mixed up
x, mask=inside) => x) | the store has no mask
"""


# 4. Row sums


def draw_matrix(generator: random.Random, size: int) -> tuple:
    M, N = length(generator, size, 4), length(generator, size, 4)
    # else the strides of rows and columns would be the same
    return (floats(generator, M, N + (M == N)),)


def launch_row_sums(x: Tensor) -> Launch:
    sums = empty(len(x), like=x)
    return Launch({"sums": sums}, (len(x),), (x, sums, x.shape[1]), {"BLOCK": 32})


@exercise("warm-up", draw_matrix, **puzzle(launch_row_sums, counted(5, 12)))
def row_sums(x_ptr, sums_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
    tl.store(sums_ptr + row, tl.sum(x, axis=0))


row_sums.mistakes = """
, other=0.0 => | lanes that are masked off are added too; `other` says what they hold
x_ptr + row * N => x_ptr | each program sums the first row
row * N => row
    | each program starts one element after the one before: a row is N elements long
row * N => row * BLOCK | rows are taken to be BLOCK elements apart
mask=columns < N, other=0.0 => | the load has no mask
sums_ptr + row => sums_ptr | all programs store to element 0
"""


# 5. Softmax


def draw_logits(generator: random.Random, size: int) -> tuple:
    shape = generator.randint(1, 5), generator.randint(2, 4 + size)
    x = floats(generator, *shape, scale=3.0)
    # exp(100) is more than a float32 holds, exp(-120) less; size is 1, 4, 7, 10 or 13; only -inf
    # is below all numbers
    x += {4: 100.0, 7: -120.0, 10: -3e38}.get(size, 0.0)
    # one number far above the mean
    x[:, generator.randrange(shape[1])] += 200.0 if size > 10 else 0.0
    return (x,)


def launch_softmax(x: Tensor) -> Launch:
    y = empty(*x.shape, like=x)
    return Launch({"y": y}, (len(x),), (x, y, x.shape[1]), {"BLOCK": 32}, by_hand="softmax")


@exercise("core", draw_logits, **puzzle(launch_softmax, counted(5, 12)))
def softmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    y = weights / tl.sum(weights, axis=0)
    tl.store(y_ptr + row * N + columns, y, mask=columns < N)


softmax.mistakes = """
float("-inf") => 0.0 | lanes that are masked off hold 0, and exp(0) is added to the sum
, other=float("-inf") => | lanes that are masked off hold anything
tl.exp(x - tl.max(x, axis=0)) => tl.exp(x)
    | the largest of the row is not subtracted, so that exp overflows
/ tl.sum(weights, axis=0) => | the weights are not divided by their sum
y, mask=columns < N) => y) | the store has no mask
"""


# 6. RMSNorm


def draw_rows(generator: random.Random, size: int) -> tuple:
    shape = generator.randint(1, 4), 1 + length(generator, size, 8)
    return floats(generator, *shape, scale=0.01 if size > 8 else 1.0), 10.0 ** -(1 + size % 5)


def launch_rms_norm(x: Tensor, eps: float) -> Launch:
    y = empty(*x.shape, like=x)
    return Launch({"y": y}, (len(x),), (x, y, x.shape[1], eps), {"BLOCK": 8}, most_numbers=8)


@exercise("core", draw_rows, **puzzle(launch_rms_norm, counted(3, 20), 1e-5))
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


rms_norm.mistakes = """
range(0, N, BLOCK):  # for the sum => range(0, BLOCK, BLOCK):
    | the sum has one tile only: loop over the row
range(0, N, BLOCK):  # once more => range(start, N, BLOCK):
    | only the last tile is divided: after the sum, loop over the row once more
other=0.0)  # adds nothing => )
    | `other=0.0` is missing: lanes that are off hold anything, and are added up
squares += => squares = | each tile starts the sum anew; add to it
squares / N => squares | the sum of squares is not divided by N: take the mean
tl.sqrt(squares / N + eps) => (tl.sqrt(squares / N) + eps) | eps is added outside of the root
"""


# 7. Matmul


def draw_matrices(generator: random.Random, size: int) -> tuple:
    M, N, K = generator.randint(1, 16), generator.randint(1, 16), length(generator, size, 16)
    # wider than it is deep, now and then: then other strides are out of bounds
    M, N = M + (M == K), N + (N == K) if size % 2 else K + 1
    # one grid that is tall
    M += 32 if size > 12 else 0
    return floats(generator, M, K), floats(generator, K, N)


def launch_matmul(a: Tensor, b: Tensor) -> Launch:
    (M, K), N = a.shape, b.shape[1]
    c = empty(M, N, like=a)
    sizes = {"ROWS": 16, "COLUMNS": 16, "DEPTH": 16}
    return Launch({"c": c}, (ceil(M, 16), ceil(N, 16)), (a, b, c, M, N, K), sizes)


@exercise("core", draw_matrices, **puzzle(launch_matmul, counted(20, 20), counted(20, 25)))
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


matmul.mistakes = """
tl.dot(a, b, total => tl.dot(a, b, None | each step overwrites the total; add to it
total = tl.dot(a => tl.dot(a
    | what tl.dot returns is dropped; write total = tl.dot(a, b, total, ...)
total = tl.dot => total += tl.dot
    | the total is added twice: tl.dot adds to it already, so = and not +=
start + tl.arange(0, DEPTH) => tl.arange(0, DEPTH)
    | each step takes the first DEPTH elements: k begins at start
& (k < K)[None, :] =>
    | K is not masked: its last tile reaches beyond the end of a row of a, or of a column of b
mask=a_mask, other=0.0 => mask=a_mask
    | `other=0.0` is missing: lanes that are off hold anything, and are multiplied
"""


# 8. A fused layer


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
