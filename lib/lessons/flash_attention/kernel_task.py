"""The kernels of attention as answers: their inputs, their launch, and the tiles that they load.

A tile that the causal mask hides, but that is loaded, is an error.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lib.lessons.triton.kernels import KernelTask, Launch
from lib.lessons.triton.recorder_triton import Run


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
class AttentionTask(KernelTask):
    """How a kernel of attention is launched: its inputs end with a Tiling."""

    passing: str
    """The tensor whose tiles pass by in its loop."""

    results: dict[str, int]
    """The tensors that it stores, which come last among its tensors, and their dimensions."""

    is_causal: bool = True

    factor: float = 1.0
    """At a head_dim below 64 the scale is this many times the usual one: none can ignore it."""

    def plan(self, *given: Any) -> Launch:
        """The launch on tensors, (heads, n, D) or (heads, n), with a Tiling."""
        *tensors, tiling = given
        heads, n, head_dim = tensors[0].shape
        results = {
            name: tensors[0].new_full(
                (heads, n, head_dim)[:ndim],
                math.nan,
                dtype=tensors[0].dtype if ndim == 3 else torch.float32,
            )
            for name, ndim in self.results.items()
        }
        tile = tiling.BQ if self.passing == "k" else tiling.BK
        arguments = (*tensors, *results.values(), n, self.scale(head_dim))
        sizes = {"D": head_dim, **tiling._asdict()}
        return Launch(results, (-(-n // tile), heads), arguments, sizes)

    def to_compile(self, *given: Any) -> Launch:
        """With q, k, v and gradients in 16 bits."""
        *tensors, tiling = given
        return self.plan(*(x.bfloat16() if x.ndim == 3 else x for x in tensors), tiling)

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

    def refuse(self, run: Run, launch: Launch, *given: Any) -> None:
        """ValueError, too, if a program loads more tiles than have a visible pair, or one twice."""
        super().refuse(run, launch, *given)
        heads, n, tiling = run.grid[1], given[0].shape[1], given[-1]
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


def show_sizes(q: Tensor, *others: Any) -> str:
    """The sizes of a trial."""
    (heads, n, head_dim), tiling = q.shape, others[-1]
    words = f"heads={heads}, n={n}, D={head_dim}"
    return f"{words}, BQ={tiling.BQ}, BK={tiling.BK}" if isinstance(tiling, Tiling) else words


# What the exercises have in common.
KERNEL = {"trials": len(CASES), "seconds": 20, "show": show_sizes}


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
