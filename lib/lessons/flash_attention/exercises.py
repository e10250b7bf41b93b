"""Exercises of notebook 06: online softmax, a tile of queries, fragments, gradient of scores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib.lessons.exercise import Exercise, check


def _draw_tensor(generator: random.Random, *shape: int) -> Tensor:
    # halves, which print short and exactly
    values = [generator.randint(-6, 6) / 2 for _ in range(math.prod(shape))]
    return torch.tensor(values).reshape(shape)


def _draw_score_tiles(generator: random.Random, size: int) -> tuple:
    num_tiles = generator.randint(1, 2 + size // 4)
    tiles = [_draw_tensor(generator, generator.randint(1, 3)) for _ in range(num_tiles)]
    # some so large that their exponentials overflow float32, some all below 0
    factor, shift = generator.choice([1, 1, 1, 40]), generator.choice([0, 0, -4])
    return ([factor * tile + shift for tile in tiles],)


def max_and_sum(tiles: Sequence[Tensor]) -> Tensor:
    m, total = torch.tensor(-math.inf), torch.tensor(0.0)
    for scores in tiles:
        new_max = torch.maximum(m, scores.max())
        total = total * torch.exp(m - new_max) + torch.exp(scores - new_max).sum()
        m = new_max
    return torch.stack([m, total])


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
    },
)


def _draw_query_tile(generator: random.Random, size: int) -> tuple:
    head_dim = generator.randint(2, 4)
    lengths = [n for n in range(1, 2 + size // 3) if n != head_dim]
    num_queries = generator.choice(lengths)
    first = generator.randint(0, 1 + size // 2)
    num_keys = first + num_queries + generator.randint(0, 2)
    q, k, v = (_draw_tensor(generator, n, head_dim) for n in (num_queries, num_keys, num_keys))
    # some so large that their exponentials overflow float32
    return q * generator.choice([1, 1, 1, 40]), k, v, first, generator.randint(1, 4)


def attend(q: Tensor, k: Tensor, v: Tensor, first: int, tile: int) -> Tensor:
    out = torch.zeros_like(q)
    m, total = torch.full((len(q), 1), -math.inf), torch.zeros(len(q), 1)
    query = first + torch.arange(len(q))[:, None]
    for start in range(0, first + len(q), tile):
        keys, values = k[start : start + tile], v[start : start + tile]
        key = start + torch.arange(len(keys))
        scores = q @ keys.T / math.sqrt(q.shape[1])
        scores = scores.masked_fill(key > query, -math.inf)
        new_max = torch.maximum(m, scores.amax(1, keepdim=True))
        p, shrink = torch.exp(scores - new_max), torch.exp(m - new_max)
        total = total * shrink + p.sum(1, keepdim=True)
        out = out * shrink + p @ values
        m = new_max
    return out / total


ATTEND = Exercise(
    attend,
    _draw_query_tile,
    {
        "the scale is missing; divide by sqrt(head_dim)": (" / math.sqrt(q.shape[1])", ""),
        "the scores are divided by head_dim, not its square root": (
            "math.sqrt(q.shape[1])",
            "q.shape[1]",
        ),
        "the output so far is not rescaled when the maximum grows": ("out * shrink", "out"),
        "the sum so far is not rescaled when the maximum grows": ("total * shrink", "total"),
        "neither the sum nor the output so far is rescaled when the maximum grows "
        "(if you do rescale them: the maximum before this tile must still be known there)": (
            "torch.exp(m - new_max)",
            "1",
        ),
        "the sum and the output so far are rescaled the wrong way round; the factor is exp(old "
        "maximum - new maximum), at most 1": ("m - new_max", "new_max - m"),
        "each tile's exponentials are relative to the tile's own maximum; use the maximum so far, "
        "over all tiles": ("scores - new_max", "scores - scores.amax(1, keepdim=True)"),
        "the new maximum is not kept for the next tile": ("        m = new_max\n", ""),
        "the division by the sum at the end is missing": ("out / total", "out"),
        "the weights are divided by the sum of their tile; divide once, at the end, by the whole "
        "sum": ("total = total * shrink + p.sum", "total, p = 1, p / p.sum"),
        "the output is divided by the sum so far in each tile; divide once, at the end": (
            "m = new_max\n    return out / total",
            "m, out = new_max, out / total\n    return out",
        ),
        "each tile has a softmax of its own, as if there were no other keys": (
            "total * shrink + p.sum(1, keepdim=True)\n        out = out * shrink + p @ values",
            "1\n        out = out + scores.softmax(1).nan_to_num() @ values",
        ),
        "no maximum is subtracted inside exp, so large scores overflow": (
            "torch.exp(scores - new_max), torch.exp(m - new_max)",
            "torch.exp(scores), 1",
        ),
        "there is no mask; within the tiles it reads, a query must not see keys that come after "
        "its own": (".masked_fill(key > query, -math.inf)", ""),
        "there is no mask, and later tiles of keys are read too": (
            "    for start in range(0, first + len(q), tile):",
            "    query = query + len(k)\n    for start in range(0, len(k), tile):",
        ),
        "masked scores become 0, and exp(0) is 1; use -inf": ("query, -math.inf", "query, 0.0"),
        "the mask numbers queries from 0, not from `first`": ("first + torch", "torch"),
        "the mask numbers each tile's keys from 0, not from its start": ("start + torch", "torch"),
        "a query does not see its own key; key j is visible if j ≤ i": (
            "key > query",
            "key >= query",
        ),
        "the loop ends before the diagonal; go on to the last query's own key, number first + "
        "queries - 1": ("first + len(q),", "first,"),
        "the loop reads only as many keys as there are queries; others come before them, so go on "
        "to first + queries": ("first + len(q),", "len(q),"),
        "the loop ends one key early; the last query sees its own": ("+ len(q)", "+ len(q) - 1"),
        "a last tile of fewer keys is left out": (
            "first + len(q),",
            "(first + len(q)) // tile * tile,",
        ),
        "the rows' maxima and sums have lost their last dimension; keepdim=True keeps it": (
            "amax(1, keepdim=True)",
            "amax(1)",
        ),
    },
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


FRAGMENTS = Exercise(
    multiply_add,
    _draw_fragments,
    {
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
        "a lane's columns of A are t and t + 4; they are neighbours, 2t and 2t + 1": (
            "left[g + i // 2 * 8, 2 * t + i % 2]",
            "left[g + i // 2 * 8, t + i % 2 * 4]",
        ),
        "a lane's rows of B are t and t + 4; they are neighbours, 2t and 2t + 1": (
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
    tier="core",
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


def check_max_and_sum(attempt: Callable) -> None:
    """Check `max_and_sum(tiles)`: a list of (scores,) -> (2,), the maximum and the sum."""
    check(ONLINE_SOFTMAX, attempt)


def check_attend(attempt: Callable) -> None:
    """Check `attend(q, k, v, first, tile)`: (queries, d), twice (keys, d) -> (queries, d)."""
    check(ATTEND, attempt)


def check_multiply_add(attempt: Callable) -> None:
    """Check `multiply_add(a, b, c)`: (32, 4), (32, 2) and (32, 4) -> (32, 4), C of each lane."""
    check(FRAGMENTS, attempt)


def check_grad_scores(attempt: Callable) -> None:
    """Check `grad_scores(scores, v, out, lse, grad_out)` -> (queries, keys), the tile's dS."""
    check(GRAD_SCORES, attempt)
