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
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.lessons import exercise as engine
from lib.lessons.differences import shown
from lib.lessons.exercise import Exercise, edited, exercise, name_of, report, result_of, verdict
from lib.lessons.inputs import Draw
from lib.lessons.triton import solutions_triton as solutions
from lib.lessons.triton.compile_triton import Compiled, compile_for
from lib.lessons.triton.figures import show_run
from lib.lessons.triton.recorder_triton import Run, plain, watch, watched

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


@dataclass
class Puzzle(Exercise):
    """A task for a kernel; its solution is PyTorch's, its mistakes are edits of a right kernel."""

    plan: Callable[..., Launch] = field(kw_only=True)
    example: tuple = field(kw_only=True)
    """The inputs for which the programs of an attempt are drawn."""

    def wrong_functions(self) -> dict[str, Callable]:
        """The mistake as a sentence -> a function of tensors that launches a kernel with it."""
        kernel = getattr(solutions, self.solve.__name__)

        def made(edits: tuple[str, ...]) -> Callable:
            # edited when it is needed
            @functools.wraps(kernel)
            def run(*tensors: Tensor) -> Tensor:
                return runner(edited(kernel, *edits), self.plan)(*tensors)

            return run

        return {
            sentence: mistake if callable(mistake) else made(mistake)
            for sentence, mistake in self.mistake_table().items()
        }


def puzzle(tier: Any, draw: Draw, plan: Callable[..., Launch], *example: Any) -> Callable:
    """Make a puzzle of PyTorch's way below; its `mistakes` are edits of the kernel of its name."""

    def made(solve: Callable[..., Tensor]) -> Puzzle:
        def show(*given: Any) -> str:
            pairs = zip(inspect.signature(solve).parameters, given)
            return ", ".join(f"{name} = {shown(value)}" for name, value in pairs)

        how: dict = {"trials": 5, "seconds": 20, "show": show, "plan": plan, "example": example}
        return Puzzle(solve, draw, "", tier, **how)

    return made


def runner(kernel: Any, plan: Callable[..., Launch]) -> Callable[..., Tensor]:
    """A function of tensors that launches `kernel` as `plan` says, and returns the output."""

    # an error names its line in the kernel
    @functools.wraps(plain(kernel))
    def run(*tensors: Tensor) -> Tensor:
        launch = plan(*tensors)
        run = watch(kernel, launch.grid, *launch.arguments, strict=True, **launch.options)
        check_run(run, launch.most_numbers)
        stored, size = run.bytes_moved("store"), launch.output.nbytes
        if stored > size:
            raise ValueError(
                f"programs store {stored:,} bytes of an output of {size:,}; store each element "
                "once, after the loop that it needs"
            )
        if launch.by_hand in run.called:
            raise ValueError(f"tl.{launch.by_hand} does all of it; write it out")
        if torch.cuda.is_available() and hasattr(kernel, "fn"):
            launch = plan(*(x.cuda() if isinstance(x, Tensor) else x for x in tensors))
            kernel[launch.grid](*launch.arguments, **launch.options)
        return launch.output.cpu()

    return run


def check_run(run: Run, most_numbers: int | None = None) -> None:
    """Refuse programs that store nothing, tiles that are too large, and matmuls that are too thin.

    Raises:
        ValueError: no program runs or none stores anything, a tile has more than `most_numbers`
            numbers, or a `tl.dot` adds up fewer than 16 products, which does not compile.
    """
    if not run.num_programs:
        raise ValueError(f"no program ran: the grid is {run.grid}; round up, with triton.cdiv")
    if not run.of("store"):
        raise ValueError("no program stores anything: tl.store is missing")
    if run.least_depth < 16:
        raise ValueError(
            f"compiled, tl.dot has to add up at least 16 products, got {run.least_depth}: a tile "
            "must be at least 16 deep"
        )
    if most_numbers and run.largest_tile > most_numbers:
        raise ValueError(
            f"a tile must have at most {most_numbers:,} numbers, got {run.largest_tile:,}"
        )


def check(attempt: Any, name: str = "") -> None:
    """Check a kernel, or a function, against the exercise of its name, or of another `name`."""
    take(attempt, name)


def take(attempt: Any, name: str = "") -> Any:
    """Check a kernel, or a function; return it if it is right, or else the solution."""
    name = name or name_of(attempt)
    asked = globals().get(name)
    if isinstance(asked, Puzzle):
        return _check_kernel(asked, attempt)
    if asked is linear_relu:
        right = engine.check(asked, launches(attempt))
        return attempt if right is not asked.solve else solutions.linear_relu
    if isinstance(asked, Exercise):
        return engine.check(asked, attempt)
    known = ", ".join(key for key, value in globals().items() if isinstance(value, Exercise))
    return report(f"not yet: no exercise is called {name}, but {known}", name, "")


def _check_kernel(puzzle: Puzzle, kernel: Any) -> Any:
    """Print the verdict on `kernel`, and show what its programs touch, given the example.

    What the interpreter runs need not compile: a tile of 10 elements does not, nor does an `if` on
    a tile.
    """
    import triton

    name, solution = name_of(kernel), triton.jit(getattr(solutions, puzzle.solve.__name__))
    if not_jitted(kernel, puzzle.tier):
        return solution
    text = verdict(puzzle, runner(kernel, puzzle.plan))
    report(text, name, puzzle.tier)
    launch = puzzle.plan(*puzzle.example)
    if result_of(text) == "passed":
        print(compiled_words(kernel, launch))
    try:
        run = watch(kernel, launch.grid, *launch.arguments, **launch.options)
    except Exception:
        # not attempted, or an error that the verdict names
        return solution
    shape = " × ".join(map(str, puzzle.example[0].shape))
    show_run(run, title=f"An example: what each program of {name} touches in an input of {shape}")
    return kernel if result_of(text) == "passed" else solution


def not_jitted(kernel: Any, tier: str) -> bool:
    """Whether `kernel` is a plain function, which nothing can launch; if so, report that."""
    if hasattr(kernel, "fn"):
        return False
    name = name_of(kernel)
    report(f"not yet: `{name}` can't be launched; put `@triton.jit` above it", name, tier)
    return True


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
    return Launch(y, (ceil(len(x), 4),), (x, y, len(x)), {"BLOCK": 4})


@puzzle("warm-up", draw_vector, launch_copy, counted(10))
def copy(x: Tensor) -> Tensor:
    return x.clone()


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
    return Launch(y, grid, (x, bias, y, M, N), {"ROWS": 4, "COLUMNS": 8})


@puzzle("warm-up", draw_bias, launch_add_bias, counted(6, 10), counted(10))
def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


add_bias.mistakes = """
rows[:, None] * N => rows[:, None] * M
    | the stride is wrong: from a row to the next it is N elements, not M
(rows < M)[:, None] => (rows >= 0)[:, None]
    | rows are not masked: their mask is missing, or joined by `and` where `&` belongs
& (columns < N)[None, :] => & (columns >= 0)[None, :]
    | columns are not masked, so that a tile reaches into the next row
(rows < M)[:, None] & (columns < N)[None, :] => offsets < M * N
    | the mask only knows where the matrix ends: mask rows and columns, each by its own
columns, mask=columns < N) => columns) | the load of the bias has no mask
tl.program_id(0) * ROWS => tl.program_id(1) * ROWS
    && tl.program_id(1) * COLUMNS => tl.program_id(0) * COLUMNS
    | the two axes of the grid are mixed up
"""


# 3. A transposed store


def draw_tall(generator: random.Random, size: int) -> tuple:
    # the grid has more rows than columns
    return (floats(generator, 4 + length(generator, size, 4), length(generator, size, 4)),)


def launch_transpose(x: Tensor) -> Launch:
    (M, N), y = x.shape, empty(x.shape[1], x.shape[0], like=x)
    return Launch(y, (ceil(M, 4), ceil(N, 4)), (x, y, M, N), {"BLOCK": 4})


@puzzle("core", draw_tall, launch_transpose, counted(10, 6))
def transpose(x: Tensor) -> Tensor:
    return x.T.contiguous()


transpose.mistakes = """
columns[None, :] * M => columns[None, :] * N
    | the stride of y is wrong: a row of y has M elements
columns[None, :] * M + rows[:, None] => rows[:, None] * N + columns[None, :]
    | the elements are stored where they were, not transposed
columns[None, :] * M + rows[:, None] => columns[:, None] * M + rows[None, :]
    | the offsets in y are those of a tile that was turned around, but x was not; give them the
    shape of x
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
    return Launch(sums, (len(x),), (x, sums, x.shape[1]), {"BLOCK": 32})


@puzzle("warm-up", draw_matrix, launch_row_sums, counted(5, 12))
def row_sums(x: Tensor) -> Tensor:
    return x.sum(1)


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
    return Launch(y, (len(x),), (x, y, x.shape[1]), {"BLOCK": 32}, by_hand="softmax")


@puzzle("core", draw_logits, launch_softmax, counted(5, 12))
def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


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
    return Launch(y, (len(x),), (x, y, x.shape[1], eps), {"BLOCK": 8}, most_numbers=8)


@puzzle("core", draw_rows, launch_rms_norm, counted(3, 20), 1e-5)
def rms_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[1:], eps=eps)


rms_norm.mistakes = """
range(0, N, BLOCK):  # for the sum => range(0, BLOCK, BLOCK):
    | the sum has one tile only: loop over the row
range(0, N, BLOCK):  # once more => range(start, N, BLOCK):
    | only the last tile is divided: after the sum, loop over the row once more
other=0.0)  # adds nothing => )
    | `other=0.0` is missing: lanes that are off hold anything, and are added up
squares += => squares = | each tile starts the sum anew; add to it
squares / N => squares / BLOCK
    | the sum of squares is divided by BLOCK, not by the N elements of the row
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
    return Launch(c, (ceil(M, 16), ceil(N, 16)), (a, b, c, M, N, K), sizes)


@puzzle("core", draw_matrices, launch_matmul, counted(20, 20), counted(20, 25))
def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


matmul.mistakes = """
tl.dot(a, b, total => tl.dot(a, b, None | each step overwrites the total; add to it
total = tl.dot(a => tl.dot(a
    | what tl.dot returns is dropped; write total = tl.dot(a, b, total, ...)
total = tl.dot => total += tl.dot
    | the total is added twice: tl.dot adds to it already, so = and not +=
start + tl.arange(0, DEPTH) => tl.arange(0, DEPTH)
    | each step takes the first DEPTH elements: k begins at start
, input_precision="ieee" => | tl.dot rounds a and b to TF32: give it input_precision
mask=a_mask, other=0.0 => mask=a_mask
    | `other=0.0` is missing: lanes that are off hold anything, and are multiplied
"""


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
group * columns => group * rows | a group has as many columns as the matrix has; you take its rows
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
