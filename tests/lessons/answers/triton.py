"""Answers to the puzzles of notebook 05."""

import inspect
import linecache

import torch
import triton
import triton.language as tl

from lib.lessons.triton import exercises, solutions_triton
from lib.lessons.triton.recorder_triton import plain
from tests.lessons.answers.table import right, wrong, wrong_edit


@triton.jit
def copy_by_striding(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Tiles that interleave: program i starts at i, and steps by the number of programs."""
    offsets = tl.program_id(0) + tl.arange(0, BLOCK) * tl.num_programs(0)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, offsets < n), offsets < n)


@triton.jit
def copy_by_descriptor(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Descriptors know where a tensor ends, so that no mask is needed."""
    x = tl.make_tensor_descriptor(x_ptr, [n], [1], [BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [n], [1], [BLOCK])
    start = tl.program_id(0) * BLOCK
    y.store([start], x.load([start]))


@triton.jit
def copy_by_all(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Every program copies everything."""
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, offsets < n), offsets < n)


@triton.jit
def transpose_in_registers(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_mask = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=x_mask)
    y_mask = (columns < N)[:, None] & (rows < M)[None, :]
    tl.store(y_ptr + columns[:, None] * M + rows[None, :], tl.trans(x), mask=y_mask)


right(exercises.copy)(plain(copy_by_striding))
right(exercises.copy)(plain(copy_by_descriptor))
right(exercises.transpose)(plain(transpose_in_registers))
# a race is a fault though the result is right
wrong(exercises.copy, "It looks as if every program starts at 0")(plain(copy_by_all))


@wrong(exercises.softmax, "tl.softmax does all of it; write it out")
def softmax_by_one_call(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=float("-inf"))
    tl.store(y_ptr + row * N + columns, tl.softmax(x), mask=columns < N)


wrong_edit(exercises.softmax, "", 'float("-inf")', "-10000.0")

LAST = '        total = tl.dot(a, b, total, input_precision="ieee")\n'
STORE = "tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask="
INSIDE = "(rows < M)[:, None] & (columns < N)[None, :]"
wrong_edit(
    exercises.matmul,
    "store each element once, after the loop that it needs",
    *(LAST, f"{LAST}        {STORE}{INSIDE})\n"),
)


# The layer that launches its kernel: tiles of 16 in the solution, of 32 in wrong ones


def with_tiles(rows, columns, depth):
    def linear_relu(x, w, bias):
        (M, K), N = x.shape, w.shape[1]
        y = x.new_empty(M, N)
        grid = (triton.cdiv(M, rows), triton.cdiv(N, columns))
        kernel = solutions_triton.linear_relu_kernel[grid]
        kernel(x, w, bias, y, M, N, K, ROWS=rows, COLUMNS=columns, DEPTH=depth)
        return y

    return exercises.launches(linear_relu)


def with_kernel(old, new):
    """An edit of the kernel or its launch."""
    code = inspect.getsource(solutions_triton).replace("16", "32").replace(old, new)
    file = f"<edited {hash((old, new))}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    names = {"__name__": "edited"}
    exec(compile(code, file, "exec"), names)
    return exercises.launches(names["linear_relu"])


layer = exercises.linear_relu
# larger tiles ask for less
right(layer, "yours 148 KB, the solution 148 KB")(with_tiles(16, 16, 16))
right(layer, "yours 82.4 KB, the solution 148 KB")(with_tiles(32, 32, 16))
wrong(layer, "at most 1,024 numbers, got 2,048")(with_tiles(64, 32, 16))
wrong(layer, "tl.dot has to add up at least 16 products, got 1")(with_tiles(32, 32, 1))
wrong(layer, "no kernel was launched")(
    exercises.launches(lambda x, w, bias: torch.relu(x @ w + bias))
)
GRID = "(triton.cdiv(M, 32), triton.cdiv(N, 32))"
for old, new, words in (
    ("triton.cdiv(M, 32)", "M // 32", "no program ran: the grid is (0, "),
    ("tl.dot(x, w, total, ", "tl.dot(x, w, ", ""),
    ("k = start + ", "k = ", ""),
    (GRID, "(triton.cdiv(N, 32), triton.cdiv(M, 32))", ""),
    ("tl.program_id(0) * ROWS + ", "", ""),
    ('total, input_precision="ieee")', "total)", ""),
    ("return y", "return torch.relu(x @ w + bias)", ""),
    ("return y", "return y.clamp_(min=0)", ""),
):
    wrong(layer, words)(with_kernel(old, new))
