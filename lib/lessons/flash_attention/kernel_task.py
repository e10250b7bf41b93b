"""A kernel as an answer: how it is launched on random inputs, watched, compared and compiled.

Kernels are run by Triton's interpreter, and compiled as well where there is a GPU. An access out of
bounds, an element that two programs store, and a tile that the causal mask hides but that is
loaded, are errors.
"""

from __future__ import annotations

import inspect
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lib.lessons.differences import Named, first_difference
from lib.lessons.exercise import Exercise, report, result_of, verdict
from lib.lessons.triton.exercises import (
    Launch,
    compile_error_lines,
    compile_launch,
    not_jitted,
)
from lib.lessons.triton.recorder_triton import Run, plain, watch


class Tiling(NamedTuple):
    """Queries and keys in a tile, as a kernel gets them."""

    BQ: int
    BK: int


class Case(NamedTuple):
    """The inputs that a trial of a kernel draws."""

    heads: int
    lengths: tuple[int, int]
    """The least and the largest n."""

    head_dim: int
    tiling: Tiling
    is_large: bool = False
    """Whether exponentials of scores overflow; for a scale that is exact, so a head_dim of 64."""


# No size passes for another, and none can be written into a kernel: head_dim has two values (and so
# has the scale), and tiles of queries are larger than those of keys, and smaller. With 33 tokens,
# one is left in a tile of its own. Scores are large with keys beyond the last, and without.
CASES = (
    Case(1, (2, 15), 64, Tiling(32, 16)),
    Case(2, (33, 33), 32, Tiling(16, 32)),
    Case(2, (33, 33), 64, Tiling(32, 16)),
    Case(2, (48, 48), 64, Tiling(32, 16), is_large=True),
    Case(2, (34, 40), 64, Tiling(16, 32), is_large=True),
)


# The tensor whose tiles pass by -> all tensors that pass by with it.
PASSING = {"k": ("k", "v"), "q": ("q", "grad_out")}


@dataclass(frozen=True)
class KernelTask:
    """How a kernel is launched and run: the harness of its exercise."""

    passing: str
    """The tensor whose tiles pass by in its loop."""

    results: dict[str, int]
    """The tensors that it stores, which come last among its tensors, and their dimensions."""

    is_causal: bool = True

    factor: float = 1.0
    """At a head_dim below 64 the scale is this many times the usual one: none can ignore it."""

    def plan(self, tiling: Tiling, *tensors: Tensor) -> tuple[Launch, list[Tensor]]:
        """The launch on `tensors`, (heads, n, D) or (heads, n), and the results, full of NaN."""
        heads, n, head_dim = tensors[0].shape
        stored = [
            tensors[0].new_full(
                (heads, n, head_dim)[:ndim],
                math.nan,
                dtype=tensors[0].dtype if ndim == 3 else torch.float32,
            )
            for ndim in self.results.values()
        ]
        tile = tiling.BQ if self.passing == "k" else tiling.BK
        arguments = (*tensors, *stored, n, self.scale(head_dim))
        sizes = {"D": head_dim, **tiling._asdict()}
        return Launch(stored[0], (-(-n // tile), heads), arguments, sizes), stored

    def scale(self, head_dim: int) -> float:
        """The argument `scale`; the usual one at 64, for which large scores are drawn."""
        return (self.factor if head_dim < 64 else 1.0) * head_dim**-0.5

    def tiles_seen(self, tile: int, n: int, tiling: Tiling) -> int:
        """How many tiles that pass by have a visible pair with the `tile`-th one that is kept."""
        if not self.is_causal:
            return -(-n // tiling.BK)
        if self.passing == "k":
            last = min((tile + 1) * tiling.BQ, n) - 1
            return sum(key <= last for key in range(0, n, tiling.BK))
        first = tile * tiling.BK
        return sum(min(query + tiling.BQ, n) > first for query in range(0, n, tiling.BQ))

    def refuse_more_tiles(self, run: Run, n: int, tiling: Tiling) -> None:
        """ValueError if a program loads more tiles than have a visible pair, or one twice."""
        heads = run.grid[1]
        for name in PASSING[self.passing]:
            loaded = Counter(access.program for access in run.of("load", name))
            for program, count in sorted(loaded.items()):
                seen = self.tiles_seen(program // heads, n, tiling)
                if count > seen:
                    have = "has" if seen == 1 else "have"
                    words = f"; only {seen} {have} a pair that is visible, to be loaded once"
                    if not self.is_causal:
                        words = f", and the head has {seen}: load each once, in a single loop"
                    program_and_head = divmod(program, heads)
                    raise ValueError(
                        f"program {program_and_head} loads {count} tiles of {name}{words}"
                    )

    def __call__(self, kernel: Any, *given: Any) -> Named:
        """The results by name; `given` ends with a Tiling.

        Raises:
            ValueError: nothing is stored in one of the results, or a tile that the mask hides is
                loaded.
        """
        *tensors, tiling = given
        launch, stored = self.plan(tiling, *tensors)
        # a check wraps it
        kernel = inspect.unwrap(kernel)
        run = watch(kernel, launch.grid, *launch.arguments, strict=True, **launch.options)
        for name in self.results:
            if not run.of("store", name):
                raise ValueError(f"nothing is stored in {name}")
        self.refuse_more_tiles(run, tensors[0].shape[1], tiling)
        return Named(zip(self.results, stored))

    def compiled(self, kernel: Any, *given: Any) -> Named:
        """The results of the compiled kernel, on a GPU."""
        *tensors, tiling = given
        launch, stored = self.plan(tiling, *(x.cuda() for x in tensors))
        kernel[launch.grid](*launch.arguments, **launch.options)
        return Named(zip(self.results, stored))


def show_sizes(q: Tensor, *others: Any) -> str:
    """The sizes of a trial."""
    (heads, n, head_dim), tiling = q.shape, others[-1]
    words = f"heads={heads}, n={n}, D={head_dim}"
    return f"{words}, BQ={tiling.BQ}, BK={tiling.BK}" if isinstance(tiling, Tiling) else words


# What the exercises have in common.
KERNEL = {"trials": len(CASES), "seconds": 20, "show": show_sizes}


def check_kernel(exercise: Exercise, kernel: Any) -> Any:
    """Print the verdict on `kernel`; return it if it is right, else the solution.

    What the interpreter runs need not compile: to be right, a kernel must also compile for an A100,
    with q, k, v and gradients in 16 bits, and be right on a GPU if one is there.
    """
    import triton

    task: Any = exercise.harness
    solution = triton.jit(exercise.solve)
    if not_jitted(kernel, exercise.tier):
        return solution
    # the function itself, so that an error names its line
    text = verdict(exercise, plain(kernel))
    if result_of(text) == "passed":
        *given, tiling = inputs = exercise.draw(random.Random(0), 1)
        launch, _ = task.plan(tiling, *(x.bfloat16() if x.ndim == 3 else x for x in given))
        text = with_compilation(text, kernel, launch)
        if torch.cuda.is_available() and result_of(text) == "passed":
            found, expected = task.compiled(kernel, *inputs), task(exercise.solve, *inputs)
            if words := first_difference(found, expected):
                text = f"not yet: right in the interpreter, but not on this GPU\n  {words}"
    if result_of(text) == "failed":
        cures = [cure for sign, cure in CURES.items() if sign in text]
        text = "\n  ".join([text, *cures, *([ROUNDS] if rounds_float32(kernel) else [])])
    report(text, plain(kernel).__name__, exercise.tier)
    return kernel if result_of(text) == "passed" else solution


TILES_ARE_TRITONS = "tiles are Triton's: `tl.exp`, `tl.log`, `tl.where`, not PyTorch's or Python's"
WHERE = "a tile is not changed in place: `tl.where(condition, a, b)` makes a new one"
# An error of Triton's interpreter or compiler -> the cure.
CURES = {
    "does not support item assignment": WHERE,
    "no attribute 'masked_fill'": WHERE,
    "must be Tensor, not tensor": TILES_ARE_TRITONS,
    "got (tensor": TILES_ARE_TRITONS,
    "can only convert an array of size 1": TILES_ARE_TRITONS,
    "incompatible dimensions": "two shapes do not go together: `x[:, None]` goes with its rows,"
    " `x[None, :]` with its columns; pointers, mask and values have one shape",
    "equal reduction dimensions": "the columns of a are the rows of b in `tl.dot(a, b)`: "
    "`tl.trans` turns a tile on its side",
    "is not string": "take out the `print`",
    "Loop-carried variable": "start with a tile of its shape, in `tl.float32`: "
    "`tl.full((BQ,), …)` or `tl.zeros(…)`",
    "unsupported AST node type: Break": "Triton has no `break`: put the end into `range(…)`",
    "unsupported AST node type: Continue": "Triton has no `continue`: put the end into `range(…)`",
    "Both operands must be same dtype": "cast the factor in float32 to the type of the "
    "other: `p.to(v.dtype)`, and dS likewise",
}


def with_compilation(text: str, kernel: Any, launch: Launch) -> str:
    """The verdict `text` with registers, or "not yet" and the reason if it does not compile."""
    try:
        made = compile_launch(kernel, launch)
    except Exception as error:
        line = "not yet: right in the interpreter, but for bfloat16 it does not compile"
        return "\n  ".join([line, *compile_error_lines(error)])
    return f"{text}\n  compiled for an A100, bfloat16: {made.registers} registers of each thread"


ROUNDS = 'on a GPU, and here too, `tl.dot` rounds float32 unless it has input_precision="ieee"'


def rounds_float32(kernel: Any) -> bool:
    """Whether a kernel's source has a `tl.dot` without a precision."""
    source = inspect.getsource(plain(kernel))
    return source.count("tl.dot(") > source.count("input_precision")


def draw_heads(generator: random.Random, size: int) -> tuple[Any, ...]:
    """q, k, v and a Tiling: one head that fits a tile of keys, then two of several tiles."""
    case = CASES[size * len(CASES) // 16]
    n = generator.randint(*case.lengths)
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    q, k, v = torch.randn((3, case.heads, n, case.head_dim), generator=seeded)
    if case.is_large:
        # scores whose exponentials overflow float32, and rows of them that all underflow to 0;
        # of quarters, so that scores are exact, as their rounding would show in exponentials
        q, k = 40 * (4 * q).round() / 4, (4 * k).round() / 4
        k[..., 0] = k[..., 0].abs().clamp(max=1) + 1
        rows = generator.sample(range(n), 2)
        q[:, rows] = 0
        # only relative to the largest score of its tile does the second row's underflow, too
        q[:, rows, 0] = torch.tensor([-1000.0, -400.0])
    return q, k, v, case.tiling


def attention_and_lse(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """By PyTorch, all scores at once."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def draw_for_backward(generator: random.Random, size: int) -> tuple[Any, ...]:
    """q, k, v, dO, lse and delta, as the backward kernels get them, and a Tiling."""
    q, k, v, tiling = draw_heads(generator, size)
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    # so large that weights are 0 and 1, gradients would be 0
    q = q.clamp(-3, 3)
    grad_out = torch.randn(q.shape, generator=seeded)
    out, lse = attention_and_lse(q, k, v, is_causal=True)
    return q, k, v, grad_out, lse, (grad_out * out).sum(-1), tiling
