"""Exercises of notebook 06: online softmax, attention in tiles in PyTorch, kernels in Triton."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.lessons.differences import AtMost, Named
from lib.lessons.exercise import check_of, exercise
from lib.lessons.flash_attention.kernel_task import (
    KERNEL,
    attention_and_lse,
    draw_for_backward,
)
from lib.lessons.flash_attention.solutions_triton import (  # noqa: F401 (found by their names)
    backward_keys,
    backward_queries,
    causal_forward,
    flash_forward,
)
from lib.lessons.meters import Largest
from lib.lessons.model.exercises import draw_tensor
from lib.lessons.triton.kernels import check_run
from lib.lessons.triton.recorder_triton import watched

take = check_of(__name__, returns=True)


# Online softmax


def draw_row(generator: random.Random, size: int) -> tuple:
    tiles = [draw_tensor(generator, generator.randint(1, 3)) for _ in range(1 + size // 4)]
    # some so large that their exponentials overflow float32, some all below 0
    factor, shift = generator.choice([1, 1, 1, 40]), generator.choice([0, 0, -4])
    return ([factor * tile + shift for tile in tiles],)


def one_after_another(add_tile: Callable, tiles: Sequence[Tensor]) -> Named:
    """The maximum and the sum after all tiles of a row."""
    m, total = torch.tensor(-math.inf), torch.tensor(0.0)
    for scores in tiles:
        m, total = add_tile(m, total, scores)
    return Named(m=m, l=total)


@exercise("warm-up", draw_row, harness=one_after_another)
def add_tile(m: Tensor, l: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    new_m = torch.maximum(m, scores.max())
    l = torch.exp(m - new_m) * l + torch.exp(scores - new_m).sum()
    return new_m, l


add_tile.mistakes = """
torch.exp(m - new_m) * l => l
    | the sum so far is not rescaled when the maximum grows; its terms were relative to the old one
m - new_m => new_m - m
    | the sum so far is rescaled the wrong way round; the factor is exp(old maximum - new maximum),
    at most 1
scores - new_m => scores - scores.max()
    | the tile's exponentials are relative to its own maximum; use the maximum so far
torch.maximum(m, scores.max()) => scores.max()
    | the maximum is the last tile's; keep the larger of it and the one so far
torch.exp(m - new_m) * l => torch.exp(m) / torch.exp(new_m) * l
    | the factor is a quotient of two exponentials, and both may overflow, or both be 0; subtract
    first: exp(m - new_m)
torch.exp(m - new_m) * l + torch.exp(scores - new_m) => l + torch.exp(scores)
    | no maximum is subtracted inside exp, so large scores overflow
"""


# Attention in tiles


class WrittenOut(Largest):
    """Refuses autograd."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise ValueError("autograd must not differentiate here: write the formulas out")
        return super().__torch_dispatch__(op, types, args, kwargs)


class TileByTile(WrittenOut):
    """Refuses further products with keys before the scores of the last one have met their values.

    So two passes over the keys are refused, and scores of all tiles that are kept.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.keys, self.values = (x.untyped_storage().data_ptr() for x in (k, v))
        self.waiting = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            read = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            if self.keys in read and self.waiting:
                raise ValueError(
                    "scores of a second tile of keys are computed before those of the first meet "
                    "their values: one pass, and what it has summed so far is rescaled"
                )
            self.waiting = self.keys in read or (self.waiting and self.values not in read)
        return super().__torch_dispatch__(op, types, args, kwargs)


def in_little_room(function: Callable, names: Sequence[str], *given: Any, room: Largest) -> Named:
    """The results of a function, by `names`, and the size of the largest tensor it makes.

    Raises:
        ValueError: a result has another dtype than the first argument.
    """
    with room as largest:
        found = function(*given)
    results = [*zip(names, found)] if isinstance(found, (tuple, list)) else [("result", found)]
    for name, tensor in results:
        if isinstance(tensor, Tensor) and tensor.dtype != given[0].dtype:
            raise ValueError(f"{name} must be {given[0].dtype} as q is, got {tensor.dtype}")
    # small ones don't matter
    numbers = AtMost(max(largest.numbers, 32))
    return Named(results, **{"numbers in the largest tensor": numbers})


def draw_head(generator: random.Random, size: int) -> tuple:
    """q, k, v of one head, and a tile's queries and keys: fewer than half of them, if many."""
    n, head_dim = generator.randint(2 + size // 2, 3 + size), generator.randint(2, 3)
    dtype = generator.choice([torch.float32, torch.float32, torch.float64])
    q, k, v = (draw_tensor(generator, n, head_dim).to(dtype) for _ in range(3))
    if generator.random() < 1 / 4:
        # scores whose exponentials overflow, and a row of them that all underflow to 0
        q *= 40
        k[:, 0] = k[:, 0].abs() + 1
        q[-1] = 0
        q[-1, 0] = -2000
    return q, k, v, generator.randint(4, 6), generator.choice([2, 3])


def forward_in_little_room(function: Callable, q, k, v, BQ: int, BK: int) -> Named:
    return in_little_room(function, ("out", "lse"), q, k, v, BQ, BK, room=TileByTile(k, v))


@exercise("core", draw_head, harness=forward_in_little_room, trials=40, seconds=5)
def tiled_forward(q: Tensor, k: Tensor, v: Tensor, BQ: int, BK: int) -> tuple[Tensor, Tensor]:
    n, D = q.shape
    out, lse = torch.empty_like(q), q.new_empty(n)
    for i in range(0, n, BQ):
        Q = q[i : i + BQ]
        m, l = q.new_full((len(Q),), -math.inf), q.new_zeros(len(Q))
        O = torch.zeros_like(Q)
        for j in range(0, n, BK):
            K, V = k[j : j + BK], v[j : j + BK]
            S = Q @ K.T / math.sqrt(D)  # (BQ, BK)
            new_m = torch.maximum(m, S.amax(1))
            P, shrink = torch.exp(S - new_m[:, None]), torch.exp(m - new_m)
            l = shrink * l + P.sum(1)
            O = shrink[:, None] * O + P @ V
            m = new_m
        out[i : i + BQ], lse[i : i + BQ] = O / l[:, None], m + torch.log(l)
    return out, lse


tiled_forward.mistakes = """
shrink[:, None] * O => O | the output so far is not rescaled when the maximum grows
O / l[:, None] => O | the output is not divided by the sum of its row, l, at the end
m = new_m => pass | the maximum is not carried on: the next tile needs m = new_m
q.new_full((len(Q),), -math.inf) => q.new_zeros(len(Q))
    | the maximum begins at 0; where all scores of a row are far below, their exponentials are all 0
/ math.sqrt(D)  # (BQ, BK) => | the scores are not divided by the root of D
m + torch.log(l) => torch.log(l) | lse lacks the maximum: it is m + log(l)
"""


# The backward pass


def draw_saved(generator: random.Random, size: int) -> tuple:
    """Arguments and results of `tiled_forward`, and the gradient of its output."""
    q, k, v, BQ, BK = draw_head(generator, size)
    q = q.clamp(-3, 3)
    out, lse = attention_and_lse(q, k, v, is_causal=False)
    return q, k, v, out, lse, draw_tensor(generator, *q.shape).to(q.dtype), BQ, BK


def backward_in_little_room(function, q, k, v, out, lse, grad_out, BQ: int, BK: int) -> Named:
    given = (q, k, v, out, lse, grad_out, BQ, BK)
    return in_little_room(function, ("dQ", "dK", "dV"), *given, room=WrittenOut())


@exercise("core", draw_saved, harness=backward_in_little_room, trials=40, seconds=5)
def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, BQ: int, BK: int
) -> tuple[Tensor, Tensor, Tensor]:
    n, D = q.shape
    delta = (grad_out * out).sum(1)
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    for j in range(0, n, BK):
        K, V = k[j : j + BK], v[j : j + BK]
        for i in range(0, n, BQ):
            Q, dO = q[i : i + BQ], grad_out[i : i + BQ]
            P = torch.exp(Q @ K.T / math.sqrt(D) - lse[i : i + BQ, None])  # (BQ, BK)
            dS = P * (dO @ V.T - delta[i : i + BQ, None])
            grad_v[j : j + BK] += P.T @ dO
            grad_q[i : i + BQ] += dS @ K / math.sqrt(D)
            grad_k[j : j + BK] += dS.T @ Q / math.sqrt(D)
    return grad_q, grad_k, grad_v


tiled_backward.mistakes = """
- delta[i : i + BQ, None] => | delta is missing: dS is P ∘ (dP - delta)
delta[i : i + BQ, None] => (P * (dO @ V.T)).sum(1)[:, None]
    | delta is summed over the keys of a tile; rowsum(dO ∘ O) covers the whole row
dS @ K / math.sqrt(D) => dS @ K && dS.T @ Q / math.sqrt(D) => dS.T @ Q
    | neither dQ nor dK is divided by the root of D; the scale comes in the scores, and once more
    at the end
dO @ V.T - delta => dO @ V.T + delta | delta is added; dS is P ∘ (dP - delta)
grad_q[i : i + BQ] += => grad_q[i : i + BQ] = | each tile of keys overwrites dQ; add to it
grad_k[j : j + BK] += => grad_k[j : j + BK] = && grad_v[j : j + BK] += => grad_v[j : j + BK] =
    | each tile of queries overwrites dK and dV; add to them
"""


# The launches of the backward pass


def draw_launches(generator: random.Random, size: int) -> tuple:
    """q, k, v, out and lse, as a forward pass saves them, and dO, which is not contiguous."""
    q, k, v, grad_out, lse, _, _ = draw_for_backward(generator, size)
    out, _ = attention_and_lse(q, k, v, is_causal=True)
    return q, k, v, out, lse, grad_out.transpose(0, 1).contiguous().transpose(0, 1)


def launching(function: Callable, *tensors: Tensor) -> Named:
    """Results of `function` of tensors and the two backward kernels; on a GPU compiled, too.

    Raises:
        ValueError: not two kernels are launched, or one has no programs, or the result is not what
            they stored.
    """
    import triton

    kernels = [triton.jit(kernel.solve) for kernel in (backward_queries, backward_keys)]
    with watched() as runs:
        found = function(*tensors, *kernels)
    for launch in runs:
        check_run(launch)
    if len(runs) != 2:
        raise ValueError(f"each of the two kernels must be launched once, got {len(runs)}")
    if isinstance(found, (list, tuple)) and len(found) != 3:
        raise ValueError(f"three gradients must be returned, dQ, dK and dV, got {len(found)}")
    stored = [run.tensors[access.tensor] for run in runs for access in run.of("store")]
    for gradient in found if isinstance(found, (list, tuple)) else ():
        if not any(memory.still_holds(gradient) for memory in stored):
            raise ValueError("the gradients must be what the kernels stored, unchanged")
    if torch.cuda.is_available():
        found = function(*(x.cuda() for x in tensors), *kernels)
    return Named(zip(("dQ", "dK", "dV"), found))


@exercise("core", draw_launches, harness=launching, **KERNEL)
def attention_backward(q, k, v, out, lse, grad_out, queries_kernel, keys_kernel):
    heads, n, D = q.shape
    scale = D**-0.5
    delta = (grad_out * out).sum(-1)  # (heads, n)
    given = (q, k, v, grad_out.contiguous(), lse, delta)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    sizes, grid = {"D": D, "BQ": 16, "BK": 16}, (-(-n // 16), heads)
    queries_kernel[grid](*given, grad_q, n, scale, **sizes)
    keys_kernel[grid](*given, grad_k, grad_v, n, scale, **sizes)
    return grad_q, grad_k, grad_v


attention_backward.mistakes = """
.sum(-1) => .sum(1) | delta is missing its sum over the channels of a row, dim=-1
grad_out.contiguous() => grad_out
    | the gradient of the output may have any strides, but the kernels count on rows that follow
    each other: pass grad_out.contiguous()
lse, delta) => delta, lse) | lse and delta are passed in each other's place
return grad_q, grad_k, grad_v => return grad_q, grad_v, grad_k
    | dK and dV are exchanged: the kernel fills dK first
D**-0.5 => 1.0 | the scale is missing: it is 1 over the root of D
(-(-n // 16), heads) => (heads, -(-n // 16))
    | the axes of the grid are exchanged: tiles come first, then heads
"""
