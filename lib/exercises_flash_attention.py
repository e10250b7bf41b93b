"""Exercises of notebook 05: online softmax, one tile of queries forward, delta."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib.exercises import Exercise, check


def _draw_tensor(generator: random.Random, *shape: int) -> Tensor:
    # halves, which print short and exactly
    values = [generator.randint(-6, 6) / 2 for _ in range(math.prod(shape))]
    return torch.tensor(values).reshape(shape)


def _like(function: Callable, name: str, **how) -> Callable:
    """`function` with the keywords `how`, which make a mistake, under a name of its own."""

    def mistaken(*arguments):
        return function(*arguments, **how)

    mistaken.__name__ = name
    return mistaken


def _draw_score_tiles(generator: random.Random, size: int) -> tuple:
    num_tiles = generator.randint(1, 2 + size // 4)
    tiles = [_draw_tensor(generator, generator.randint(1, 3)) for _ in range(num_tiles)]
    # some so large that their exponentials leave float32, some all below 0
    factor, shift = generator.choice([1, 1, 1, 40]), generator.choice([0, 0, -4])
    return ([factor * tile + shift for tile in tiles],)


def _max_and_sum(
    tiles: Sequence[Tensor],
    *,
    start: float = -math.inf,
    shrinks: bool = True,
    turned: bool = False,
    own_max: bool = False,
    keeps_max: bool = True,
    shrinks_all: bool = False,
    shifts: bool = True,
    adds: bool = True,
    by_log: bool = False,
) -> Tensor:
    """The maximum of all scores and the sum of exp(score - maximum); the keywords make mistakes."""
    m, total = torch.tensor(start), torch.tensor(0.0)
    for scores in tiles:
        new_max = torch.maximum(m, scores.max()) if keeps_max else scores.max()
        shrink = torch.exp(new_max - m if turned else m - new_max)
        shift = scores.max() if own_max else new_max
        part = torch.exp(scores - shift if shifts else scores).sum()
        total = (total * shrink if shrinks and not shrinks_all else total) if adds else 0 * total
        total = (total + part) * shrink if shrinks_all else total + part
        m = new_max
    return torch.stack([m, torch.log(total) if by_log else total])


def _sum_first(tiles: Sequence[Tensor]) -> Tensor:
    return _max_and_sum(tiles).flip(0)


def _scores_added(tiles: Sequence[Tensor]) -> Tensor:
    m = torch.cat(list(tiles)).max()
    return torch.stack([m, torch.cat(list(tiles)).sum()])


ONLINE_SOFTMAX = Exercise(
    solve=_max_and_sum,
    draw=_draw_score_tiles,
    mistakes={
        "the sum so far is not rescaled when the maximum grows; it was taken for the old maximum "
        "(if you do rescale it: the maximum before this tile must still be known there)": (
            _like(_max_and_sum, "never_shrinks", shrinks=False)
        ),
        "the sum so far is rescaled the wrong way round; "
        "the factor is exp(old maximum - new maximum), at most 1": (
            _like(_max_and_sum, "turned", turned=True)
        ),
        "each tile's exponentials are taken for the tile's own maximum; "
        "take them for the maximum so far": _like(_max_and_sum, "own_max", own_max=True),
        "the maximum is that of the last tile; keep the larger of it and the one so far": (
            _like(_max_and_sum, "last_max", keeps_max=False)
        ),
        "the new tile's exponentials are rescaled too; only the sum so far is out of date": (
            _like(_max_and_sum, "shrinks_all", shrinks_all=True)
        ),
        "no maximum is taken off inside exp, so that large scores overflow": (
            _like(_max_and_sum, "no_shift", shifts=False, shrinks=False)
        ),
        "no maximum is taken off inside exp, while the sum is rescaled as if it were": (
            _like(_max_and_sum, "no_shift_but_shrinks", shifts=False)
        ),
        "the maximum begins with 0, which is too large where all scores are below 0; "
        "begin with -inf": _like(_max_and_sum, "from_zero", start=0.0),
        "only the last tile's exponentials are in the sum": (
            _like(_max_and_sum, "last_sum", adds=False)
        ),
        "the logarithm of the sum is returned; return the sum": (
            _like(_max_and_sum, "log_of_sum", by_log=True)
        ),
        "the sum comes before the maximum; return the maximum first": _sum_first,
        "the scores themselves are added up; add up exp(score - maximum)": _scores_added,
    },
)


def _draw_query_tile(generator: random.Random, size: int) -> tuple:
    head_dim = generator.randint(2, 4)
    lengths = [n for n in range(1, 2 + size // 3) if n != head_dim]
    num_queries = generator.choice(lengths)
    first = generator.randint(0, 1 + size // 2)
    num_keys = first + num_queries + generator.randint(0, 2)
    q, k, v = (_draw_tensor(generator, n, head_dim) for n in (num_queries, num_keys, num_keys))
    # some so large that their exponentials leave float32
    return q * generator.choice([1, 1, 1, 40]), k, v, first, generator.randint(1, 4)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    tile: int,
    *,
    scale: Callable[[int], float] = lambda head_dim: 1 / math.sqrt(head_dim),
    shrinks_out: bool = True,
    shrinks_sum: bool = True,
    turned: bool = False,
    own_max: bool = False,
    keeps_max: bool = True,
    divides: str = "at the end",
    shifts: bool = True,
    is_masked: bool = True,
    hidden: float = -math.inf,
    query_from: int | None = None,
    keys_from_zero: bool = False,
    sees_itself: bool = True,
    stops: str = "at the last query",
    keepdim: bool = True,
) -> Tensor:
    """Causal attention of queries from `first` on, tile by tile; the keywords make mistakes."""
    out = torch.zeros_like(q)
    total, m = torch.zeros(len(q), 1), torch.full((len(q), 1), -math.inf)
    if not keepdim:
        total, m = total[:, 0], m[:, 0]
    query = torch.arange(len(q))[:, None] + (first if query_from is None else query_from)
    seen = first + len(q)
    end = {"at the last query": seen, "before the diagonal": first, "never": len(k)}
    end |= {"from query 0": len(q), "one key early": seen - 1, "whole": seen // tile * tile}
    for start in range(0, end[stops], tile):
        keys, values = k[start : start + tile], v[start : start + tile]
        scores = q @ keys.T * scale(q.shape[1])
        key = torch.arange(len(keys)) + (0 if keys_from_zero else start)
        if is_masked:
            scores = scores.masked_fill(key > query if sees_itself else key >= query, hidden)
        tile_max = scores.amax(1, keepdim=keepdim)
        new_max = torch.maximum(m, tile_max)
        shift = tile_max if own_max else new_max
        p = torch.exp(scores - shift if shifts else scores)
        shrink = torch.exp(new_max - m if turned else m - new_max)
        shrink = shrink if shifts else torch.ones_like(m)
        if divides == "in each tile":
            p = p / p.sum(1, keepdim=True)
        total = (total * shrink if shrinks_sum else total) + p.sum(1, keepdim=keepdim)
        out = (out * shrink if shrinks_out else out) + p @ values
        out = out / total if divides == "by the sum so far" else out
        m = new_max if keeps_max else m
    return out / total if divides == "at the end" else out


def _softmax_of_each_tile(q: Tensor, k: Tensor, v: Tensor, first: int, tile: int) -> Tensor:
    out = torch.zeros_like(q)
    query = torch.arange(len(q))[:, None] + first
    for start in range(0, first + len(q), tile):
        scores = q @ k[start : start + tile].T / math.sqrt(q.shape[1])
        key = torch.arange(scores.shape[1]) + start
        p = scores.masked_fill(key > query, -math.inf).softmax(1).nan_to_num()
        out = out + p @ v[start : start + tile]
    return out


ATTEND = Exercise(
    solve=_attend,
    draw=_draw_query_tile,
    mistakes={
        "the scale is missing; divide the scores by sqrt(head_dim)": (
            _like(_attend, "no_scale", scale=lambda head_dim: 1.0)
        ),
        "the scores are divided by head_dim; divide by its square root": (
            _like(_attend, "by_width", scale=lambda head_dim: 1 / head_dim)
        ),
        "the output so far is not rescaled when the maximum grows": (
            _like(_attend, "out_not_shrunk", shrinks_out=False)
        ),
        "the sum so far is not rescaled when the maximum grows": (
            _like(_attend, "sum_not_shrunk", shrinks_sum=False)
        ),
        "neither sum nor output so far is rescaled when the maximum grows "
        "(if you do rescale them: the maximum before this tile must still be known there)": (
            _like(_attend, "nothing_shrunk", shrinks_out=False, shrinks_sum=False)
        ),
        "sum and output so far are rescaled the wrong way round; "
        "the factor is exp(old maximum - new maximum), at most 1": (
            _like(_attend, "turned", turned=True)
        ),
        "each tile's exponentials are taken for the tile's own maximum; "
        "take them for the maximum so far": _like(_attend, "own_max", own_max=True),
        "the new maximum is not kept for the next tile": (
            _like(_attend, "forgets_max", keeps_max=False)
        ),
        "the division by the sum at the end is missing": _like(_attend, "undivided", divides="no"),
        "the weights are divided by the sum of their tile; divide once, at the end": (
            _like(_attend, "divided_in_each_tile", divides="in each tile")
        ),
        "the output is divided by the sum so far in each tile; divide once, at the end": (
            _like(_attend, "divided_so_far", divides="by the sum so far")
        ),
        "softmax runs in each tile by itself, as if there were no other keys": (
            _softmax_of_each_tile
        ),
        "no maximum is taken off inside exp, so that large scores overflow": (
            _like(_attend, "no_shift", shifts=False)
        ),
        "there is no mask; a query must not see later keys of its last tiles": (
            _like(_attend, "no_mask", is_masked=False)
        ),
        "there is no mask, and later tiles of keys are taken too": (
            _like(_attend, "all_keys", is_masked=False, stops="never")
        ),
        "hidden scores become 0, and exp(0) is 1; set them to -inf": (
            _like(_attend, "hidden_zero", hidden=0.0)
        ),
        "the mask counts the queries from 0; the first one is number `first`": (
            _like(_attend, "queries_from_zero", query_from=0)
        ),
        "the mask counts the keys of each tile from 0; they begin with the tile": (
            _like(_attend, "keys_from_zero", keys_from_zero=True)
        ),
        "a query does not see its own key; key j is seen when j ≤ i": (
            _like(_attend, "not_itself", sees_itself=False)
        ),
        "the loop ends before the diagonal; go on to the last query's own key": (
            _like(_attend, "before_diagonal", stops="before the diagonal")
        ),
        "the loop takes only as many keys as there are queries; "
        "these have earlier ones before them, so go on to first + queries": (
            _like(_attend, "from_zero", stops="from query 0")
        ),
        "the loop ends one key early; the last query sees its own": (
            _like(_attend, "one_early", stops="one key early")
        ),
        "a last tile of fewer keys is left out": _like(_attend, "whole_tiles", stops="whole"),
        "the rows' maxima and sums have lost their last dimension; keepdim=True keeps it": (
            _like(_attend, "no_keepdim", keepdim=False)
        ),
    },
)


def _draw_gradient_tile(generator: random.Random, size: int) -> tuple:
    head_dim = generator.randint(2, 4)
    num_queries = generator.choice([n for n in range(1, 3 + size // 4) if n != head_dim])
    # a tile of a row of more keys; other numbers of them than of queries and columns
    kept = [n for n in range(1, 4 + size // 4) if n not in (head_dim, num_queries)]
    num_keys = generator.choice(kept)
    others = generator.randint(1, 3)
    scores = _draw_tensor(generator, num_queries, num_keys + others)
    v = _draw_tensor(generator, num_keys + others, head_dim)
    out, lse = scores.softmax(1) @ v, scores.logsumexp(1)
    grad_out = _draw_tensor(generator, num_queries, head_dim)
    return scores[:, :num_keys].clone(), v[:num_keys].clone(), out, lse, grad_out


def _grad_scores(
    scores: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    probabilities: Callable[[Tensor, Tensor], Tensor] = lambda s, lse: torch.exp(s - lse[:, None]),
    delta: Callable[[Tensor, Tensor], Tensor] = lambda do, o: (do * o).sum(1, keepdim=True),
    combine: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda p, dp, d: p * (dp - d),
) -> Tensor:
    """The gradient of a tile of scores; the keywords make mistakes."""
    p = probabilities(scores, lse)
    return combine(p, grad_out @ v.T, delta(grad_out, out))


def _scaled_again(scores, v, out, lse, grad_out) -> Tensor:
    return _grad_scores(scores, v, out, lse, grad_out) / math.sqrt(v.shape[1])


def _delta_of_the_tile(scores, v, out, lse, grad_out) -> Tensor:
    p, grad_p = torch.exp(scores - lse[:, None]), grad_out @ v.T
    return p * (grad_p - (p * grad_p).sum(1, keepdim=True))


def _softmax_of_the_tile(scores, v, out, lse, grad_out) -> Tensor:
    p, grad_p = scores.softmax(1), grad_out @ v.T
    return p * (grad_p - (p * grad_p).sum(1, keepdim=True))


GRAD_SCORES = Exercise(
    solve=_grad_scores,
    draw=_draw_gradient_tile,
    mistakes={
        "delta is missing: dS is P ∘ (dP - delta)": (
            _like(_grad_scores, "no_delta", combine=lambda p, dp, d: p * dp)
        ),
        "delta is summed over the keys of this tile, and the row has more; "
        "rowsum(dO ∘ O) knows all of them": _delta_of_the_tile,
        "softmax and delta see the keys of this tile alone; lse and O know all of them": (
            _softmax_of_the_tile
        ),
        "the softmax runs over this tile alone; P is exp(score - lse)": (
            _like(_grad_scores, "softmax_of_tile", probabilities=lambda s, lse: s.softmax(1))
        ),
        "the factor P is missing: dS is P ∘ (dP - delta)": (
            _like(_grad_scores, "no_p", combine=lambda p, dp, d: dp - d)
        ),
        "delta stands outside of the brackets: dS is P ∘ (dP - delta)": (
            _like(_grad_scores, "no_brackets", combine=lambda p, dp, d: p * dp - d)
        ),
        "the sign is wrong: dS is P ∘ (dP - delta)": (
            _like(_grad_scores, "sign", combine=lambda p, dp, d: p * (d - dp))
        ),
        "delta is added: dS is P ∘ (dP - delta)": (
            _like(_grad_scores, "added", combine=lambda p, dp, d: p * (dp + d))
        ),
        "delta is a mean; take the sum of each row of dO ∘ O": (
            _like(_grad_scores, "mean", delta=lambda do, o: (do * o).mean(1, keepdim=True))
        ),
        "delta is summed over the queries; each row has its own, dim=-1": (
            _like(_grad_scores, "over_queries", delta=lambda do, o: (do * o).sum(0, keepdim=True))
        ),
        "delta is one sum over all queries; each row has its own, dim=-1": (
            _like(_grad_scores, "one_delta", delta=lambda do, o: (do * o).sum())
        ),
        "lse is not taken off: P is exp(score - lse)": (
            _like(_grad_scores, "no_lse", probabilities=lambda s, lse: torch.exp(s))
        ),
        "the exponent is turned round: P is exp(score - lse)": (
            _like(_grad_scores, "turned", probabilities=lambda s, lse: torch.exp(lse[:, None] - s))
        ),
        "lse needs a dimension for the keys: lse[:, None]": (
            _like(_grad_scores, "flat_lse", probabilities=lambda s, lse: torch.exp(s - lse))
        ),
        "delta has lost its last dimension; keepdim=True keeps it": (
            _like(_grad_scores, "flat_delta", delta=lambda do, o: (do * o).sum(1))
        ),
        "the result is divided by sqrt(head_dim); these scores are scaled, "
        "and the factor belongs to dQ and dK": _scaled_again,
        "P itself is returned; the result is P ∘ (dP - delta)": (
            _like(_grad_scores, "p_alone", combine=lambda p, dp, d: p)
        ),
    },
)


def check_max_and_sum(attempt: Callable) -> None:
    """Check `max_and_sum(tiles)`: a list of (scores,) -> (2,), the maximum and the sum."""
    check(ONLINE_SOFTMAX, attempt)


def check_attend(attempt: Callable) -> None:
    """Check `attend(q, k, v, first, tile)`: (queries, d), twice (keys, d) -> (queries, d)."""
    check(ATTEND, attempt)


def check_grad_scores(attempt: Callable) -> None:
    """Check `grad_scores(scores, v, out, lse, grad_out)`: -> (queries, keys), the tile's dS."""
    check(GRAD_SCORES, attempt)
