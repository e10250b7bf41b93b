"""Exercises of notebook 06: online softmax, the kernels, fragments, delta, and a schedule."""

from __future__ import annotations

import functools
import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.lessons.calls import call
from lib.lessons.exercise import (
    TIME_LIMIT,
    Exercise,
    check,
    difference,
    name_of,
    report,
    result_of,
    verdict,
)
from lib.lessons.flash_attention import solutions_triton as solutions
from lib.lessons.flash_attention.kernel_exercises import (
    BACKWARD,
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    CAUSAL,
    CAUSAL_TASK,
    FORWARD,
    FORWARD_TASK,
    KEYS_TASK,
    QUERIES_TASK,
    launching,
)
from lib.lessons.flash_attention.kernel_task import check_kernel
from lib.lessons.flash_attention.schedule import TILES, busy_share, run_order, show_spans


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
        count = len(self.tensors)
        return f"iter({self.tensors})" if count < MANY_TILES else f"<{count} tiles of scores>"


# With this many tiles, their copies take more room than one tile needs.
MANY_TILES = 30
MOST_NUMBERS = 40


class _Room(TorchDispatchMode):
    """Raises MemoryError where the tensors that operations made, and are there, are too large."""

    def __init__(self, tiles: Tiles) -> None:
        super().__init__()
        # those that are given don't count
        self.given = {tile.data_ptr() for tile in tiles.tensors}
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.made.append(weakref.ref(result))
            there = [tensor for one in self.made if (tensor := one()) is not None]
            self.made = [weakref.ref(tensor) for tensor in there]
            # several may be views of one
            sizes = {tensor.data_ptr(): tensor.numel() for tensor in there}
            numbers = sum(size for place, size in sizes.items() if place not in self.given)
            if numbers > MOST_NUMBERS:
                raise MemoryError(
                    f"{numbers} numbers are kept; there is room for a few of one tile"
                )
        return result


def in_little_room(attempt: Callable) -> Callable[[Tiles], Tensor]:
    """Return `attempt` as a function that may not keep copies of many tiles."""

    @functools.wraps(attempt)
    def run(tiles: Tiles) -> Tensor:
        with _Room(tiles):
            return attempt(tiles)

    return run


def _draw_score_tiles(generator: random.Random, size: int) -> tuple:
    num_tiles = generator.randint(1, 2 + size // 4) if size < 12 else MANY_TILES
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


# The share of the time in which a right schedule keeps the tensor cores busy; two warpgroups that
# alternate get to 84%, and to 89% if each issues its next scores ahead.
BUSY = 0.8


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
    check(ONLINE_SOFTMAX, in_little_room(attempt))


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
    report(text, name_of(function), BACKWARD.tier)
    return function if result_of(text) == "passed" else solutions.attention_backward


def check_schedule(schedule: Callable[[], str]) -> None:
    """Check the order of matmuls that `schedule()` returns, and draw who works when."""

    def attempt() -> str:
        return scheduled(schedule)

    attempt.__name__, attempt.schedule = name_of(schedule), schedule  # type: ignore[attr-defined]
    check(SCHEDULE, attempt)
    try:
        spans = call(lambda: run_order(schedule()), (), TIME_LIMIT)
    except NotImplementedError:
        return
    if not isinstance(spans, list):
        # the verdict says so
        return
    show_spans(spans, "Your schedule")
