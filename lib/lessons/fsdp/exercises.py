"""Exercises of notebook 09: shards of gradients, ZeRO-3 and tensor parallelism of an MLP, clipping,
orders of a step, checkpoints.
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import random
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.lessons.calls import call
from lib.lessons.differences import is_array
from lib.lessons.exercise import (
    TIME_LIMIT,
    Exercise,
    check,
    check_on_processes,
    difference,
    name_of,
    report,
    result_of,
    verdict,
)
from lib.lessons.fsdp.orders import Costs, Event, play
from lib.lessons.fsdp.ranks import mlp_alone, run_mlp_attempt, train_alone, train_attempt
from lib.lessons.ranks import (
    MOST_OFF,
    Threads,
    compared_with,
    run_on_threads,
    whole_numbers,
)


def _returned(value: Any) -> Any:
    if value is None:
        raise TypeError("the result is None; is a `return` missing?")
    return value


# Exercise 1


def _draw_gradients(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    length = ranks * generator.randint(1, 2 + size // 3) + generator.choice([0, 0, 1])
    return ([whole_numbers(generator, length) for _ in range(ranks)],)


def reduce_scatter(gradients: Sequence[Tensor]) -> Tensor:
    ranks, count = len(gradients), len(gradients[0])
    length = -(-count // ranks)
    padded = torch.zeros(ranks * length)
    padded[:count] = sum(gradients) / ranks
    return padded.view(ranks, length)


REDUCE_SCATTER = Exercise(
    reduce_scatter,
    _draw_gradients,
    {
        "a slice is the sum over the ranks; divide it by their number": (
            "sum(gradients) / ranks",
            "sum(gradients)",
        ),
        "each rank gets a slice of its own gradient; it is the mean over all ranks": (
            "padded[:count] = sum(gradients) / ranks",
            "padded[:count] = torch.cat(\n"
            "        [gradients[r][r * length : (r + 1) * length] for r in range(ranks)]\n"
            "    )",
        ),
        "elements are dealt to the ranks one by one; a slice is contiguous": (
            "padded.view(ranks, length)",
            "padded.view(length, ranks).T",
        ),
        "the last elements are cut off; pad to a multiple of the ranks": (
            "-(-count // ranks)",
            "count // ranks\n    count = ranks * length\n"
            "    gradients = [gradient[:count] for gradient in gradients]",
        ),
        "the padding comes first; it belongs to the end": ("padded[:count]", "padded[-count:]"),
        "every rank keeps the whole mean, as after an all-reduce; it keeps a slice": (
            "padded.view(ranks, length)",
            "padded[:count].repeat(ranks, 1)",
        ),
    },
)


# Exercise 2


def _draw_mlp(generator: random.Random, size: int) -> tuple:
    ranks, d_model = generator.randint(2, 4), 3
    d_ff = ranks * generator.randint(1, 2 if size > 4 else 1)
    # fewer than d_ff, so that only weights are as large as a matrix
    rows = generator.randint(1, min(2, d_ff - 1))
    whole = whole_numbers(generator, 2 * d_model * d_ff)
    x = whole_numbers(generator, ranks, rows, d_model)
    return x, whole, whole_numbers(generator, ranks, rows, d_model), d_ff


def on_threads(attempt: Callable) -> Callable[[Tensor, Tensor, Tensor, int], dict[str, Any]]:
    """A function that runs `attempt` on ranks, and counts what they send.

    What forward gathered is overwritten before backward begins, and must not be held until then.

    Args:
        attempt: `attempt(x, shard, d_ff, ranks)` -> output, backward.
    """

    @functools.wraps(attempt)
    def played(x: Tensor, whole: Tensor, grad_y: Tensor, d_ff: int) -> dict[str, Any]:
        def job(ranks: Threads) -> dict[str, Any]:
            shard = whole.chunk(ranks.count)[ranks.number].clone()
            own_x = x[ranks.number]
            y, backward = _returned(attempt(own_x, shard, d_ff, ranks))
            ranks.poison()
            # or a copy: no other tensor is as large as one matrix or both
            is_kept = ranks.forget_gathered() or any(
                size in (len(whole) // 2, len(whole))
                and place not in (shard.data_ptr(), own_x.data_ptr())
                for size, place in _sizes_held(backward)
            )
            found = {"y": _listed(y.tolist()), "whole matrices held until backward": is_kept}
            grad_x, grad_shard = _returned(_run_backward(backward, grad_y[ranks.number]))
            found |= ranks.calls
            found["grad_x"] = _listed(grad_x.tolist())
            found["grad_shard"] = _listed(grad_shard.tolist())
            return found

        found = run_on_threads(job, len(x))
        return {f"{key} of rank {r}": one[key] for r, one in enumerate(found) for key in one}

    return played


# What is counted on a rank -> a sentence about a wrong count.
COUNTED = {
    "whole matrices held until backward of rank (\\d+)": (
        "rank {} still holds a whole matrix, or a copy of one, when backward begins"
    ),
    "matmuls are those of a part of rank (\\d+)": (
        "rank {} computes with more than its parts of the matrices"
    ),
}


def _words(yours: Any, expected: Any) -> str:
    """The first wrong value, or a sentence about what a rank should not do."""
    found = difference(yours, expected)
    for pattern, sentence in COUNTED.items():
        if match := re.match(f"'{pattern}'", found):
            return sentence.format(match[1])
    return found


def _run_backward(backward: Callable, grad_y: Tensor) -> Any:
    try:
        return backward(grad_y)
    except RuntimeError as error:
        # a saved tensor, or the views of one, that were overwritten
        if "modified" not in str(error) or "inplace" not in str(error):
            raise
        told = "autograd kept forward's matrices, which are gone by now; gather them again"
        raise RuntimeError(told) from error


def _sizes_held(value: Any, seen: set[int] | None = None) -> Iterator[tuple[int, Any]]:
    """How many numbers each tensor, array or list has that a function or an object holds.

    With each its address, if it has one. Not what is global, as modules and classes are.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, HELD_BY_ALL):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value.numel(), value.data_ptr()
        return
    if is_array(value):
        yield value.size, value.__array_interface__["data"][0]
        return
    if isinstance(value, (bytes, bytearray)):
        yield len(value) // 4, None
        return
    if isinstance(value, (list, tuple)):
        yield _count(value), None
    if isinstance(value, types.FunctionType):
        # not its globals
        inside = [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    else:
        inside = gc.get_referents(value)
    for item in inside:
        yield from _sizes_held(item, seen)


# What many hold, and no attempt as its own.
HELD_BY_ALL = (types.ModuleType, type, types.CodeType, types.BuiltinFunctionType, Threads)


def _count(values: Any) -> int:
    """The numbers in a list of lists."""
    if isinstance(values, (list, tuple)):
        return sum(map(_count, values))
    return isinstance(values, (int, float))


def _listed(values: Any) -> Any:
    """Lists in which thirds are equal however they were computed, and so is what is gone."""
    if isinstance(values, list):
        return [_listed(value) for value in values]
    return "nan" if math.isnan(values) else round(values, 2)


@on_threads
def sharded_mlp(x: Tensor, shard: Tensor, d_ff: int, ranks: Threads) -> tuple[Tensor, Callable]:
    def matrices():
        w1, w2 = ranks.all_gather(shard).chunk(2)
        return w1.view(d_ff, -1), w2.view(-1, d_ff)

    # forward
    w1, w2 = matrices()
    h = x @ w1.T
    y = h.relu() @ w2.T
    del w1, w2

    def backward(grad_y):
        w1, w2 = matrices()
        grad_h = (grad_y @ w2) * (h > 0)
        grad_w1, grad_w2 = grad_h.T @ x, grad_y.T @ h.relu()
        whole = torch.cat([grad_w1.flatten(), grad_w2.flatten()])
        return grad_h @ w1, ranks.reduce_scatter(whole) / ranks.count

    return y, backward


SHARDED_MLP = Exercise(
    sharded_mlp,
    _draw_mlp,
    {
        "the gradient of the shard is a sum over the ranks; divide it by their number": (
            "ranks.reduce_scatter(whole) / ranks.count",
            "ranks.reduce_scatter(whole)",
        ),
        "the number of ranks is fixed at 2; it is `ranks.count`": (
            "ranks.reduce_scatter(whole) / ranks.count",
            "ranks.reduce_scatter(whole) / 2",
        ),
        "each matrix is scattered by itself; a shard is a slice of both, sent in one message": (
            "ranks.reduce_scatter(whole) / ranks.count",
            "torch.cat(\n"
            "            [ranks.reduce_scatter(part) for part in whole.chunk(2)]\n"
            "        ) / ranks.count",
        ),
        "the gradient of the shard is this rank's own; reduce-scatter it": (
            "ranks.reduce_scatter(whole) / ranks.count",
            "whole.chunk(ranks.count)[ranks.number]",
        ),
        "backward uses the matrices of forward, which are gone by then; gather them again": (
            "    del w1, w2\n\n    def backward(grad_y):\n        w1, w2 = matrices()\n",
            "\n    def backward(grad_y):\n",
        ),
        "backward gathers again, but holds forward's matrices until then; let no name keep them": (
            "    del w1, w2\n\n    def backward(grad_y):\n",
            "    held = w1, w2\n\n    def backward(grad_y):\n        len(held)\n",
        ),
        "backward keeps a copy of forward's matrices; a rank must not hold them in between": (
            "    del w1, w2\n\n    def backward(grad_y):\n        w1, w2 = matrices()\n",
            "    w1, w2 = w1.clone(), w2.clone()\n\n    def backward(grad_y):\n",
        ),
        "each matrix is gathered by itself; both are in one shard, and one message brings them": (
            "    w1, w2 = matrices()\n    h = x @ w1.T\n    y = h.relu() @ w2.T\n    del w1, w2",
            "    h = x @ matrices()[0].T\n    y = h.relu() @ matrices()[1].T",
        ),
        "the ReLU is missing in backward: where h was not above 0, no gradient passes": (
            " * (h > 0)",
            "",
        ),
        "the gradient of W2 takes h before its ReLU": ("grad_y.T @ h.relu()", "grad_y.T @ h"),
        "the gradient of x leaves out the ReLU": ("return grad_h @ w1", "return grad_y @ w2 @ w1"),
        "the gradient of x is divided by the number of ranks; each rank has its own x": (
            "return grad_h @ w1",
            "return grad_h @ w1 / ranks.count",
        ),
        "W1 is viewed as its transpose; its rows are hidden units": (
            "w1.view(d_ff, -1)",
            "w1.view(-1, d_ff).T",
        ),
        "W2 is viewed as its transpose; its columns are hidden units": (
            "w2.view(-1, d_ff)",
            "w2.view(d_ff, -1).T",
        ),
        "the gradient of W1 is transposed; it has the shape of W1": (
            "grad_h.T @ x",
            "x.T @ grad_h",
        ),
        "the gradient of W2 is transposed; it has the shape of W2": (
            "grad_y.T @ h.relu()",
            "h.relu().T @ grad_y",
        ),
        "the gradients are packed in the other order than the matrices": (
            "[grad_w1.flatten(), grad_w2.flatten()]",
            "[grad_w2.flatten(), grad_w1.flatten()]",
        ),
    },
    tier="core",
    trials=40,
    describe=_words,
)


# Exercise 3


def _draw_norm(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    shards = whole_numbers(generator, ranks, 1 + size)
    shards[0, 0], shards[1, 0] = 3.0, 4.0
    vector = whole_numbers(generator, 3)
    vector[0] = 5.0
    norm = (shards.square().sum() + vector.square().sum()).sqrt().item()
    # mostly clipped, now and then below the limit
    return shards, vector, norm * generator.choice([0.25, 0.5, 0.9, 2.0])


def clipping(attempt: Callable) -> Callable[[Tensor, Tensor, float], Tensor]:
    """A function that clips on ranks with `attempt(shard, vector, max_norm, ranks)`."""

    @functools.wraps(attempt)
    def played(shards: Tensor, vector: Tensor, max_norm: float) -> Tensor:
        def job(ranks: Threads) -> Tensor:
            own = shards[ranks.number].clone()
            parts = _returned(attempt(own, vector.clone(), max_norm, ranks))
            return torch.cat([torch.as_tensor(part).reshape(-1) for part in parts])

        return torch.stack(run_on_threads(job, len(shards)))

    return played


@clipping
def clip(shard: Tensor, vector: Tensor, max_norm: float, ranks: Threads) -> tuple[Tensor, Tensor]:
    square = ranks.all_reduce(shard.square().sum())
    norm = (square + vector.square().sum()).sqrt()
    factor = min(1.0, max_norm / norm)
    return factor * shard, factor * vector


CLIP = Exercise(
    clip,
    _draw_norm,
    {
        "each rank takes the norm of its own shard; then they scale differently": (
            "ranks.all_reduce(shard.square().sum())",
            "shard.square().sum()",
        ),
        "norms are added up over the ranks; add their squares": (
            "ranks.all_reduce(shard.square().sum())",
            "ranks.all_reduce(shard.norm()).square()",
        ),
        "norms are added up; add their squares, and take the root": (
            "    square = ranks.all_reduce(shard.square().sum())\n"
            "    norm = (square + vector.square().sum()).sqrt()",
            "    norm = ranks.all_reduce(shard.norm()) + vector.norm()",
        ),
        "the shards themselves are added up over the ranks; add their squares": (
            "ranks.all_reduce(shard.square().sum())",
            "ranks.all_reduce(shard).square().sum()",
        ),
        "shard and vector are each clipped by their own norm; take one norm of both": (
            "    norm = (square + vector.square().sum()).sqrt()\n"
            "    factor = min(1.0, max_norm / norm)\n"
            "    return factor * shard, factor * vector",
            "    own = min(1.0, max_norm / vector.norm())\n"
            "    return min(1.0, max_norm / square.sqrt()) * shard, own * vector",
        ),
        "the squares are averaged over the ranks; they are parts of one sum": (
            "ranks.all_reduce(shard.square().sum())",
            "ranks.all_reduce(shard.square().sum()) / ranks.count",
        ),
        "the factor is norm / max_norm; it is max_norm / norm": (
            "max_norm / norm",
            "norm / max_norm",
        ),
        "the vector counts once for each rank; all have the same one": (
            "ranks.all_reduce(shard.square().sum())\n    norm = (square + vector.square().sum())",
            "ranks.all_reduce(shard.square().sum() + vector.square().sum())\n    norm = square",
        ),
        "the vector is left out of the norm": (" + vector.square().sum()", ""),
        "the vector is not scaled": ("factor * vector", "vector"),
        "the root is missing: the norm is the root of the sum of squares": (".sqrt()", ""),
        "gradients below the limit are scaled up; leave them alone": ("min(1.0, ", "float("),
    },
    tier="core",
    trials=60,
)


# Exercise 4


def _draw_blocks(generator: random.Random, size: int) -> tuple:
    compute, network = generator.choice([2.0, 4.0]), generator.choice([0.5, 1.0, 2.0, 8.0])
    blocks = generator.randint(2, 3 + size // 4)
    # gradients in as many bytes as the parameters gathered, or in twice as many
    reduce = network * generator.choice([1.0, 2.0])
    return blocks, Costs.equal(
        blocks, forward=compute, backward=2 * compute, gather=network, reduce=reduce
    )


def timed(attempt: Callable) -> Callable[[int, Costs], dict[str, Any]]:
    """A function that plays the order given by `attempt(blocks)` on a clock.

    An order that is as fast as the solution's and holds no more is as right.
    """

    @functools.wraps(attempt)
    def played(blocks: int, costs: Costs) -> dict[str, Any]:
        best, found = play(prefetching(blocks), costs), play(_returned(attempt(blocks)), costs)
        return {
            "what is wrong": found.fault,
            "blocks gathered at once": max(found.most, best.most),
            "milliseconds": max(round(found.ms, 6), round(best.ms, 6)),
        }

    return played


def _fault(yours: Any, expected: Any) -> str:
    """The fault of an order as a sentence; of a complete one, the first wrong value."""
    if isinstance(yours, dict) and yours["what is wrong"] != "nothing":
        return yours["what is wrong"]
    return difference(yours, expected)


def _just_in_time(blocks: int) -> list[Event]:
    events: list[Event] = []
    for block in range(blocks):
        events += [("gather", block), ("forward", block), ("free", block)]
    for block in reversed(range(blocks)):
        events += [("gather", block), ("backward", block), ("reduce", block), ("free", block)]
    return events


@timed
def order(blocks: int) -> list[Event]:
    events = [("gather", 0)]
    # forward
    for block in range(blocks):
        if block + 1 < blocks:
            events.append(("gather", block + 1))
        events.append(("forward", block))
        if block + 1 < blocks:
            events.append(("free", block))
    # backward
    for block in reversed(range(blocks)):
        if block > 0:
            events.append(("gather", block - 1))
        events += [("backward", block), ("reduce", block), ("free", block)]
    return events


# The order of `lib.fsdp.FSDP`.
prefetching: Callable[[int], list[Event]] = order.__wrapped__  # type: ignore[attr-defined]

ORDER = Exercise(
    order,
    _draw_blocks,
    {
        "each block is gathered just before it runs, and waits for its message; gather the next "
        "block before this one runs": timed(_just_in_time),
        "in forward block b + 1 is gathered once block b has run; gather it before b runs": (
            '            events.append(("gather", block + 1))\n        events.append(("forward", '
            "block))\n",
            '            pass\n        events.append(("forward", block))\n'
            '        if block + 1 < blocks:\n            events.append(("gather", block + 1))\n',
        ),
        "in backward block b - 1 is gathered once block b has run; gather it before b runs": (
            '            events.append(("gather", block - 1))\n        events += [("backward", '
            'block), ("reduce", block), ("free", block)]',
            '            pass\n        events += [("backward", block), ("reduce", block)]\n'
            '        events += [("free", block)]\n'
            '        if block > 0:\n            events.append(("gather", block - 1))',
        ),
        "in backward block b - 1 is gathered once block b has run, if before its gradient is sent; "
        "gather it before b runs": (
            '            events.append(("gather", block - 1))\n        events += [("backward", '
            'block), ("reduce", block), ("free", block)]',
            '            pass\n        events += [("backward", block)]\n'
            '        events += [("gather", block - 1)] if block > 0 else []\n'
            '        events += [("reduce", block), ("free", block)]',
        ),
        "nothing is freed in forward": (
            '            events.append(("free", block))',
            "            pass",
        ),
        "every block stays gathered until backward, which gathers none again; free each block but "
        "the last once it has run forward": (
            '            events.append(("free", block))\n    # backward\n'
            "    for block in reversed(range(blocks)):\n        if block > 0:\n"
            '            events.append(("gather", block - 1))\n',
            "            pass\n    for block in reversed(range(blocks)):\n",
        ),
        "three blocks are gathered at once: one is gathered too early, or one is freed too late": (
            '("forward", block))\n        if block + 1 < blocks:\n'
            '            events.append(("free", block))',
            '("forward", block))\n        if block > 0:\n'
            '            events.append(("free", block - 1))',
        ),
        "gradients are sent only after the whole backward pass": (
            '("reduce", block), ("free", block)]\n',
            '("free", block)]\n    events += [("reduce", b) for b in range(blocks)]\n',
        ),
        "a gradient is sent only after the next block has run; send it at once": (
            '("backward", block), ("reduce", block), ("free", block)]\n',
            '("backward", block), ("free", block)]\n        if block + 1 < blocks:\n'
            '            events.append(("reduce", block + 1))\n    events.append(("reduce", 0))\n',
        ),
        "backward runs from the first block to the last": (
            "in reversed(range(blocks)):\n        if block > 0:",
            "in range(blocks):\n        if block > 0:",
        ),
        "the last block is freed after forward, and needed again at once": (
            '        if block + 1 < blocks:\n            events.append(("free", block))',
            '        events.append(("free", block))\n        if block + 1 == blocks:\n'
            '            events.append(("gather", block))',
        ),
    },
    tier="core",
    trials=40,
    describe=_fault,
)


# Exercise 5


def _draw_uneven(generator: random.Random, size: int) -> tuple:
    blocks = 2 + generator.randint(1, 2 + size // 3)
    sizes = [generator.choice([1, 1, 2, 4]) for _ in range(blocks)]
    # may be too small for two neighbors
    return sizes, max(sizes) + generator.choice([0, 1, 2, 4])


def _uneven_costs(sizes: Sequence[int]) -> Costs:
    # sending takes as long as the parameters of a block, computing 2 and 4
    gather = tuple(float(size) for size in sizes)
    return Costs(gather, (2.0,) * len(sizes), (4.0,) * len(sizes), gather)


def limited(attempt: Callable) -> Callable[[Sequence[int], int], dict[str, Any]]:
    """A function that plays the order of `attempt(sizes, limit)`: what is wrong, and the room."""

    @functools.wraps(attempt)
    def played(sizes: Sequence[int], limit: int) -> dict[str, Any]:
        found = play(_returned(attempt(sizes, limit)), _uneven_costs(sizes), sizes)
        return {"what is wrong": found.fault, "within the limit": found.most <= limit}

    return played


@limited
def one_block_ahead(sizes: Sequence[int], limit: int) -> list[Event]:
    """The order of exercise 4, whatever the limit."""
    return prefetching(len(sizes))


@limited
def fast_order(sizes: Sequence[int], limit: int) -> list[Event]:
    blocks = len(sizes)
    # the passes in the order in which blocks run: 0, 1, …, last, last, …, 1, 0
    runs = [("forward", b) for b in range(blocks)]
    runs += [("backward", b) for b in reversed(range(blocks))]
    events, held, wanted = [], set(), 0
    for index, (kind, block) in enumerate(runs):
        # as far ahead as there is room; the last block stays between its two runs
        wanted = max(wanted, index)
        while wanted < len(runs):
            ahead = runs[wanted][1]
            is_needed_later = any(b == ahead for _, b in runs[index:wanted])
            if not is_needed_later and ahead not in held:
                if sum(sizes[b] for b in held) + sizes[ahead] > limit:
                    break
                held.add(ahead)
                events.append(("gather", ahead))
            elif is_needed_later and ahead != blocks - 1:
                break
            wanted += 1
        events.append((kind, block))
        if kind == "backward":
            events.append(("reduce", block))
        if kind == "backward" or block < blocks - 1:
            events.append(("free", block))
            held.discard(block)
    return events


def _milliseconds(played: Callable) -> float:
    """The time of a fixed case, by the clock of `play`."""
    sizes = [4, 1, 1, 2, 1, 1, 1, 4]
    return play(played.__wrapped__(list(sizes), 8), _uneven_costs(sizes), sizes).ms  # type: ignore[attr-defined]


FAST_ORDER = Exercise(
    fast_order,
    _draw_uneven,
    {
        "one block is gathered ahead whatever the limit; look whether there is room": (
            one_block_ahead
        ),
        "more is gathered at once than the limit allows": ("> limit", "> limit + 10**6"),
        "blocks are not freed once they have run": (
            '            events.append(("free", block))\n            held.discard(block)',
            "            pass",
        ),
        "gradients are never sent": (
            '            events.append(("reduce", block))',
            "            pass",
        ),
    },
    tier="open",
    trials=40,
    describe=_fault,
    measure=_milliseconds,
    unit="ms",
    baseline=one_block_ahead,
)


# Exercise 6


def _draw_stack(generator: random.Random, size: int) -> tuple:
    layers = generator.randint(2, 8 + size)
    return layers, generator.choice([1, 2, 3]), generator.choice([1, 2, 4, 12])


def weighing(attempt: Callable) -> Callable[[int, int, int], dict[str, Any]]:
    """A function that weighs the size given by `attempt(layers, boundary, inside)`.

    Another size that keeps as little is as right.
    """

    @functools.wraps(attempt)
    def played(layers: int, boundary: int, inside: int) -> dict[str, Any]:
        def kept(size: int) -> int:
            return math.ceil(layers / size) * boundary + size * inside

        size = _returned(attempt(layers, boundary, inside))
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"the size must be an int, got {size!r}")
        size = operator.index(size)
        if not 1 <= size <= layers:
            raise ValueError(f"the size must be between 1 and {layers}, got {size}")
        return {"bytes kept": kept(size)}

    return played


@weighing
def best_size(layers: int, boundary: int, inside: int) -> int:
    def kept(size):
        return -(-layers // size) * boundary + size * inside

    return min(range(1, layers + 1), key=kept)


BEST_SIZE = Exercise(
    best_size,
    _draw_stack,
    {
        "the size is √L whatever a layer keeps; weigh a boundary against an inside": (
            "min(range(1, layers + 1), key=kept)",
            "min(layers, max(1, round(layers**0.5)))",
        ),
        "the last, shorter segment isn't counted as a whole one: there are ⌈L/k⌉": (
            "-(-layers // size)",
            "layers / size",
        ),
        "the last, shorter segment isn't counted at all; there are ⌈L/k⌉": (
            "-(-layers // size)",
            "layers // size",
        ),
        "the root of the formula is rounded down; weigh the whole numbers on both sides of it": (
            "min(range(1, layers + 1), key=kept)",
            "min(layers, max(1, int((layers * boundary / inside) ** 0.5)))",
        ),
        "one checkpoint around all layers is never tried; `range` stops before its end": (
            "range(1, layers + 1)",
            "range(1, layers)",
        ),
        "the bytes kept are returned, not the size that keeps the least": (
            "min(range(1, layers + 1), key=kept)",
            "min(map(kept, range(1, layers + 1)))",
        ),
        "the number of segments is returned, not the layers in one": (
            "min(range(1, layers + 1), key=kept)",
            "-(-layers // min(range(1, layers + 1), key=kept))",
        ),
        "boundary and inside are mixed up": (
            "-(-layers // size) * boundary + size * inside",
            "-(-layers // size) * inside + size * boundary",
        ),
        "only sizes that divide the layers are tried; the last segment may be shorter": (
            "min(range(1, layers + 1), key=kept)",
            "min((k for k in range(1, layers + 1) if layers % k == 0), key=kept)",
        ),
        "every layer is a checkpoint of its own": ("min(range(1, layers + 1), key=kept)", "1"),
        "one checkpoint around everything keeps everything again in backward": (
            "min(range(1, layers + 1), key=kept)",
            "layers",
        ),
    },
    describe=difference,
)


# Exercise 7


def _draw_whole_mlp(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    # a part of d_ff is never as long as d_model or a part of it, so that a wrong cut does not fit
    d_model, d_ff = ranks, ranks * (ranks + generator.randint(1, 2))
    rows = generator.randint(1, 2)
    shapes = (rows, d_model), (d_ff, d_model), (d_model, d_ff), (rows, d_model)
    return *(whole_numbers(generator, *shape) for shape in shapes), ranks


# A rank may compute this many times its share, since backward may compute h again.
MOST_SHARES = 1.5


class _Matmuls(TorchDispatchMode):
    """Counts the multiply-adds of matmuls."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in ("mm", "addmm", "bmm", "mv"):
            left = args[1] if op.overloadpacket.__name__ == "addmm" else args[0]
            self.count += result.numel() * left.shape[-1]
        return result


def on_all_ranks(attempt: Callable) -> Callable[..., dict[str, Any]]:
    """A function that runs `attempt` on ranks with the same input, and counts their all-reduces.

    And it tells whether a rank computes with no more than its parts of the matrices.

    Args:
        attempt: `attempt(x, w1, w2, ranks)` -> output, backward.
    """

    @functools.wraps(attempt)
    def played(x: Tensor, w1: Tensor, w2: Tensor, grad_y: Tensor, count: int) -> dict[str, Any]:
        # forward has two matmuls, backward four
        share = 6 * len(x) * w1.numel() / count

        def job(ranks: Threads) -> dict[str, Any]:
            with _Matmuls() as matmuls:
                y, backward = _returned(attempt(x.clone(), w1.clone(), w2.clone(), ranks))
                found = {"y": y.tolist(), "all-reduces in forward": ranks.calls["all-reduces"]}
                grad_x, grad_w1, grad_w2 = _returned(backward(grad_y.clone()))
            found["matmuls are those of a part"] = matmuls.count <= MOST_SHARES * share
            found |= {"grad_x": grad_x.tolist(), "all-reduces in both": ranks.calls["all-reduces"]}
            return found | {"grad_w1": grad_w1.tolist(), "grad_w2": grad_w2.tolist()}

        found = run_on_threads(job, count)
        return {f"{key} of rank {r}": one[key] for r, one in enumerate(found) for key in one}

    return played


@on_all_ranks
def tensor_parallel_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, ranks: Threads
) -> tuple[Tensor, Callable]:
    # this rank's hidden units: rows of W1, columns of W2
    w1 = w1.chunk(ranks.count, dim=0)[ranks.number]
    w2 = w2.chunk(ranks.count, dim=1)[ranks.number]

    # forward
    h = x @ w1.T  # (tokens, d_ff / ranks)
    y = ranks.all_reduce(h.relu() @ w2.T)

    def backward(grad_y):
        grad_h = (grad_y @ w2) * (h > 0)
        grad_w1, grad_w2 = grad_h.T @ x, grad_y.T @ h.relu()
        return ranks.all_reduce(grad_h @ w1), grad_w1, grad_w2

    return y, backward


@on_all_ranks
def _compute_with_the_whole(
    x: Tensor, w1: Tensor, w2: Tensor, ranks: Threads
) -> tuple[Tensor, Callable]:
    h = x @ w1.T
    y = ranks.all_reduce(h.relu() @ w2.T / ranks.count)

    def backward(grad_y):
        grad_h = (grad_y @ w2) * (h > 0)
        grad_w1 = (grad_h.T @ x).chunk(ranks.count, dim=0)[ranks.number]
        grad_w2 = (grad_y.T @ h.relu()).chunk(ranks.count, dim=1)[ranks.number]
        return ranks.all_reduce(grad_h @ w1 / ranks.count), grad_w1, grad_w2

    return y, backward


TENSOR_PARALLEL_MLP = Exercise(
    tensor_parallel_mlp,
    _draw_whole_mlp,
    {
        "every rank computes with the whole matrices, and a share of the result is added up; a "
        "rank has room for its own parts alone": _compute_with_the_whole,
        "nothing is sent; y and the gradient of x are sums over the ranks": (
            "    y = ranks.all_reduce(h.relu() @ w2.T)\n\n"
            "    def backward(grad_y):\n"
            "        grad_h = (grad_y @ w2) * (h > 0)\n"
            "        grad_w1, grad_w2 = grad_h.T @ x, grad_y.T @ h.relu()\n"
            "        return ranks.all_reduce(grad_h @ w1)",
            "    y = h.relu() @ w2.T\n\n"
            "    def backward(grad_y):\n"
            "        grad_h = (grad_y @ w2) * (h > 0)\n"
            "        grad_w1, grad_w2 = grad_h.T @ x, grad_y.T @ h.relu()\n"
            "        return grad_h @ w1",
        ),
        "y is only what this rank's hidden units give; add it up over the ranks": (
            "ranks.all_reduce(h.relu() @ w2.T)",
            "h.relu() @ w2.T",
        ),
        "the gradient of x is only what this rank's hidden units give; add it up over the ranks": (
            "ranks.all_reduce(grad_h @ w1)",
            "grad_h @ w1",
        ),
        "y is divided by the number of ranks; it is their sum, not their mean": (
            "ranks.all_reduce(h.relu() @ w2.T)",
            "ranks.all_reduce(h.relu() @ w2.T) / ranks.count",
        ),
        "the gradient of x is divided by the number of ranks; it is their sum, not their mean": (
            "ranks.all_reduce(grad_h @ w1)",
            "ranks.all_reduce(grad_h @ w1) / ranks.count",
        ),
        "hidden units are added up, but each rank has other ones; add up what W2 makes of them": (
            "    h = x @ w1.T  # (tokens, d_ff / ranks)\n    y = ranks.all_reduce(h.relu() @ w2.T)",
            "    h = ranks.all_reduce(x @ w1.T)\n    y = h.relu() @ w2.T",
        ),
        "backward adds up grad_y, which every rank has whole; add up the gradient of x instead": (
            "        grad_h = (grad_y @ w2) * (h > 0)\n"
            "        grad_w1, grad_w2 = grad_h.T @ x, grad_y.T @ h.relu()\n"
            "        return ranks.all_reduce(grad_h @ w1)",
            "        grad_y = ranks.all_reduce(grad_y)\n"
            "        grad_h = (grad_y @ w2) * (h > 0)\n"
            "        grad_w1, grad_w2 = grad_h.T @ x, grad_y.T @ h.relu()\n"
            "        return grad_h @ w1",
        ),
        "backward adds up grad_y too, which every rank has whole; add up the gradient of x only": (
            "        grad_h = (grad_y @ w2) * (h > 0)",
            "        grad_y = ranks.all_reduce(grad_y)\n        grad_h = (grad_y @ w2) * (h > 0)",
        ),
        "the gradients of the weights are added up; those of other ranks are of other weights": (
            "grad_h.T @ x, grad_y.T @ h.relu()",
            "(\n            ranks.all_reduce(grad_h.T @ x),\n"
            "            ranks.all_reduce(grad_y.T @ h.relu()),\n        )",
        ),
        "W1 is cut by columns; a hidden unit is a row of it": ("dim=0", "dim=1"),
        "W2 is cut by rows; a hidden unit is a column of it": ("dim=1", "dim=0"),
        "the number of ranks is fixed at 2; it is `ranks.count`": (
            "    w1 = w1.chunk(ranks.count, dim=0)[ranks.number]\n"
            "    w2 = w2.chunk(ranks.count, dim=1)[ranks.number]",
            "    w1, w2 = w1.chunk(2, dim=0)[ranks.number], w2.chunk(2, dim=1)[ranks.number]",
        ),
        "the ReLU is applied to the sum; it belongs between the two matrices": (
            "ranks.all_reduce(h.relu() @ w2.T)",
            "ranks.all_reduce(h @ w2.T).relu()",
        ),
        "the ReLU is missing in backward: where h was not above 0, no gradient passes": (
            " * (h > 0)",
            "",
        ),
        "the gradient of W2 takes h before its ReLU": ("grad_y.T @ h.relu()", "grad_y.T @ h"),
    },
    tier="core",
    trials=40,
    describe=_words,
)


def check_reduce_scatter(attempt: Callable) -> None:
    """Check `reduce_scatter(gradients)` -> each rank's slice of the mean, (ranks, length)."""
    check(REDUCE_SCATTER, attempt)


def check_sharded_mlp(attempt: Callable) -> None:
    """Check `sharded_mlp(x, shard, d_ff, ranks)`, and run a right one on two processes."""
    judge = compared_with(
        functools.partial(train_alone, 12, 2, 3), "on two processes, after 3 steps"
    )
    check_on_processes(SHARDED_MLP, on_threads(attempt), train_attempt, 2, 3, judge=judge)


def check_clip(attempt: Callable) -> None:
    """Check `clip(shard, vector, max_norm, ranks)` -> both, clipped by the norm of all."""
    check(CLIP, clipping(attempt))


def check_order(attempt: Callable) -> Callable[[int], list[Event]]:
    """Check `order(blocks)` -> events of a step, played on a clock; return a right one."""
    return check(ORDER, timed(attempt)).__wrapped__  # type: ignore[attr-defined]


def check_best_size(attempt: Callable) -> None:
    """Check `best_size(layers, boundary, inside)` -> layers in a checkpoint."""
    text = verdict(BEST_SIZE, weighing(attempt))
    if result_of(text) == "passed":
        size = call(attempt, (34, 1, 20), TIME_LIMIT)
        text += f"\n  34 blocks that keep 20 times their input each: {size} in a checkpoint"
    report(text, name_of(attempt), BEST_SIZE.tier)


def check_fast_order(attempt: Callable) -> None:
    """Check `fast_order(sizes, limit)` -> events of a step, and time them."""
    check(FAST_ORDER, limited(attempt))


def check_tensor_parallel_mlp(attempt: Callable) -> None:
    """Check `tensor_parallel_mlp(x, w1, w2, ranks)`, and run a right one on two processes."""

    def judge(found: list[dict[str, Tensor]]) -> tuple[bool, str]:
        off = dict.fromkeys(found[0], 0.0)
        for number, one in enumerate(found):
            for name, expected in mlp_alone(number, len(found)).items():
                off[name] = max(off[name], (one[name] - expected).abs().max().item())
        told = ", ".join(f"{name} {value:.1g}" for name, value in off.items())
        return max(off.values()) < MOST_OFF, f"on two processes, off from one process by: {told}"

    check_on_processes(TENSOR_PARALLEL_MLP, on_all_ranks(attempt), run_mlp_attempt, 2, judge=judge)
