"""Exercises of notebook 05: puzzles run by Triton's interpreter, the order of programs, a layer.

Results are compared with the solution's. An access out of bounds, and an element that two programs
store, are errors. Each check of a puzzle then shows which elements the programs touched.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.lessons import exercise as engine
from lib.lessons.exercise import check_of, exercise, name_of
from lib.lessons.triton import solutions_triton as solutions
from lib.lessons.triton.kernels import check_run
from lib.lessons.triton.recorder_triton import Run, watched
from lib.lessons.triton.solutions_triton import (  # noqa: F401 (found by their names)
    add_bias,
    ceil,
    copy,
    floats,
    matmul,
    rms_norm,
    row_sums,
    softmax,
    transpose,
)

# Numbers that fit one tile of the last puzzle.
MOST_NUMBERS = 1024
_take = check_of(__name__, returns=True)


def check(attempt: Any, name: str = "") -> None:
    """Check a kernel, or a function, against the exercise of its name, or of another `name`."""
    take(attempt, name)


def take(attempt: Any, name: str = "") -> Any:
    """Check a kernel, or a function; return it if it is right, or else the solution."""
    if globals().get(name or name_of(attempt)) is linear_relu:
        right = engine.check(linear_relu, launches(attempt))
        return attempt if right is not linear_relu.solve else solutions.linear_relu
    return _take(attempt, name)


# The order of programs


def draw_grid(generator: random.Random, size: int) -> tuple:
    rows, columns = generator.randint(1, 2 + size // 2), generator.randint(2, 3 + size // 2)
    return generator.randrange(rows * columns), rows, columns, generator.choice([1, 2, 3, 4])


@exercise("core", draw_grid)
def grouped(program: int, rows: int, columns: int, group: int) -> tuple[int, int]:
    programs = group * columns
    first = program // programs * group
    height = min(group, rows - first)
    inside = program % programs
    return first + inside % height, inside // height


grouped.mistakes = """
min(group, rows - first) => group
    | the last group counts as many rows as the others; it has those that are left
first + inside % height, inside // height => first + inside // columns, inside % columns
    | programs go along the rows of a group; let them go down its columns
first = program // programs * group => first = program // programs
    | groups begin one row after the other; each has `group` rows
inside // height => inside // group
    | the last group has fewer rows, and so has each of its columns: divide by its height
first + inside % height, inside // height => inside // height, first + inside % height
    | row and column are exchanged; the row comes first
first + inside % height => inside % height | every group is the first; add where it begins
"""


# 8. A fused layer


def draw_layer(generator: random.Random, size: int) -> tuple:
    """Small at first, then larger than tiles of 32, then longer than any tile may be."""
    # size is 1, 4, 7, 10 or 13
    at_least = {1: (2, 2, 2), 4: (34, 66, 98)}
    long = tuple(MOST_NUMBERS + 1 if axis == size // 4 else 3 for axis in (1, 2, 3))
    M, K, N = (least + generator.randint(0, 9) for least in at_least.get(size, long))
    N += N in (M, K)
    # small numbers, since rounding adds up along K
    return floats(generator, M, K, scale=0.25), floats(generator, K, N), floats(generator, N)


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
    function = solutions.linear_relu if function is linear_relu.solve else function
    result, runs = recorded(getattr(function, "__wrapped__", function), x, w, bias)
    if not torch.allclose(result, linear_relu.solve(x, w, bias), atol=1e-4):
        raise ValueError("for 64 × 64 matrices the result is wrong")
    return sum(run.bytes_moved() for run in runs) / 1e3


@exercise("open", draw_layer, trials=5, seconds=20, measure=kilobytes, unit="KB")
def linear_relu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ w + bias)


linear_relu.mistakes = """
w + bias => w | the bias is missing
torch.relu(x @ w + bias) => x @ w + bias | the ReLU is missing
w + bias) => w) + bias | the bias is added after the ReLU
x @ w => x[:, :32] @ w[:32] | only the first 32 of the K elements are multiplied
w + bias => w + bias * ceil(len(w), 32)
    | the bias is added in each step of 32; add it once, after the loop
"""
