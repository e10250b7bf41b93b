"""Puzzles of notebook 05: kernels that readers write, run by Triton's interpreter.

Results are compared with PyTorch's. An access out of bounds, and an element that two programs
store, are errors. Each check then shows which elements the programs touched.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.lessons.differences import shown
from lib.lessons.exercise import Exercise, check, edited, name_of, report, result_of, verdict
from lib.lessons.triton import solutions_triton as solutions
from lib.lessons.triton.compile_triton import Compiled, compile_for
from lib.lessons.triton.figures import show_run
from lib.lessons.triton.recorder_triton import Run, plain, watch, watched

TRIALS = 5
# Numbers that fit one tile of the last puzzle.
MOST_NUMBERS = 1024


@dataclass(frozen=True)
class Launch:
    """How a puzzle launches a kernel."""

    output: Tensor
    """Filled with NaN before."""

    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, int]

    most_numbers: int | None = None
    """In a tile, if the puzzle limits that."""

    by_hand: str = ""
    """The function of Triton that does all of it, which a kernel must not call."""


def runner(kernel: Any, plan: Callable[..., Launch]) -> Callable[..., Tensor]:
    """A function of tensors that launches `kernel` as `plan` says, and returns the output."""

    # an error names its line in the kernel
    @functools.wraps(plain(kernel))
    def run(*tensors: Tensor) -> Tensor:
        launch = plan(*tensors)
        run = watch(kernel, launch.grid, *launch.arguments, strict=True, **launch.options)
        check_run(run, launch.most_numbers)
        if launch.by_hand in run.called:
            raise ValueError(f"tl.{launch.by_hand} does all of it; write it out")
        if torch.cuda.is_available() and hasattr(kernel, "fn"):
            return on_gpu(kernel, plan, tensors)
        return launch.output

    return run


def on_gpu(kernel: Any, plan: Callable[..., Launch], tensors: tuple[Tensor, ...]) -> Tensor:
    """The output of the compiled kernel."""
    launch = plan(*(x.cuda() if isinstance(x, Tensor) else x for x in tensors))
    kernel[launch.grid](*launch.arguments, **launch.options)
    return launch.output.cpu()


def check_run(run: Run, most_numbers: int | None = None) -> None:
    """Refuse programs that store nothing, and tiles that are too large.

    Raises:
        ValueError: no program runs or none stores anything, or a tile has more than `most_numbers`
            numbers.
    """
    if not run.num_programs:
        raise ValueError(f"no program ran: the grid is {run.grid}; round up, with triton.cdiv")
    if not run.of("store"):
        raise ValueError("no program stores anything: tl.store is missing")
    if most_numbers and run.largest_tile > most_numbers:
        raise ValueError(
            f"a tile must have at most {most_numbers:,} numbers, got {run.largest_tile:,}"
        )


def puzzle(
    solve: Callable[..., Tensor],
    draw: Callable[[random.Random, int], tuple],
    kernel: Callable,
    plan: Callable[..., Launch],
    mistakes: dict[str, tuple[str, str]],
    tier: Any = "warm-up",
) -> Exercise:
    """An exercise whose answer is `kernel`; `mistakes` are edits of its source."""

    def made(edit: tuple[str, str]) -> Callable:
        # edited when it is needed
        @functools.wraps(kernel)
        def run(*tensors: Tensor) -> Tensor:
            return runner(edited(kernel, *edit), plan)(*tensors)

        return run

    wrong = {sentence: made(edit) for sentence, edit in mistakes.items()}
    names = inspect.signature(solve).parameters

    def show(*given: Any) -> str:
        return ", ".join(f"{name} = {shown(value)}" for name, value in zip(names, given))

    return Exercise(solve, draw, wrong, tier, trials=TRIALS, seconds=20, show=show)


def not_jitted(kernel: Any, tier: str) -> bool:
    """Whether `kernel` is a plain function, which nothing can launch; if so, report that."""
    if hasattr(kernel, "fn"):
        return False
    name = name_of(kernel)
    report(f"not yet: `{name}` can't be launched; put `@triton.jit` above it", name, tier)
    return True


def check_kernel(
    exercise: Exercise, kernel: Any, plan: Callable[..., Launch], *tensors: Tensor
) -> None:
    """Print the verdict on `kernel`, and show what its programs touch, given `tensors`.

    What the interpreter runs need not compile: a tile of 10 elements does not, nor does an `if` on
    a tile.
    """
    if not_jitted(kernel, exercise.tier):
        return
    text, name = verdict(exercise, runner(kernel, plan)), plain(kernel).__name__
    report(text, name, exercise.tier)
    launch = plan(*tensors)
    if result_of(text) == "passed":
        print(compiled_words(kernel, launch))
    try:
        run = watch(kernel, launch.grid, *launch.arguments, **launch.options)
    except Exception:
        # not attempted, or an error that the verdict names
        return
    shape = " × ".join(map(str, tensors[0].shape))
    show_run(run, title=f"What each program of {name} touches in an input of {shape}")


def compiled_words(kernel: Any, launch: Launch) -> str:
    """Whether `kernel` compiles for an A100, and how many registers it takes."""
    try:
        made = compile_launch(kernel, launch)
    except Exception as error:
        return "\n    ".join(["  but it does not compile", *compile_error_lines(error)])
    return f"  compiled for an A100, it takes {made.registers} registers of each thread"


def compile_error_lines(error: Exception) -> list[str]:
    """The line of the kernel that Triton's compiler shows, if it shows one, and its reason."""
    words = str(error).strip().splitlines()
    # above the reason it shows the source, and a caret below where it is wrong
    carets = [number for number, line in enumerate(words) if line.strip() == "^"]
    shown = [f"in `{words[carets[-1] - 1].strip()}`"] if carets and carets[-1] > 0 else []
    return [*shown, words[-1]]


def compile_launch(kernel: Any, launch: Launch) -> Compiled:
    """`kernel` for an A100, for arguments of the types that `launch` has."""
    tensors = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    names = [
        name for name in inspect.signature(plain(kernel)).parameters if name not in launch.options
    ]
    types = {
        name: tensors[x.dtype] if isinstance(x, Tensor) else "i32" if isinstance(x, int) else "fp32"
        for name, x in zip(names, launch.arguments)
    }
    return compile_for(80, kernel, types, **launch.options)


def floats(generator: random.Random, *shape: int, scale: float = 1.0) -> Tensor:
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    return scale * torch.randn(shape, generator=seeded)


def empty(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def ceil(n: int, block: int) -> int:
    return -(-n // block)


def length(generator: random.Random, size: int, tile: int) -> int:
    """A length of at most one tile at first, and in later trials of more than one."""
    low, high = (1, tile) if size < 8 else (tile + 1, 2 * tile)
    return generator.randint(low, high)


def _draw_vector(generator: random.Random, size: int) -> tuple:
    return (floats(generator, length(generator, size, 4)),)


def _draw_matrix(generator: random.Random, size: int) -> tuple:
    M, N = length(generator, size, 4), length(generator, size, 4)
    # else the strides of rows and columns would be the same
    return (floats(generator, M, N + (M == N)),)


def copy(x: Tensor) -> Tensor:
    return x.clone()


def launch_copy(x: Tensor) -> Launch:
    y = empty(len(x), like=x)
    return Launch(y, (ceil(len(x), 4),), (x, y, len(x)), {"BLOCK": 4})


COPY = puzzle(
    copy,
    _draw_vector,
    solutions.copy,
    launch_copy,
    {
        "the load of the last program reaches beyond the end; its mask is missing or too long": (
            "offsets < n",
            "offsets >= 0",
        ),
        "the store has no mask": ("x, mask=inside", "x"),
        "every program starts at 0: its number is missing": ("tl.program_id(0) * BLOCK", "0"),
        "programs start one element apart: multiply the number of the program by BLOCK": (
            "tl.program_id(0) * BLOCK",
            "tl.program_id(0)",
        ),
        "the mask is one too short": ("offsets < n", "offsets < n - 1"),
    },
)


def check_copy(kernel: Any) -> None:
    """Puzzle 1."""
    check_kernel(COPY, kernel, launch_copy, torch.arange(10.0))


def _draw_bias(generator: random.Random, size: int) -> tuple:
    # the grid has more rows than columns
    M, N = 9 + length(generator, size, 4), length(generator, size, 8)
    N += M == N
    return floats(generator, M, N), floats(generator, N)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


def launch_add_bias(x: Tensor, bias: Tensor) -> Launch:
    (M, N), y = x.shape, empty(*x.shape, like=x)
    grid = (ceil(M, 4), ceil(N, 8))
    return Launch(y, grid, (x, bias, y, M, N), {"ROWS": 4, "COLUMNS": 8})


ADD_BIAS = puzzle(
    add_bias,
    _draw_bias,
    solutions.add_bias,
    launch_add_bias,
    {
        "the stride is wrong: from a row to the next it is N elements, not M": (
            "rows[:, None] * N",
            "rows[:, None] * M",
        ),
        "rows are not masked: their mask is missing, or joined by `and` where `&` belongs": (
            "(rows < M)[:, None]",
            "(rows >= 0)[:, None]",
        ),
        "columns are not masked, so that a tile reaches into the next row": (
            "& (columns < N)[None, :]",
            "& (columns >= 0)[None, :]",
        ),
        "the mask only knows where the matrix ends: mask rows and columns, each by its own": (
            "(rows < M)[:, None] & (columns < N)[None, :]",
            "offsets < M * N",
        ),
        "the load of the bias has no mask": ("columns, mask=columns < N)", "columns)"),
        "the bias is missing": ("x + bias[None, :]", "x"),
        "the stride is wrong: from a row to the next it is N elements, not COLUMNS": (
            "rows[:, None] * N",
            "rows[:, None] * COLUMNS",
        ),
        "the bias is that of the row: it has an element for each column": (
            "tl.load(bias_ptr + columns, mask=columns < N)  # (COLUMNS,)\n"
            "    tl.store(y_ptr + offsets, x + bias[None, :]",
            "tl.load(bias_ptr + rows, mask=rows < M)\n"
            "    tl.store(y_ptr + offsets, x + bias[:, None]",
        ),
        "every program loads the first tile of the bias": (
            "tl.load(bias_ptr + columns, mask=columns < N)",
            "tl.load(bias_ptr + tl.arange(0, COLUMNS), mask=tl.arange(0, COLUMNS) < N)",
        ),
        "the two axes of the grid are mixed up": (
            "tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n    columns = tl.program_id(1)",
            "tl.program_id(1) * ROWS + tl.arange(0, ROWS)\n    columns = tl.program_id(0)",
        ),
    },
)


def check_add_bias(kernel: Any) -> None:
    """Puzzle 2."""
    x = torch.arange(60.0).view(6, 10)
    check_kernel(ADD_BIAS, kernel, launch_add_bias, x, torch.arange(10.0))


def row_sums(x: Tensor) -> Tensor:
    return x.sum(1)


def launch_row_sums(x: Tensor) -> Launch:
    sums = empty(len(x), like=x)
    return Launch(sums, (len(x),), (x, sums, x.shape[1]), {"BLOCK": 32})


ROW_SUMS = puzzle(
    row_sums,
    _draw_matrix,
    solutions.row_sums,
    launch_row_sums,
    {
        "lanes that are masked off are added too; `other` says what they hold": (
            ", other=0.0",
            "",
        ),
        "each program sums the first row": ("x_ptr + row * N", "x_ptr"),
        "each program starts one element after the one before: a row is N elements long": (
            "row * N",
            "row",
        ),
        "rows are taken to be BLOCK elements apart": ("row * N", "row * BLOCK"),
        "the load has no mask": ("mask=columns < N, other=0.0", ""),
        "the mask compares offsets of the matrix with N, which columns are less than": (
            "mask=columns < N",
            "mask=row * N + columns < N",
        ),
        "all programs store to element 0": ("sums_ptr + row", "sums_ptr"),
    },
)


def check_row_sums(kernel: Any) -> None:
    """Puzzle 4."""
    check_kernel(ROW_SUMS, kernel, launch_row_sums, torch.arange(60.0).view(5, 12))


def _draw_logits(generator: random.Random, size: int) -> tuple:
    shape = generator.randint(1, 5), generator.randint(2, 4 + size)
    x = floats(generator, *shape, scale=3.0)
    # exp(100) is more than a float32 holds, exp(-120) less; size is 1, 4, 7, 10 or 13; only -inf
    # is below all numbers
    x += {4: 100.0, 7: -120.0, 10: -3e38}.get(size, 0.0)
    # one number far above the mean
    x[:, generator.randrange(shape[1])] += 200.0 if size > 10 else 0.0
    return (x,)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


def launch_softmax(x: Tensor) -> Launch:
    y = empty(*x.shape, like=x)
    return Launch(y, (len(x),), (x, y, x.shape[1]), {"BLOCK": 32}, by_hand="softmax")


SOFTMAX = puzzle(
    softmax,
    _draw_logits,
    solutions.softmax,
    launch_softmax,
    {
        "lanes that are masked off hold 0, and exp(0) is added to the sum": (
            'float("-inf")',
            "0.0",
        ),
        "lanes that are masked off hold anything": (', other=float("-inf")', ""),
        "the largest of the row is not subtracted, so that exp overflows": (
            "tl.exp(x - tl.max(x, axis=0))",
            "tl.exp(x)",
        ),
        "lanes that are masked off hold 0, which is the maximum of a row of negative numbers": (
            'float("-inf"))\n    weights = tl.exp(x - tl.max(x, axis=0))\n',
            "0.0)\n    weights = tl.exp(x - tl.max(x, axis=0))\n"
            "    weights = tl.where(columns < N, weights, 0.0)\n",
        ),
        "lanes that are masked off hold -100, but rows may lie below: only -inf is below all": (
            'float("-inf")',
            "-100.0",
        ),
        "the mean of the row is subtracted, not its largest number, so that exp overflows": (
            "tl.max(x, axis=0)",
            "tl.sum(tl.where(columns < N, x, 0.0), axis=0) / N",
        ),
        "rows are taken to be BLOCK elements apart": (
            "tl.load(x_ptr + row * N",
            "tl.load(x_ptr + row * BLOCK",
        ),
        "the weights are not divided by their sum": (" / tl.sum(weights, axis=0)", ""),
        "they are divided by the sum of x": (
            "tl.sum(weights",
            "tl.sum(tl.where(columns < N, x, 0.0)",
        ),
        "each program takes the first row": (
            "tl.load(x_ptr + row * N",
            "tl.load(x_ptr",
        ),
        "the store has no mask": ("y, mask=columns < N", "y"),
    },
    "core",
)


def check_softmax(kernel: Any) -> None:
    """Puzzle 5."""
    check_kernel(SOFTMAX, kernel, launch_softmax, torch.arange(60.0).view(5, 12))


def transpose(x: Tensor) -> Tensor:
    return x.T.contiguous()


def launch_transpose(x: Tensor) -> Launch:
    (M, N), y = x.shape, empty(x.shape[1], x.shape[0], like=x)
    return Launch(y, (ceil(M, 4), ceil(N, 4)), (x, y, M, N), {"BLOCK": 4})


TRANSPOSE = puzzle(
    transpose,
    _draw_matrix,
    solutions.transpose,
    launch_transpose,
    {
        "the stride of y is wrong: a row of y has M elements": (
            "columns[None, :] * M",
            "columns[None, :] * N",
        ),
        "the elements are stored where they were, not transposed": (
            "columns[None, :] * M + rows[:, None]",
            "rows[:, None] * N + columns[None, :]",
        ),
        "the offsets in y are those of a tile that was turned around, but x was not; give them the "
        "shape of x": (
            "columns[None, :] * M + rows[:, None]",
            "columns[:, None] * M + rows[None, :]",
        ),
        "offsets in y and mask are turned around, but the tile is not: turn it, too, or none": (
            "columns[None, :] * M + rows[:, None], x, mask=inside",
            "columns[:, None] * M + rows[None, :], x, mask=tl.trans(inside)",
        ),
        "rows are not masked": ("(rows < M)[:, None]", "(rows >= 0)[:, None]"),
        "columns are not masked": ("(columns < N)[None, :]", "(columns >= 0)[None, :]"),
        "the store has no mask": ("x, mask=inside", "x"),
        "the stride of x is wrong: a row of x has N elements": (
            "rows[:, None] * N",
            "rows[:, None] * M",
        ),
    },
    "core",
)


def check_transpose(kernel: Any) -> None:
    """Puzzle 3."""
    check_kernel(TRANSPOSE, kernel, launch_transpose, torch.arange(60.0).view(6, 10))


def _draw_rows(generator: random.Random, size: int) -> tuple:
    shape = generator.randint(1, 4), 1 + length(generator, size, 8)
    return floats(generator, *shape, scale=0.01 if size > 8 else 1.0), 10.0 ** -(1 + size % 5)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[1:], eps=eps)


def launch_rms_norm(x: Tensor, eps: float) -> Launch:
    y = empty(*x.shape, like=x)
    return Launch(y, (len(x),), (x, y, x.shape[1], eps), {"BLOCK": 8}, most_numbers=8)


RMS_NORM = puzzle(
    rms_norm,
    _draw_rows,
    solutions.rms_norm,
    launch_rms_norm,
    {
        "each tile starts the sum anew; add to it": ("squares += ", "squares = "),
        "the sum of squares is divided by BLOCK, not by the N elements of the row": (
            "squares / N",
            "squares / BLOCK",
        ),
        "eps is missing": (" + eps", ""),
        "eps is written as a number, where the argument belongs": ("+ eps", "+ 1e-5"),
        "eps is divided by N, too": ("squares / N + eps", "(squares + eps) / N"),
        "the sum of squares is not divided by N": ("squares / N", "squares"),
        "only the first tile of each row is squared and added": (
            "squares = 0.0\n    for start in range(0, N, BLOCK):",
            "squares = 0.0\n    for start in range(0, 1):",
        ),
        "each tile is divided by the sum so far; y needs that of the whole row, so a second loop": (
            "    scale = 1 / tl.sqrt(squares / N + eps)\n"
            "    for start in range(0, N, BLOCK):\n"
            "        columns = start + tl.arange(0, BLOCK)\n"
            "        x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)\n",
            "        scale = 1 / tl.sqrt(squares / N + eps)\n",
        ),
        "lanes that are masked off are added, too; `other` says what they hold": (
            "other=0.0)\n        squares",
            ")\n        squares",
        ),
        "the store has no mask": ("x * scale, mask=columns < N", "x * scale"),
        "eps is added outside of the root": (
            "tl.sqrt(squares / N + eps)",
            "(tl.sqrt(squares / N) + eps)",
        ),
        "it is divided by the mean square, without the root": (
            "tl.sqrt(squares / N + eps)",
            "(squares / N + eps)",
        ),
        "only the first tile of each row is stored": (
            "x * scale, mask=columns < N",
            "x * scale, mask=(columns < N) & (columns < BLOCK)",
        ),
    },
    "core",
)


def check_rms_norm(kernel: Any) -> None:
    """Puzzle 6."""
    check_kernel(RMS_NORM, kernel, launch_rms_norm, torch.arange(60.0).view(3, 20), 1e-5)


def _draw_matrices(generator: random.Random, size: int) -> tuple:
    M, N, K = generator.randint(1, 16), generator.randint(1, 16), length(generator, size, 16)
    # wider than it is deep, now and then: then other strides are out of bounds
    M, N = M + (M == K), N + (N == K) if size % 2 else K + 1
    # one grid that is tall
    M += 32 if size > 12 else 0
    return floats(generator, M, K), floats(generator, K, N)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def launch_matmul(a: Tensor, b: Tensor) -> Launch:
    (M, K), N = a.shape, b.shape[1]
    c = empty(M, N, like=a)
    sizes = {"ROWS": 16, "COLUMNS": 16, "DEPTH": 16}
    return Launch(c, (ceil(M, 16), ceil(N, 16)), (a, b, c, M, N, K), sizes)


MATMUL = puzzle(
    matmul,
    _draw_matrices,
    solutions.matmul,
    launch_matmul,
    {
        "each step overwrites the total; add to it": ("tl.dot(a, b, total", "tl.dot(a, b, None"),
        "what tl.dot returns is dropped; write total = tl.dot(a, b, total, ...)": (
            "total = tl.dot(a",
            "tl.dot(a",
        ),
        "the total is added twice: tl.dot adds to it already, so = and not +=": (
            "total = tl.dot",
            "total += tl.dot",
        ),
        "the stride of b is wrong: a row of b has N elements": ("k[:, None] * N", "k[:, None] * K"),
        "the stride of a is wrong: a row of a has K elements": (
            "rows[:, None] * K",
            "rows[:, None] * M",
        ),
        "the stride of a is wrong: a row of a has K elements, not N": (
            "rows[:, None] * K",
            "rows[:, None] * N",
        ),
        "the stride of c is wrong: a row of c has N elements": (
            "c_ptr + rows[:, None] * N",
            "c_ptr + rows[:, None] * M",
        ),
        "the two axes of the grid are mixed up": (
            "tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n    columns = tl.program_id(1)",
            "tl.program_id(1) * ROWS + tl.arange(0, ROWS)\n    columns = tl.program_id(0)",
        ),
        "each step takes the first DEPTH elements: k begins at start": (
            "start + tl.arange(0, DEPTH)",
            "tl.arange(0, DEPTH)",
        ),
        "tl.dot rounds a and b to TF32: give it input_precision": (
            ', input_precision="ieee"',
            "",
        ),
        "`other=0.0` is missing: lanes that are off hold anything, and are multiplied": (
            "mask=a_mask, other=0.0",
            "mask=a_mask",
        ),
        "beyond K, the lanes of b hold anything: mask k as well": (
            "(k < K)[:, None] & (columns",
            "(k >= 0)[:, None] & (columns",
        ),
        "beyond K, the lanes of a hold anything: mask k as well": (
            "(rows < M)[:, None] & (k < K)",
            "(rows < M)[:, None] & (k >= 0)",
        ),
        "beyond K, the lanes of a and b hold anything: mask k as well": (
            "(rows < M)[:, None] & (k < K)[None, :]\n"
            "        b_mask = (k < K)[:, None] & (columns < N)[None, :]",
            "(rows < M)[:, None] & (k >= 0)[None, :]\n"
            "        b_mask = (k >= 0)[:, None] & (columns < N)[None, :]",
        ),
        "the store has no mask": ("total, mask=inside", "total"),
        "only the first DEPTH of the K elements are multiplied": (
            "range(0, K, DEPTH)",
            "range(0, 1)",
        ),
    },
    "core",
)


def check_matmul(kernel: Any) -> None:
    """Puzzle 7."""
    a, b = torch.arange(400.0).view(20, 20), torch.arange(500.0).view(20, 25)
    check_kernel(MATMUL, kernel, launch_matmul, a, b)


def _draw_layer(generator: random.Random, size: int) -> tuple:
    """Small at first, then larger on each axis than tiles of 32, then longer than any tile may be.

    Longer on one axis after another, so that few programs are needed.
    """
    at_least = {1: (2, 2, 2), 4: (34, 66, 98)}  # size is 1, 4, 7, 10 or 13
    long = tuple(MOST_NUMBERS + 1 if axis == size // 4 else 3 for axis in (1, 2, 3))
    M, K, N = (least + generator.randint(0, 9) for least in at_least.get(size, long))
    N += N in (M, K)
    # small numbers, since rounding adds up along K
    return floats(generator, M, K, scale=0.25), floats(generator, K, N), floats(generator, N)


def linear_relu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ w + bias)


def recorded(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, list[Run]]:
    """The result of a function that launches kernels, and what they did.

    Raises:
        ValueError: not one kernel is launched, a tile has more than MOST_NUMBERS numbers, or
            PyTorch computes what the kernel is to compute.
    """
    with watched() as runs:
        result = function(*tensors)
    if len(runs) != 1:
        raise ValueError(
            f"one kernel must be launched once, got {len(runs)} launches"
            if runs
            else "no kernel was launched"
        )
    (run,) = runs
    check_run(run, MOST_NUMBERS)
    loaded = [run.tensors[access.tensor].tensor.data_ptr() for access in run.of("load")]
    if not {x.data_ptr() for x in tensors} <= set(loaded):
        raise ValueError("the kernel must load x, w and bias as they were given")
    stored = [run.tensors[access.tensor] for access in run.of("store")]
    if isinstance(result, Tensor) and not any(memory.still_holds(result) for memory in stored):
        raise ValueError("the result must be what the kernel stored, unchanged")
    return result, runs


def launches(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` with its launches interpreted; on a GPU also compiled, whose result counts."""

    @functools.wraps(function)
    def run(*tensors: Tensor) -> Tensor:
        result, _ = recorded(function, *tensors)
        if torch.cuda.is_available():
            return function(*(x.cuda() for x in tensors)).cpu()
        return result

    return run


@functools.cache
def kilobytes(function: Callable[..., Tensor]) -> float:
    """KB that the programs load and store, for 64 × 64 matrices."""
    generator = random.Random(0)
    x, w, bias = (floats(generator, *shape) for shape in ((64, 64), (64, 64), (64,)))
    function = solutions.linear_relu if function is linear_relu else function
    result, runs = recorded(getattr(function, "__wrapped__", function), x, w, bias)
    if not torch.allclose(result, linear_relu(x, w, bias), atol=1e-4):
        raise ValueError("for 64 × 64 matrices the result is wrong")
    return sum(run.bytes_moved() for run in runs) / 1e3


def _without_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ w)


LINEAR_RELU = Exercise(
    linear_relu,
    _draw_layer,
    {
        "the bias is missing": _without_bias,
        "the ReLU is missing": lambda x, w, bias: x @ w + bias,
        "the bias is added after the ReLU": lambda x, w, bias: torch.relu(x @ w) + bias,
        "only the first 32 of the K elements are multiplied": lambda x, w, bias: torch.relu(
            x[:, :32] @ w[:32] + bias
        ),
        "the bias is added in each step of 32; add it once, after the loop": lambda x, w, bias: (
            torch.relu(x @ w + bias * ceil(len(w), 32))
        ),
    },
    "open",
    trials=5,
    seconds=20,
    measure=kilobytes,
    unit="KB",
)


def check_linear_relu(function: Callable[..., Tensor]) -> None:
    """Puzzle 8."""
    check(LINEAR_RELU, launches(function))
