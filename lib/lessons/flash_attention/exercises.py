"""Exercises of notebook 06: online softmax, the kernels, fragments, delta, and a schedule.

Kernels are run by Triton's interpreter, and compiled as well where there is a GPU. Their results
are compared with PyTorch's. An access out of bounds, an element that two programs store, and a tile
that the causal mask hides but that is loaded, are errors.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import Tensor

from lib.lessons.exercise import (
    Exercise,
    Raised,
    check,
    difference,
    edited,
    report,
    result_of,
    verdict,
)
from lib.lessons.flash_attention import solutions_triton as solutions
from lib.lessons.flash_attention.schedule import TILES, busy_share, draw_spans, run_order
from lib.lessons.triton.exercises import Launch, check_run, compile_error_lines, compile_launch
from lib.lessons.triton.recorder_triton import Run, watch, watched


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


def _draw_tensor(generator: random.Random, *shape: int) -> Tensor:
    # halves, which print short and exactly
    values = [generator.randint(-6, 6) / 2 for _ in range(math.prod(shape))]
    return torch.tensor(values).reshape(shape)


class Tiles(Iterator[Tensor]):
    """Tensors that can be gone through once: asking for the next one overwrites the last."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.given = tensors, 0

    def __next__(self) -> Tensor:
        if self.given:
            self.tensors[self.given - 1].fill_(math.nan)
        if self.given == len(self.tensors):
            raise StopIteration
        self.given += 1
        return self.tensors[self.given - 1]

    def __repr__(self) -> str:
        return f"iter({self.tensors})"


def _draw_score_tiles(generator: random.Random, size: int) -> tuple:
    num_tiles = generator.randint(1, 2 + size // 4)
    tiles = [_draw_tensor(generator, generator.randint(1, 3)) for _ in range(num_tiles)]
    # some so large that their exponentials overflow float32, some all below 0
    factor, shift = generator.choice([1, 1, 1, 40]), generator.choice([0, 0, -4])
    return (Tiles([factor * tile + shift for tile in tiles]),)


def max_and_sum(tiles: Iterator[Tensor]) -> Tensor:
    m, total = torch.tensor(-math.inf), torch.tensor(0.0)
    for scores in tiles:
        new_max = torch.maximum(m, scores.max())
        total = total * torch.exp(m - new_max) + torch.exp(scores - new_max).sum()
        m = new_max
    return torch.stack([m, total])


def _in_two_passes(tiles: Iterator[Tensor]) -> Tensor:
    m = torch.stack([scores.max() for scores in tiles]).max()
    return torch.stack([m, sum((torch.exp(scores - m).sum() for scores in tiles), 0 * m)])


def _keeping_all(tiles: Iterator[Tensor]) -> Tensor:
    scores = torch.cat(list(tiles))
    return torch.stack([scores.max(), torch.exp(scores - scores.max()).sum()])


ONLINE_SOFTMAX = Exercise(
    max_and_sum,
    _draw_score_tiles,
    {
        "the sum so far is not rescaled when the maximum grows; its terms were relative to the old "
        "maximum (if you do rescale it: the maximum before this tile must still be known there)": (
            "total * torch.exp(m - new_max)",
            "total",
        ),
        "the sum so far is rescaled the wrong way round; the factor is exp(old maximum - new "
        "maximum), at most 1": ("m - new_max", "new_max - m"),
        "each tile's exponentials are relative to the tile's own maximum; use the maximum so far, "
        "over all tiles": ("scores - new_max", "scores - scores.max()"),
        "the maximum is the last tile's; keep the larger of it and the one so far": (
            "torch.maximum(m, scores.max())",
            "scores.max()",
        ),
        "the new tile's exponentials are rescaled too; only the sum so far is out of date": (
            "total * torch.exp(m - new_max) + torch.exp(scores - new_max).sum()",
            "(total + torch.exp(scores - new_max).sum()) * torch.exp(m - new_max)",
        ),
        "no maximum is subtracted inside exp, so large scores overflow": (
            "total * torch.exp(m - new_max) + torch.exp(scores - new_max)",
            "total + torch.exp(scores)",
        ),
        "no maximum is subtracted inside exp, only at the end, when exponentials have overflowed": (
            "total * torch.exp(m - new_max) + torch.exp(scores - new_max).sum()\n"
            "        m = new_max\n"
            "    return torch.stack([m, total])",
            "total + torch.exp(scores).sum()\n"
            "        m = new_max\n"
            "    return torch.stack([m, total * torch.exp(-m)])",
        ),
        "no maximum is subtracted inside exp, but the sum is rescaled": (
            "scores - new_max",
            "scores",
        ),
        "the maximum starts at 0, too large if all scores are below 0": ("-math.inf", "0.0"),
        "only the last tile's exponentials are in the sum": (
            "total * torch.exp(m - new_max) +",
            "",
        ),
        "the logarithm of the sum is returned, not the sum": (", total]", ", total.log()]"),
        "the sum comes before the maximum; return the maximum first": ("[m, total]", "[total, m]"),
        "the scores themselves are added up; add up exp(score - maximum)": (
            "total * torch.exp(m - new_max) + torch.exp(scores - new_max)",
            "total + scores",
        ),
        "the tiles are gone through twice, and the second time there are none left; take the "
        "maximum and the sum in one loop": _in_two_passes,
        "the tiles are kept, but each is overwritten when the next one comes; keep two numbers": (
            _keeping_all
        ),
    },
)


@dataclass(frozen=True)
class KernelTask:
    """A kernel to write, and how it is launched and checked."""

    solution: Callable
    """The solution, a function that `triton.jit` can be applied to."""

    results: tuple[str, ...]
    """Names of the tensors that it stores, which come last among its tensors."""

    passing: str
    """The tensor whose tiles pass by in its loop."""

    is_causal: bool = True

    def plan(self, tiling: Tiling, *tensors: Tensor) -> tuple[Launch, list[Tensor]]:
        """The launch on `tensors`, (heads, n, D) or (heads, n), and the results, full of NaN."""
        heads, n, head_dim = tensors[0].shape
        shapes = [(heads, n, head_dim)[: 2 if name == "lse" else 3] for name in self.results]
        types = [torch.float32 if name == "lse" else tensors[0].dtype for name in self.results]
        stored = [
            tensors[0].new_full(shape, math.nan, dtype=dtype) for shape, dtype in zip(shapes, types)
        ]
        tile = tiling.BQ if self.passing == "k" else tiling.BK
        arguments = (*tensors, *stored, n, head_dim**-0.5)
        sizes = {"D": head_dim, **tiling._asdict()}
        return Launch(stored[0], (-(-n // tile), heads), arguments, sizes), stored

    def tiles_seen(self, tile: int, n: int, tiling: Tiling) -> int:
        """How many tiles that pass by have a visible pair with the `tile`-th one that is kept."""
        if self.passing == "k":
            last = min((tile + 1) * tiling.BQ, n) - 1
            return sum(key <= last for key in range(0, n, tiling.BK))
        first = tile * tiling.BK
        return sum(min(query + tiling.BQ, n) > first for query in range(0, n, tiling.BQ))

    def refuse_hidden_tiles(self, run: Run, n: int, tiling: Tiling) -> None:
        """ValueError if a program loads more tiles than have a visible pair."""
        if not self.is_causal:
            return
        heads, name = run.grid[1], self.passing
        loaded = Counter(access.program for access in run.of("load", name))
        for program, count in sorted(loaded.items()):
            seen = self.tiles_seen(program // heads, n, tiling)
            if count > seen:
                raise ValueError(
                    f"program {divmod(program, heads)} loads {count} tiles of {name}; only {seen} "
                    f"{'has' if seen == 1 else 'have'} a pair that is visible"
                )

    def run(self, kernel: Any, *given: Any) -> Tensor:
        """The results side by side, (heads, n, all their columns); `given` ends with a Tiling.

        Raises:
            ValueError: nothing is stored in one of the results, or a tile that the mask hides is
                loaded.
        """
        *tensors, tiling = given
        launch, stored = self.plan(tiling, *tensors)
        run = watch(kernel, launch.grid, *launch.arguments, strict=True, **launch.options)
        for name in self.results:
            if not run.of("store", name):
                raise ValueError(f"nothing is stored in {name}")
        self.refuse_hidden_tiles(run, tensors[0].shape[1], tiling)
        if torch.cuda.is_available() and hasattr(kernel, "fn"):
            launch, stored = self.plan(tiling, *(x.cuda() for x in tensors))
            kernel[launch.grid](*launch.arguments, **launch.options)
        return side_by_side(*stored)

    def describe(self, yours: Any, expected: Tensor) -> str:
        """The first wrong value, by the name of its tensor, head and row."""
        if isinstance(yours, Raised) or getattr(yours, "shape", None) != expected.shape:
            return difference(yours, expected)
        start, (heads, n, width) = 0, expected.shape
        num_lse = self.results.count("lse")
        for name in self.results:
            columns = 1 if name == "lse" else (width - num_lse) // (len(self.results) - num_lse)
            part = slice(start, start + columns)
            start += columns
            if words := difference(yours[..., part], expected[..., part]):
                return f"{name}, ({heads} heads, {n} rows, {columns}): {words}"
        return difference(yours, expected)


def show_case(q: Tensor, *others: Any) -> str:
    """The sizes of a trial."""
    (heads, n, head_dim), tiling = q.shape, others[-1]
    return f"heads={heads}, n={n}, D={head_dim}, BQ={tiling.BQ}, BK={tiling.BK}"


def side_by_side(*tensors: Tensor) -> Tensor:
    """(heads, n, …) and (heads, n) joined along the last dimension."""
    return torch.cat([x if x.ndim == 3 else x[..., None] for x in tensors], -1).cpu()


def kernel_exercise(
    solve: Callable[..., Tensor],
    task: KernelTask,
    draw: Callable[[random.Random, int], tuple],
    mistakes: Mapping[str, tuple[str, ...]],
) -> Exercise:
    """An exercise whose answer is a kernel; `mistakes` are edits of its solution's source."""

    def made(sentence: str, edit: tuple[str, ...]) -> Callable:
        def run(*given: Any) -> Tensor:
            return task.run(edited(task.solution, *edit), *given)

        run.__name__ = task.solution.__name__
        return run

    wrong = {sentence: made(sentence, edit) for sentence, edit in mistakes.items()}
    return Exercise(
        solve,
        draw,
        wrong,
        "core",
        trials=len(CASES),
        seconds=20,
        describe=task.describe,
        show=show_case,
    )


def check_kernel(exercise: Exercise, task: KernelTask, kernel: Any) -> Any:
    """Print the verdict on `kernel`; return it if it is right, else the solution's.

    What the interpreter runs need not compile: to be right, a kernel must also compile for an A100,
    with q, k, v and gradients in 16 bits.
    """
    import triton

    # an error names its line in the kernel
    @functools.wraps(kernel.fn)
    def attempt(*given: Any) -> Tensor:
        return task.run(kernel, *given)

    text = verdict(exercise, attempt)
    if result_of(text) == "passed":
        *given, tiling = exercise.draw(random.Random(0), 1)
        launch, _ = task.plan(tiling, *(x.bfloat16() if x.ndim == 3 else x for x in given))
        text = with_compilation(text, kernel, launch)
    if result_of(text) == "failed":
        cures = [cure for sign, cure in CURES.items() if sign in text]
        text = "\n  ".join([text, *cures, *([ROUNDS] if rounds_float32(kernel) else [])])
    report(text, kernel.__name__, exercise.tier)
    return kernel if result_of(text) == "passed" else triton.jit(task.solution)


TILES_ARE_TRITONS = "tiles are Triton's: `tl.exp`, `tl.log`, `tl.where`, not PyTorch's or Python's"
WHERE = "a tile is not changed in place: `tl.where(condition, a, b)` makes a new one"
# An error of Triton's interpreter or compiler -> the cure.
CURES = {
    "does not support item assignment": WHERE,
    "no attribute 'masked_fill'": WHERE,
    "must be Tensor, not tensor": TILES_ARE_TRITONS,
    "got (tensor": TILES_ARE_TRITONS,
    "can only convert an array of size 1": TILES_ARE_TRITONS,
    "incompatible dimensions": "numbers of rows meet a tile: `x[:, None]` makes a column of them",
    "equal reduction dimensions": "the columns of a are the rows of b in `tl.dot(a, b)`: "
    "`tl.trans` turns a tile on its side",
    "is not string": "take out the `print`",
    "Loop-carried variable": "start with a tile: `tl.full((BQ,), …)` or `tl.zeros((BQ,), …)`",
    "unsupported AST node type: Break": "Triton has no `break`: put the end into `range(…)`",
    "unsupported AST node type: Continue": "Triton has no `continue`: put the end into `range(…)`",
    "Both operands must be same dtype": "cast the factor in float32, as in `p.to(v.dtype)`",
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
    source = inspect.getsource(kernel.fn)
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


def full_attention(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Tensor:
    return side_by_side(*attention_and_lse(q, k, v, is_causal=False))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Tensor:
    return side_by_side(*attention_and_lse(q, k, v, is_causal=True))


# Settings of a launch, written into the kernel.
SIZE_MISTAKES = {
    "head_dim is taken to be 64; it is `D`": (
        "    query, channel =",
        "    D = 64\n    query, channel =",
    ),
    "a tile has 64 columns; it has `D`": ("tl.arange(0, D)", "tl.arange(0, 64)"),
    "the scale is taken to be 1/8, that of a head_dim of 64; it is `scale`": (
        "    query, channel =",
        "    scale = 0.125\n    query, channel =",
    ),
}
STATE_MISTAKES = {
    **SIZE_MISTAKES,
    "the scale is missing": (") * scale  # (BQ, BK)", ")  # (BQ, BK)"),
    "neither the sum nor the output so far is rescaled when the maximum grows (if you do rescale "
    "them: the maximum before this tile must still be known there)": (
        "tl.exp(m - new_m)",
        "tl.exp(new_m - new_m)",
    ),
    "the output so far is not rescaled when the maximum grows": ("out * shrink[:, None]", "out"),
    "the sum so far is not rescaled when the maximum grows": ("l * shrink", "l"),
    "all is NaN because the earlier sums are rescaled the wrong way round (the factor is exp(old "
    "maximum - new maximum)), or a mask is multiplied by infinity (0 · inf is NaN; use "
    "tl.where)": ("m - new_m)\n", "new_m - m)\n"),
    "the exponentials are relative to the maximum before this tile; the new one is at least as "
    "large as all scores": ("scores - new_m[:, None]", "scores - m[:, None]"),
    "each tile's exponentials are relative to the tile's own maximum; use the maximum so far, with "
    "tl.maximum, as Python's max cannot compare tiles number by number": (
        "tl.maximum(m, tl.max(scores, 1))",
        "tl.max(scores, 1)",
    ),
    "the new maximum is not kept for the next tile": ("        m = new_m\n", ""),
    "no maximum is subtracted inside exp, so large scores overflow": (
        "tl.exp(scores - new_m[:, None])",
        "tl.exp(scores)",
    ),
    "the maximum starts at 0, too large if all scores of a row are below 0; start at -inf": (
        'float("-inf"), tl.float32',
        "0.0, tl.float32",
    ),
    "the division by the sum at the end is missing": ("out / l[:, None]", "out"),
    "the output is divided by the sum in each step; divide once, behind the loop": (
        "        m = new_m\n    tl.store(out_ptr + q_rows, out / l[:, None]",
        "        out = out / l[:, None]\n        m = new_m\n    tl.store(out_ptr + q_rows, out",
    ),
    "lse lacks the maximum: it is m + log(l)": ("m + tl.log(l)", "tl.log(l)"),
    "lse lacks the logarithm of the sum: it is m + log(l)": ("m + tl.log(l)", "m"),
    "lse lacks the maximum and the logarithm: it is m + log(l)": ("m + tl.log(l)", "l"),
    "the maximum in lse is that of scores that are not scaled": (
        "m + tl.log(l)",
        "m / scale + tl.log(l)",
    ),
    "all programs work on the first head: use tl.program_id(1)": ("tl.program_id(1) * n", "0"),
    "all programs take keys and values of the first head": (
        "k_rows = (head + key[:, None])",
        "k_rows = key[:, None]",
    ),
    "a head is taken to begin one row after the one before; it has n rows": (
        "tl.program_id(1) * n",
        "tl.program_id(1)",
    ),
    "the axes of the grid are exchanged: tl.program_id(0) is the tile, tl.program_id(1) the head": (
        "tl.program_id(1) * n  # rows of the heads before this one\n"
        "    query, channel = tl.program_id(0)",
        "tl.program_id(0) * n\n    query, channel = tl.program_id(1)",
    ),
    "the maximum is one number for the whole tile; each row has its own, tl.max(scores, 1)": (
        "tl.max(scores, 1)",
        "tl.max(scores)",
    ),
    "the sum is one number for the whole tile; each row has its own, tl.sum(p, 1)": (
        "tl.sum(p, 1)",
        "tl.sum(p)",
    ),
    "values beyond the last are loaded without other=0.0; lanes that are off hold anything, also "
    "NaN, and 0 · NaN is NaN": (
        "v_ptr + k_rows, mask=key[:, None] < n, other=0.0",
        "v_ptr + k_rows, mask=key[:, None] < n",
    ),
    "each program takes the first tile of queries: use tl.program_id(0)": (
        "query, channel = tl.program_id(0) * BQ",
        "query, channel = 0",
    ),
    "each step loads the first tile of keys": ("key = start + tl", "key = tl"),
    "keys beyond the last are loaded; mask them": (
        "k_ptr + k_rows, mask=key[:, None] < n",
        "k_ptr + k_rows, mask=key[:, None] >= 0",
    ),
    "rows of the output beyond the last are stored; mask them": (
        "out / l[:, None], mask=query[:, None] < n",
        "out / l[:, None]",
    ),
}
# Two lines of a forward kernel.
HIDE = '        scores = tl.where({0}, scores, float("-inf"))\n'
GROW = "        new_m = tl.maximum(m, tl.max(scores, 1))\n"
FORWARD_TASK = KernelTask(solutions.flash_forward, ("out", "lse"), "k", is_causal=False)
FORWARD = kernel_exercise(
    full_attention,
    FORWARD_TASK,
    draw_heads,
    {
        **STATE_MISTAKES,
        "keys beyond the last have a score of 0, and exp(0) is 1; give them -inf": (
            'tl.where(key[None, :] < n, scores, float("-inf"))',
            "scores",
        ),
        "the maximum is taken before keys beyond the last are hidden, whose scores are 0": (
            HIDE.format("key[None, :] < n") + GROW,
            GROW + HIDE.format("key[None, :] < n"),
        ),
        "there is a causal mask; here all queries see all keys": (
            "key[None, :] < n, scores",
            "key[None, :] <= query[:, None], scores",
        ),
        "a last tile of fewer keys is left out": ("range(0, n, BK)", "range(0, n // BK * BK, BK)"),
        "the last key is left out; `range` excludes its end, so that is n": (
            "range(0, n, BK)",
            "range(0, n - 1, BK)",
        ),
        "only the first tile of keys is visited; all queries see all keys": (
            "range(0, n, BK)",
            "range(0, BK, BK)",
        ),
    },
)
# Where the loop over tiles of keys ends, of kernels that skip those behind the diagonal.
LOOP_END_MISTAKES = {
    "the last tile of queries reaches beyond n, and so does the loop: let it end at "
    "tl.minimum(…, n)": (
        "tl.minimum((tl.program_id(0) + 1) * BQ, n)",
        "(tl.program_id(0) + 1) * BQ",
    ),
    "the last tile is left out if a single key is in it; `range` excludes its end, so that is "
    "(i + 1) * BQ, or n": (
        "tl.minimum((tl.program_id(0) + 1) * BQ, n)",
        "tl.minimum((tl.program_id(0) + 1) * BQ - 1, n - 1)",
    ),
    "the loop ends at (i + 1) * BK; program i has queries up to (i + 1) * BQ": (
        "(tl.program_id(0) + 1) * BQ, n",
        "(tl.program_id(0) + 1) * BK, n",
    ),
}
CAUSAL_TASK = KernelTask(solutions.causal_forward, ("out", "lse"), "k")
CAUSAL = kernel_exercise(
    causal_attention,
    CAUSAL_TASK,
    draw_heads,
    {
        "the result is right, but tiles behind the diagonal are loaded too: let the loop end with "
        "the last query of the tile": ("range(0, end, BK)", "range(0, n, BK)"),
        "there is no mask": ("key[None, :] <= query[:, None]", "key[None, :] < n"),
        "a query does not see its own key; key j is visible if j ≤ i": (
            "key[None, :] <= query",
            "key[None, :] < query",
        ),
        "the mask is turned around: it hides earlier keys": (
            "key[None, :] <= query",
            "key[None, :] >= query",
        ),
        "the mask is turned around: it hides earlier keys, and those beyond the last": (
            "key[None, :] <= query[:, None]",
            "(key[None, :] >= query[:, None]) & (key[None, :] < n)",
        ),
        "`a <= b & c < d` is read as `a <= (b & c) < d`; put each comparison into parentheses": (
            "key[None, :] <= query[:, None]",
            "key[None, :] <= query[:, None] & key[None, :] < n",
        ),
        "`a <= b & (c < d)` is read as `a <= (b & (c < d))`; put each comparison into "
        "parentheses": (
            "key[None, :] <= query[:, None]",
            "key[None, :] <= query[:, None] & (key[None, :] < n)",
        ),
        "the mask counts the keys of each tile from 0; key j is number start + j": (
            "key[None, :] <= query",
            "tl.arange(0, BK)[None, :] <= query",
        ),
        "the mask compares keys with rows that count those of other heads, too": (
            "key[None, :] <= query[:, None]",
            "key[None, :] <= head + query[:, None]",
        ),
        "the maximum is taken over hidden scores, too; hide them before": (
            HIDE.format("key[None, :] <= query[:, None]") + GROW,
            GROW + HIDE.format("key[None, :] <= query[:, None]"),
        ),
        **LOOP_END_MISTAKES,
        "masked scores become 0, and exp(0) is 1; use -inf": (
            'scores, float("-inf"))',
            "scores, 0.0)",
        ),
        "the loop ends before the diagonal; it must go on to the tile's last query": (
            "(tl.program_id(0) + 1) * BQ, n",
            "tl.program_id(0) * BQ, n",
        ),
        "the loop ends one tile of keys behind the tile's first query, but tiles of queries may "
        "be longer than those of keys": (
            "(tl.program_id(0) + 1) * BQ, n",
            "tl.program_id(0) * BQ + BK, n",
        ),
    },
)


def draw_for_backward(generator: random.Random, size: int) -> tuple[Any, ...]:
    """q, k, v, dO, lse and delta, as the backward kernels get them, and a Tiling."""
    q, k, v, tiling = draw_heads(generator, size)
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    # so large that weights are 0 and 1, gradients would be 0
    q = q.clamp(-3, 3)
    grad_out = torch.randn(q.shape, generator=seeded)
    out, lse = attention_and_lse(q, k, v, is_causal=True)
    return q, k, v, grad_out, lse, (grad_out * out).sum(-1), tiling


def gradients(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """dQ, dK and dV by autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return torch.autograd.grad(out, leaves, grad_out)


def gradient_of_queries(q, k, v, grad_out, lse, delta, tiling) -> Tensor:
    return gradients(q, k, v, grad_out)[0]


def gradients_of_keys(q, k, v, grad_out, lse, delta, tiling) -> Tensor:
    return side_by_side(*gradients(q, k, v, grad_out)[1:])


# Where a backward kernel loads them, with a head's offset.
LOADED = (
    "lse = tl.load(lse_ptr + {0}query, mask=query < n, other=0.0)\n"
    "    delta = tl.load(delta_ptr + {0}query"
)
HEAD_MISTAKES = {
    "all programs load lse of the first head; a head has n of them": (
        "lse_ptr + head + query",
        "lse_ptr + query",
    ),
    "all programs load delta of the first head; a head has n of them": (
        "delta_ptr + head + query",
        "delta_ptr + query",
    ),
}
UNMASKED_MISTAKES = {
    f"{name} is loaded without a mask; queries beyond the last need mask=query < n, other=0.0": (
        f"{name}_ptr + head + query, mask=query < n, other=0.0",
        f"{name}_ptr + head + query",
    )
    for name in ("lse", "delta")
}
QUERIES_TASK = KernelTask(solutions.backward_queries, ("grad_q",), "k")
BACKWARD_QUERIES = kernel_exercise(
    gradient_of_queries,
    QUERIES_TASK,
    draw_for_backward,
    {
        **SIZE_MISTAKES,
        "delta is missing: dS is P ∘ (dP - delta)": (" - delta[:, None]", ""),
        "lse is not subtracted: P is exp(score - lse)": (" - lse[:, None]", ""),
        "there is no mask": ("key[None, :] <= query[:, None]", "key[None, :] < n"),
        "a query does not see its own key": ("key[None, :] <= query", "key[None, :] < query"),
        "tiles behind the diagonal are loaded too": ("range(0, end, BK)", "range(0, n, BK)"),
        **LOOP_END_MISTAKES,
        "delta is summed over the keys of this tile; the one that is loaded covers the whole row": (
            "grad_p - delta[:, None]",
            "grad_p - tl.sum(p * grad_p, 1)[:, None]",
        ),
        "all programs load lse and delta of the first head; a head has n of them": (
            LOADED.format("head + "),
            LOADED.format(""),
        ),
        **HEAD_MISTAKES,
        **UNMASKED_MISTAKES,
        "hidden scores are 0, and so their weights are not; mask P, with 0": (
            "p = tl.exp(scores - lse[:, None])\n"
            "        p = tl.where(key[None, :] <= query[:, None], p, 0.0)",
            "scores = tl.where(key[None, :] <= query[:, None], scores, 0.0)\n"
            "        p = tl.exp(scores - lse[:, None])",
        ),
        "the softmax runs over this tile alone; P is exp(score - lse), where lse covers the whole "
        "row": (
            "p = tl.exp(scores - lse[:, None])\n"
            "        p = tl.where(key[None, :] <= query[:, None], p, 0.0)",
            'scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))\n'
            "        p = tl.exp(scores - tl.max(scores, 1)[:, None])\n"
            "        p = p / tl.sum(p, 1)[:, None]",
        ),
        "keys or values beyond the last are loaded without other=0.0; lanes that are off hold "
        "anything, also NaN, and 0 · NaN is NaN": (
            "v_ptr + k_rows, mask=key[:, None] < n, other=0.0",
            "v_ptr + k_rows, mask=key[:, None] < n",
        ),
        "the scores are not scaled": (") * scale  # (BQ, BK)", ")  # (BQ, BK)"),
        "dQ is not scaled: S is scale · Q Kᵀ": ("grad_q * scale", "grad_q"),
        "dQ is scaled twice; the scale comes once in the scores, and once at the end": (
            "grad_q * scale",
            "grad_q * scale * scale",
        ),
        "P multiplies the keys; dQ is dS K": ("grad_scores.to(k.dtype), k,", "p.to(k.dtype), k,"),
        "dP multiplies dO with the keys; it is dO Vᵀ": (
            "tl.dot(grad_out, tl.trans(v)",
            "tl.dot(grad_out, tl.trans(k)",
        ),
        "dS multiplies the values; dQ is dS K": (
            "grad_scores.to(k.dtype), k,",
            "grad_scores.to(k.dtype), v,",
        ),
        "the factor P is missing: dS is P ∘ (dP - delta)": ("p * (grad_p", "(grad_p"),
        "each tile of keys overwrites dQ; add to it": ("grad_q += ", "grad_q = "),
        "all programs work on the first head": ("tl.program_id(1) * n", "0"),
    },
)
KEYS_TASK = KernelTask(solutions.backward_keys, ("grad_k", "grad_v"), "q")
BACKWARD_KEYS = kernel_exercise(
    gradients_of_keys,
    KEYS_TASK,
    draw_for_backward,
    {
        "delta is missing: dS is P ∘ (dP - delta)": (" - delta[None, :]", ""),
        "delta belongs to queries, which are columns here: delta[None, :]": (
            "grad_p - delta[None, :]",
            "grad_p - tl.sum(delta) / BQ",
        ),
        "delta is summed over the keys of this tile; the one that is loaded covers the whole row": (
            "grad_p - delta[None, :]",
            "grad_p - tl.sum(p * grad_p, 0)[None, :]",
        ),
        "lse is not subtracted: P is exp(score - lse)": (" - lse[None, :]", ""),
        "all programs load lse and delta of the first head; a head has n of them": (
            LOADED.replace("    delta", "        delta").format("head + "),
            LOADED.replace("    delta", "        delta").format(""),
        ),
        **HEAD_MISTAKES,
        **UNMASKED_MISTAKES,
        "what belongs to queries beyond the last is loaded without other=0.0; lanes that are off "
        "hold anything, also NaN, and 0 · NaN is NaN": (
            "lse_ptr + head + query, mask=query < n, other=0.0",
            "lse_ptr + head + query, mask=query < n",
        ),
        "delta is loaded without other=0.0; lanes that are off hold anything, also NaN, and "
        "0 · NaN is NaN": (
            "delta_ptr + head + query, mask=query < n, other=0.0",
            "delta_ptr + head + query, mask=query < n",
        ),
        "head_dim is taken to be 64; it is `D`": (
            "    key, channel =",
            "    D = 64\n    key, channel =",
        ),
        "a tile has 64 columns; it has `D`": SIZE_MISTAKES["a tile has 64 columns; it has `D`"],
        "the scale is taken to be 1/8, that of a head_dim of 64; it is `scale`": (
            "    key, channel =",
            "    scale = 0.125\n    key, channel =",
        ),
        "a program keeps BQ keys, counted from i * BQ; it keeps BK, from i * BK": (
            "    key, channel = first +",
            "    BK = BQ\n    key, channel = tl.program_id(0) * BQ +",
        ),
        "a query does not see its own key": ("key[:, None] <= query", "key[:, None] < query"),
        "the loop starts at `first // BQ`, the number of a tile; its first query is that times "
        "BQ": ("range(first // BQ * BQ, n, BQ)", "range(first // BQ, n, BQ)"),
        "the last tile is left out if a single query is in it; `range` excludes its end, so that "
        "is n": (
            "range(first // BQ * BQ, n, BQ)",
            "range(first // BQ * BQ, n - 1, BQ)",
        ),
        "P multiplies the queries; dK is dS Q": (
            "grad_scores.to(q.dtype), q,",
            "p.to(q.dtype), q,",
        ),
        "dK is scaled twice; the scale comes once in the scores, and once at the end": (
            "grad_k * scale",
            "grad_k * scale * scale",
        ),
        "a last tile of fewer queries is left out": (
            "range(first // BQ * BQ, n, BQ)",
            "range(first // BQ * BQ, n // BQ * BQ, BQ)",
        ),
        "the loop starts at i * BQ; the keys of program i start at i * BK": (
            "range(first // BQ * BQ, n, BQ)",
            "range(tl.program_id(0) * BQ, n, BQ)",
        ),
        "the loop starts with the next full tile of queries, but those of the tile before may see "
        "these keys, too: round down": (
            "range(first // BQ * BQ, n, BQ)",
            "range(tl.cdiv(first, BQ) * BQ, n, BQ)",
        ),
        "the keys of program i are counted from i * BQ; they start at i * BK": (
            "first = tl.program_id(0) * BK",
            "first = tl.program_id(0) * BQ",
        ),
        "dK and dV are stored in each other's place": (
            "grad_k_ptr + k_rows, grad_k * scale, mask=key[:, None] < n)\n"
            "    tl.store(grad_v_ptr + k_rows, grad_v,",
            "grad_k_ptr + k_rows, grad_v, mask=key[:, None] < n)\n"
            "    tl.store(grad_v_ptr + k_rows, grad_k * scale,",
        ),
        "dV comes from dS; it is P dO": (
            "p.to(q.dtype), grad_out,",
            '(p * (tl.dot(v, tl.trans(grad_out), input_precision="ieee") - delta[None, :]))'
            ".to(q.dtype), grad_out,",
        ),
        "there is no mask": ("key[:, None] <= query[None, :]", "key[:, None] >= 0"),
        "the mask is that of (queries, keys); these scores are (keys, queries)": (
            "key[:, None] <= query[None, :]",
            "key[:, None] >= query[None, :]",
        ),
        # the same in a loop that starts with the first key's own number
        "there is no mask: not all queries of the first tile see all of these keys": (
            "first // BQ * BQ",
            "first",
            "key[:, None] <= query[None, :]",
            "key[:, None] >= 0",
        ),
        "the mask is turned around: these scores are (keys, queries)": (
            "first // BQ * BQ",
            "first",
            "key[:, None] <= query[None, :]",
            "key[:, None] >= query[None, :]",
        ),
        "tiles of queries before the diagonal are loaded too; none of them sees these keys": (
            "range(first // BQ * BQ, n, BQ)",
            "range(0, n, BQ)",
        ),
        "the loop starts behind the queries that see only a part of these keys": (
            "range(first // BQ * BQ, n, BQ)",
            "range((first + BQ) // BQ * BQ, n, BQ)",
        ),
        "the scores are not scaled": (") * scale  # (BK, BQ)", ")  # (BK, BQ)"),
        "dK is not scaled: S is scale · Q Kᵀ": ("grad_k * scale", "grad_k"),
        "dV is scaled; only S, and so dQ and dK, have the scale": (
            "k_rows, grad_v,",
            "k_rows, grad_v * scale,",
        ),
        "dP multiplies dO with the keys; it is V dOᵀ": (
            "tl.dot(v, tl.trans(grad_out)",
            "tl.dot(k, tl.trans(grad_out)",
        ),
        "dS multiplies dO; dK is dS Q": (
            "grad_scores.to(q.dtype), q,",
            "grad_scores.to(q.dtype), grad_out,",
        ),
        "dV multiplies the queries; it is P dO": (
            "p.to(q.dtype), grad_out,",
            "p.to(q.dtype), q,",
        ),
        "each tile of queries overwrites dV; add to it": ("grad_v += ", "grad_v = "),
        "each tile of queries overwrites dK; add to it": ("grad_k += ", "grad_k = "),
    },
)


def _draw_saved(generator: random.Random, size: int) -> tuple:
    """q, k, v, out and lse, as a forward pass saves them, and dO, which is not contiguous."""
    q, k, v, grad_out, lse, _, _ = draw_for_backward(generator, size)
    out, _ = attention_and_lse(q, k, v, is_causal=True)
    return q, k, v, out, lse, grad_out.transpose(0, 1).contiguous().transpose(0, 1)


def saved_gradients(q, k, v, out, lse, grad_out) -> Tensor:
    return side_by_side(*gradients(q, k, v, grad_out))


def launching(function: Callable) -> Callable[..., Tensor]:
    """`function` of tensors and the two backward kernels, interpreted; on a GPU compiled, too.

    Raises:
        ValueError: not two kernels are launched, or one has no programs.
    """
    import triton

    @functools.wraps(function)
    def run(*tensors: Tensor) -> Tensor:
        kernels = [triton.jit(task.solution) for task in (QUERIES_TASK, KEYS_TASK)]
        with watched() as runs:
            found = function(*tensors, *kernels)
        for launch in runs:
            check_run(launch)
        if len(runs) != 2:
            raise ValueError(f"each of the two kernels must be launched once, got {len(runs)}")
        if torch.cuda.is_available():
            found = function(*(x.cuda() for x in tensors), *kernels)
        return side_by_side(*found)

    return run


BACKWARD_LAUNCHES = {
    "delta is missing its sum over the channels of a row, dim=-1": (".sum(-1)", ".sum(1)"),
    "delta is made of the output alone; it is the sum of each row of dO ∘ O": (
        "(grad_out * out)",
        "(out * out)",
    ),
    "the gradient of the output may have any strides, but the kernels count on rows that follow "
    "each other: pass grad_out.contiguous()": ("grad_out.contiguous()", "grad_out"),
    "lse and delta are passed in each other's place": ("lse, delta)", "delta, lse)"),
    "the gradient of the output and the output are mixed up: the kernels take dO": (
        "grad_out.contiguous()",
        "out",
    ),
    "the gradients are not in the order of q, k and v": (
        "return grad_q, grad_k, grad_v",
        "return grad_k, grad_v, grad_q",
    ),
    "dK and dV are swapped, in the launch or in what is returned": (
        "grad_k, grad_v, n",
        "grad_v, grad_k, n",
    ),
    "the scale is the root of D; it is 1 over that": ("D**-0.5", "D**0.5"),
    "the axes of the grid are exchanged: tiles come first, then heads": (
        "(triton.cdiv(n, 16), heads)",
        "(heads, triton.cdiv(n, 16))",
    ),
}


def _launched_wrongly(edit: tuple[str, str]) -> Callable[..., Tensor]:
    # edited when it is needed
    @functools.wraps(solutions.attention_backward)
    def run(*tensors: Tensor) -> Tensor:
        return launching(edited(solutions.attention_backward, *edit))(*tensors)

    return run


BACKWARD = Exercise(
    saved_gradients,
    _draw_saved,
    {sentence: _launched_wrongly(edit) for sentence, edit in BACKWARD_LAUNCHES.items()},
    "core",
    trials=len(CASES),
    seconds=20,
    describe=KernelTask(solutions.attention_backward, ("grad_q", "grad_k", "grad_v"), "k").describe,
    show=lambda q, *others: "heads={}, n={}, D={}".format(*q.shape),
)


def _draw_fragments(generator: random.Random, size: int) -> tuple:
    return tuple(_draw_tensor(generator, 32, count) for count in (4, 2, 4))


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    lane = torch.arange(32)
    g, t = lane // 4, lane % 4
    left, right, total = torch.zeros(16, 8), torch.zeros(8, 8), torch.zeros(16, 8)
    for i in range(4):
        left[g + i // 2 * 8, 2 * t + i % 2] = a[:, i]
        total[g + i // 2 * 8, i % 2 + 2 * t] = c[:, i]
    for i in range(2):
        right[2 * t + i, g] = b[:, i]
    total = total + left @ right
    return torch.stack([total[8 * (i // 2) + g, 2 * t + i % 2] for i in range(4)], 1)


def _down_before_across(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    order = [0, 2, 1, 3]
    return multiply_add(a[:, order], b, c[:, order])[:, order]


FRAGMENTS = Exercise(
    multiply_add,
    _draw_fragments,
    {
        "a lane's numbers are taken as rows g, g + 8, g, g + 8; the pair of row g comes first": (
            _down_before_across
        ),
        "B is laid out as A; a lane's pair lies in a column of B, rows 2t and 2t + 1": (
            "right[2 * t + i, g]",
            "right[g, 2 * t + i]",
        ),
        "registers 1 and 2 of A are swapped; a pair is two columns of one row": (
            "left[g + i // 2 * 8, 2 * t + i % 2]",
            "left[g + i % 2 * 8, 2 * t + i // 2]",
        ),
        "registers 1 and 2 of the C that comes in are swapped; a pair is two columns of one row": (
            "total[g + i // 2 * 8, i % 2 + 2 * t]",
            "total[g + i % 2 * 8, i // 2 + 2 * t]",
        ),
        "registers 1 and 2 of the result are swapped; a pair is two columns of one row": (
            "total[8 * (i // 2) + g, 2 * t + i % 2]",
            "total[8 * (i % 2) + g, 2 * t + i // 2]",
        ),
        "a lane's second pair of A is in the row below; it is 8 rows below": (
            "left[g + i // 2 * 8",
            "left[2 * g + i // 2",
        ),
        "a lane's columns of A are t and t + 4; they are neighbors, 2t and 2t + 1": (
            "left[g + i // 2 * 8, 2 * t + i % 2]",
            "left[g + i // 2 * 8, t + i % 2 * 4]",
        ),
        "a lane's rows of B are t and t + 4; they are neighbors, 2t and 2t + 1": (
            "right[2 * t + i, g]",
            "right[t + i * 4, g]",
        ),
        "g and t are those of a warp of four rows of eight; g is lane // 4, t is lane % 4": (
            "lane // 4, lane % 4",
            "lane % 8, lane // 8",
        ),
        "the C that comes in is lost; the result is C + A · B": ("total + left", "left"),
        "the result is the whole matrix; return what each lane holds of it, (32, 4)": (
            "return torch.stack([total[8 * (i // 2) + g, 2 * t + i % 2] for i in range(4)], 1)",
            "return total",
        ),
    },
    tier="optional",
)


def _draw_gradient_tile(generator: random.Random, size: int) -> tuple:
    head_dim = generator.randint(2, 4)
    num_queries = generator.choice([n for n in range(1, 3 + size // 4) if n != head_dim])
    # a tile of a row of more keys; as many of them as neither queries nor columns
    kept = [n for n in range(1, 4 + size // 4) if n not in (head_dim, num_queries)]
    num_keys = generator.choice(kept)
    others = generator.randint(1, 3)
    scores = _draw_tensor(generator, num_queries, num_keys + others)
    v = _draw_tensor(generator, num_keys + others, head_dim)
    out, lse = scores.softmax(1) @ v, scores.logsumexp(1)
    grad_out = _draw_tensor(generator, num_queries, head_dim)
    return scores[:, :num_keys].clone(), v[:num_keys].clone(), out, lse, grad_out


def grad_scores(scores: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> Tensor:
    p = torch.exp(scores - lse[:, None])
    grad_p = grad_out @ v.T
    delta = (grad_out * out).sum(1, keepdim=True)
    return p * (grad_p - delta)


GRAD_SCORES = Exercise(
    grad_scores,
    _draw_gradient_tile,
    {
        "delta is missing: dS is P ∘ (dP - delta)": (" - delta", ""),
        "delta is summed over the keys of this tile, but the row has more; rowsum(dO ∘ O) covers "
        "all of them": ("(grad_out * out)", "(p * grad_p)"),
        "softmax and delta see only the keys of this tile; lse and O cover the whole row": (
            "torch.exp(scores - lse[:, None])",
            "scores.softmax(1)\n    out = p @ v",
        ),
        "the softmax runs over this tile alone; P is exp(score - lse), where lse covers the whole "
        "row": ("torch.exp(scores - lse[:, None])", "scores.softmax(1)"),
        "the factor P is missing: dS is P ∘ (dP - delta)": ("p * ", ""),
        "delta is outside of the brackets: dS is P ∘ (dP - delta)": (
            "(grad_p - delta)",
            "grad_p - delta",
        ),
        "the sign is wrong: dS is P ∘ (dP - delta)": ("grad_p - delta", "delta - grad_p"),
        "delta is added: dS is P ∘ (dP - delta)": ("- delta", "+ delta"),
        "delta is a mean; take the sum of each row of dO ∘ O": (".sum", ".mean"),
        "delta is summed over the queries; each row has its own, dim=-1": (".sum(1", ".sum(0"),
        "delta is one sum over all queries; each row has its own, dim=-1": ("1, keepdim=True", ""),
        "delta lacks the output; take the sum of each row of dO ∘ O": (
            "grad_out * out",
            "grad_out",
        ),
        "the largest score is subtracted, not lse: P is exp(score - lse)": (
            "lse[:, None]",
            "scores.amax(1, keepdim=True)",
        ),
        "lse is not subtracted: P is exp(score - lse)": (" - lse[:, None]", ""),
        "the exponent is negated: P is exp(score - lse)": (
            "scores - lse[:, None]",
            "lse[:, None] - scores",
        ),
        "lse needs a dimension for the keys: lse[:, None]": ("[:, None]", ""),
        "delta has lost its last dimension; keepdim=True keeps it": (", keepdim=True", ""),
        "the result is divided by sqrt(head_dim); these scores are scaled already, so the factor "
        "belongs to dQ and dK": ("return p", "return p / math.sqrt(v.shape[1])"),
        "P itself is returned; the result is P ∘ (dP - delta)": (" * (grad_p - delta)", ""),
    },
)


# The share of the time in which a right schedule keeps the tensor cores busy.
BUSY = 0.85


def _draw_nothing(generator: random.Random, size: int) -> tuple:
    return ()


def scheduled(schedule: Callable[[], str]) -> str:
    """The words of a schedule in alphabetical order.

    Raises:
        ValueError: it cannot be done, or keeps the tensor cores busy for less than BUSY.
    """
    share = busy_share(run_order(order := schedule()))
    if share < BUSY:
        raise ValueError(f"tensor cores are busy {share:.0%} of the time; reach {BUSY:.0%}")
    return " ".join(sorted(order.split()))


def two_warpgroups() -> str:
    words = ["A.S0", "B.S0"]
    for tile in range(TILES):
        for group in "AB":
            following = [f"{group}.S{tile + 1}"] if tile + 1 < TILES else []
            words += [*following, f"{group}.PV{tile}"]
    return " ".join(words)


def best_schedule() -> str:
    return scheduled(two_warpgroups)


def _scheduled_as(pattern: str) -> Callable[[], str]:
    """The exercise done with `pattern`, the words of each tile, tile after tile."""

    def best_schedule() -> str:
        return scheduled(lambda: " ".join(pattern.format(i) for i in range(TILES)))

    return best_schedule


def idle_percent(attempt: Callable[[], str]) -> float:
    """The percentage of the time in which the tensor cores are idle."""
    schedule = getattr(attempt, "schedule", two_warpgroups)
    return 100 * (1 - busy_share(run_order(schedule())))


SCHEDULE = Exercise(
    best_schedule,
    _draw_nothing,
    {
        "each PV comes right after its own S, so that the tensor cores wait for each softmax; let "
        "them do something of the other warpgroup in between": _scheduled_as(
            "A.S{0} A.PV{0} B.S{0} B.PV{0}"
        ),
        "both warpgroups compute exponentials at the same time, and then both multiply; ask for "
        "the next S before a PV": _scheduled_as("A.S{0} B.S{0} A.PV{0} B.PV{0}"),
    },
    "open",
    trials=1,
    # an error is told without what was expected, which is only a sorted list
    describe=difference,
    measure=idle_percent,
    unit="% idle",
)


def check_max_and_sum(attempt: Callable) -> None:
    """Check `max_and_sum(tiles)`: an iterator of (scores,) -> (2,), the maximum and the sum."""
    check(ONLINE_SOFTMAX, attempt)


def check_multiply_add(attempt: Callable) -> None:
    """Check `multiply_add(a, b, c)`: (32, 4), (32, 2) and (32, 4) -> (32, 4), C of each lane."""
    check(FRAGMENTS, attempt)


def check_grad_scores(attempt: Callable) -> None:
    """Check `grad_scores(scores, v, out, lse, grad_out)` -> (queries, keys), the tile's dS."""
    check(GRAD_SCORES, attempt)


def check_forward(kernel: Any) -> Any:
    """Check `flash_forward`, all keys visible; return it if it is right, else the solution."""
    return check_kernel(FORWARD, FORWARD_TASK, kernel)


def check_causal(kernel: Any) -> Any:
    """Check `causal_forward`, also by the tiles that it loads; return as `check_forward` does."""
    return check_kernel(CAUSAL, CAUSAL_TASK, kernel)


def check_backward_queries(kernel: Any) -> Any:
    """Check `backward_queries`; return as `check_forward` does."""
    return check_kernel(BACKWARD_QUERIES, QUERIES_TASK, kernel)


def check_backward_keys(kernel: Any) -> Any:
    """Check `backward_keys`; return as `check_forward` does."""
    return check_kernel(BACKWARD_KEYS, KEYS_TASK, kernel)


def check_attention_backward(function: Callable) -> Callable:
    """Check `attention_backward`; return it if it is right, else the solution."""
    text = verdict(BACKWARD, launching(function))
    report(text, function.__name__, BACKWARD.tier)
    return function if result_of(text) == "passed" else solutions.attention_backward


def check_schedule(schedule: Callable[[], str]) -> None:
    """Check the order of matmuls that `schedule()` returns, and draw who works when."""

    def attempt() -> str:
        return scheduled(schedule)

    attempt.__name__, attempt.schedule = schedule.__name__, schedule  # type: ignore[attr-defined]
    check(SCHEDULE, attempt)
    try:
        spans = run_order(schedule())
    except (NotImplementedError, TypeError, ValueError):
        # the verdict says so
        return
    draw_spans(plt.figure(figsize=(9.5, 3.6)), spans, "Your schedule")
    plt.show()
