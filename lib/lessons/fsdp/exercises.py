"""Exercises of notebook 10: shards of gradients, ZeRO-3 and tensor parallelism of an MLP, clipping,
orders of a step, checkpoints.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.lessons.differences import Named
from lib.lessons.exercise import check_of, exercise
from lib.lessons.fsdp.orders import Costs, Event, play
from lib.lessons.inputs import choices
from lib.lessons.meters import Made
from lib.lessons.ranks import Threads, whole_numbers

check, take = check_of(__name__), check_of(__name__, returns=True)


# Slices of the mean gradient


def draw_gradients(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    length = ranks * generator.randint(1, 2 + size // 3) + generator.choice([0, 0, 1])
    return ([whole_numbers(generator, length) for _ in range(ranks)],)


@exercise("optional", draw_gradients)
def reduce_scatter(gradients: Sequence[Tensor]) -> Tensor:
    ranks, count = len(gradients), len(gradients[0])
    length = -(-count // ranks)
    padded = torch.zeros(ranks * length)
    padded[:count] = sum(gradients) / ranks
    return padded.view(ranks, length)


reduce_scatter.mistakes = """
sum(gradients) / ranks => sum(gradients)
    | a slice is the sum over the ranks; divide it by their number
sum(gradients) / ranks => torch.cat([g.chunk(ranks)[r] for r, g in enumerate(gradients)])
    | each rank gets a slice of its own gradient; it is the mean over all ranks
padded.view(ranks, length) => padded.view(length, ranks).T
    | elements are dealt to the ranks one by one; a slice is contiguous
return padded.view(ranks, length) => return padded[: count // ranks * ranks].view(ranks, -1)
    | the last elements are cut off; pad to a multiple of the ranks
padded[:count] => padded[-count:] | the padding comes first; it belongs to the end
padded.view(ranks, length) => padded[:count].repeat(ranks, 1)
    | every rank keeps the whole mean, as after an all-reduce; it keeps a slice
"""


# An MLP whose weights are gathered twice


def draw_mlp(generator: random.Random, size: int) -> tuple:
    ranks, d_model = generator.randint(2, 4), 3
    d_ff = ranks * generator.randint(1, 2 if size > 4 else 1)
    # fewer than d_ff, so that only weights are as large as a matrix
    rows = generator.randint(1, min(2, d_ff - 1))
    x, grad_y = (whole_numbers(generator, ranks, rows, d_model) for _ in range(2))
    return x, whole_numbers(generator, 2 * d_model * d_ff), grad_y, d_ff, ranks


def forward_and_backward(
    mlp: Callable, x: Tensor, whole: Tensor, grad_y: Tensor, d_ff: int, ranks: Threads
) -> Named:
    """What a rank computes, and whether it still holds whole matrices when backward begins."""
    shard, own_x = whole.chunk(ranks.count)[ranks.number].clone(), x[ranks.number]
    matrix = d_ff * x.shape[-1]
    # on two ranks a shard is as large as a matrix
    with Made({matrix, 2 * matrix} - {shard.numel()}) as matrices:
        y, backward = mlp(own_x, shard, d_ff, ranks)
    found = Named(y=y.detach().clone())
    # what forward gathered must not be used again
    ranks.poison()
    ranks.gathered.clear()
    found["still holds a whole matrix when backward begins"] = matrices.are_held()
    try:
        grad_x, grad_shard = backward(grad_y[ranks.number])
    except RuntimeError as error:
        # a saved tensor, or the views of one, that were overwritten
        if "modified" not in str(error) or "inplace" not in str(error):
            raise
        said = "autograd kept forward's matrices, which are gone by now; gather them again"
        raise RuntimeError(said) from error
    return Named(found, grad_x=grad_x, grad_shard=grad_shard)


@exercise(
    "core",
    draw_mlp,
    harness=forward_and_backward,
    ranks=True,
    collectives=("all_gather", "reduce_scatter"),
    processes=2,
    trials=40,
)
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
        w1, w2 = matrices()  # again
        grad_h = (grad_y @ w2) * (h > 0)
        grad_w1, grad_w2 = grad_h.T @ x, grad_y.T @ h.relu()
        whole = torch.cat([grad_w1.flatten(), grad_w2.flatten()])
        return grad_h @ w1, ranks.reduce_scatter(whole) / ranks.count

    return y, backward


sharded_mlp.mistakes = """
ranks.reduce_scatter(whole) / ranks.count => ranks.reduce_scatter(whole)
    | the gradient of the shard is a sum over the ranks; divide it by their number
ranks.reduce_scatter(whole) / ranks.count => whole.chunk(ranks.count)[ranks.number]
    | the gradient of the shard is this rank's own; reduce-scatter it
w1, w2 = matrices()  # again => pass && del w1, w2 => pass
    | backward uses the matrices of forward, which are gone by then; gather them again
del w1, w2 => held = w1, w2 && (h > 0) => (h > len(held) - 2)
    | backward gathers again, but holds forward's matrices until then; let no name keep them
* (h > 0) => | the ReLU is missing in backward: where h was not above 0, no gradient passes
whole = torch.cat([grad_w1.flatten(), grad_w2.flatten()]) => wholes = grad_w1, grad_w2
    && ranks.reduce_scatter(whole) =>
    torch.cat([ranks.reduce_scatter(whole.flatten()) for whole in wholes])
    | each gradient is reduce-scattered by itself, but a slice is cut from both behind one another
"""


# Clipping by the norm of all shards


def draw_norm(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    shards = whole_numbers(generator, ranks, 1 + size)
    shards[0, 0], shards[1, 0] = 3.0, 4.0
    vector = whole_numbers(generator, 3)
    vector[0] = 5.0
    # a step without gradients
    if generator.random() < 0.1:
        return 0 * shards, 0 * vector, 1.0, ranks
    norm = (shards.square().sum() + vector.square().sum()).sqrt().item()
    # mostly clipped, now and then below the limit
    return shards, vector, norm * generator.choice([0.25, 0.5, 0.9, 2.0]), ranks


def clip_here(
    clip: Callable, shards: Tensor, vector: Tensor, max_norm: float, ranks: Threads
) -> Named:
    """The clipped shard of this rank, and the clipped vector."""
    shard, vector = clip(shards[ranks.number].clone(), vector, max_norm, ranks)
    return Named(shard=shard, vector=vector)


@exercise("core", draw_norm, harness=clip_here, ranks=True, collectives=("all_reduce",), trials=60)
def clip(shard: Tensor, vector: Tensor, max_norm: float, ranks: Threads) -> tuple[Tensor, Tensor]:
    square = ranks.all_reduce(shard.square().sum())
    norm = (square + vector.square().sum()).sqrt()
    factor = min(1.0, max_norm / norm)
    return factor * shard, factor * vector


clip.mistakes = """
ranks.all_reduce(shard.square().sum()) => ranks.all_reduce(shard).square().sum()
    | the shards are added up element by element, but they are slices of one gradient; add up their
    squares
ranks.all_reduce(shard.square().sum()) => ranks.all_reduce(shard.norm())
    && (square + vector.square().sum()).sqrt() => square + vector.norm()
    | norms are added up; add up the squares of all numbers, and take one root
ranks.all_reduce(shard.square().sum()) =>
    ranks.all_reduce(shard.square().sum() + vector.square().sum())
    && square + vector.square().sum() => square
    | the vector's squares are added up over the ranks; all have the same ones, so add them once
ranks.all_reduce(shard.square().sum()) => shard.square().sum()
    | each rank takes the norm of its own shard; then they scale differently
+ vector.square().sum() => | the vector is left out of the norm
min(1.0, max_norm / norm) => max_norm / norm
    | gradients below the limit are scaled up; leave them alone
"""


# The order of a step


def draw_blocks(generator: random.Random, size: int) -> tuple:
    compute, network = generator.choice([2.0, 4.0]), generator.choice([0.5, 1.0, 2.0, 8.0])
    blocks = generator.randint(2, 3 + size // 4)
    # gradients in as many bytes as the parameters gathered, or in twice as many
    reduce = network * generator.choice([1.0, 2.0])
    return blocks, Costs.equal(
        blocks, forward=compute, backward=2 * compute, gather=network, reduce=reduce
    )


def on_a_clock(order: Callable, blocks: int, costs: Costs) -> Named:
    """The order, played; one as fast as the solution's that holds no more is as right."""
    best, found = play(prefetching(blocks), costs), play(order(blocks), costs)
    return Named(
        {
            "what is wrong": found.fault,
            "blocks gathered at once": max(found.most, best.most),
            "milliseconds": max(found.ms, best.ms),
        }
    )


def just_in_time(blocks: int) -> list[Event]:
    """The order that gathers each block right before it runs; the last one stays for backward."""
    events: list[Event] = []
    for block in range(blocks):
        events += [("gather", block), ("forward", block), ("free", block)]
    events.pop()
    for block in reversed(range(blocks)):
        ahead = [("gather", block)] if block < blocks - 1 else []
        events += [*ahead, ("backward", block), ("reduce", block), ("free", block)]
    return events


@exercise("core", draw_blocks, harness=on_a_clock, trials=40)
def order(blocks: int) -> list[Event]:
    events = [("gather", 0)]
    # forward: the next block is on its way while this one runs; the last one stays
    for block in range(blocks):
        ahead = [("gather", block + 1)] if block + 1 < blocks else []
        events += [*ahead, ("forward", block)]
        events += [("free", block)] if block + 1 < blocks else []
    # backward
    for block in reversed(range(blocks)):
        ahead = [("gather", block - 1)] if block > 0 else []
        events += [*ahead, ("backward", block), ("reduce", block), ("free", block)]
    return events


# The order of `lib.fsdp.FSDP`.
prefetching: Callable[[int], list[Event]] = order.solve

order.mistakes = """
events = [("gather", 0)] => return just_in_time(blocks)
    | each block is gathered just before it runs, and waits for its message; gather the next block
    before this one runs
events = [("gather", 0)] => events = [("gather", block) for block in range(blocks)]
    && [("gather", block + 1)] if block + 1 < blocks else [] => []
    && [("free", block)] if block + 1 < blocks else [] => []
    && [("gather", block - 1)] if block > 0 else [] => []
    | all blocks are gathered at the start; no more than two may be
[*ahead, ("forward", block)] => [("forward", block), *ahead]
    | in forward block b + 1 is gathered once block b has run; gather it before b runs
[*ahead, ("backward", block), ("reduce", block), ("free", block)] =>
    [("backward", block), ("reduce", block), ("free", block), *ahead]
    | in backward block b - 1 is gathered once block b has run; gather it before b runs
[("free", block)] if block + 1 < blocks else [] => [] | nothing is freed in forward
[("free", block)] if block + 1 < blocks else [] =>
    [("free", block), ("gather", block)] if block + 1 == blocks else [("free", block)]
    | the last block is freed after forward, and needed again at once
"""


# A faster order, within a limit


def draw_uneven(generator: random.Random, size: int) -> tuple:
    blocks = 2 + generator.randint(1, 2 + size // 3)
    sizes = [generator.choice([1, 1, 2, 4]) for _ in range(blocks)]
    # may be too small for two neighbors
    return sizes, max(sizes) + generator.choice([0, 1, 2, 4])


def uneven_costs(sizes: Sequence[int]) -> Costs:
    # sending takes as long as the parameters of a block, computing 2 and 4
    gather = tuple(float(size) for size in sizes)
    return Costs(gather, (2.0,) * len(sizes), (4.0,) * len(sizes), gather)


def within_a_limit(order: Callable, sizes: Sequence[int], limit: int) -> Named:
    """What is wrong with the order, and whether it keeps to the limit."""
    found = play(order(sizes, limit), uneven_costs(sizes), sizes)
    return Named({"what is wrong": found.fault, "within the limit": found.most <= limit})


def milliseconds(order: Callable) -> float:
    """The time of a fixed case, by the clock of `play`."""
    sizes = [4, 1, 1, 2, 1, 1, 1, 4]
    return play(order(list(sizes), 8), uneven_costs(sizes), sizes).ms


def one_block_ahead(sizes: Sequence[int], limit: int) -> list[Event]:
    """The order of exercise 4, whatever the limit."""
    return prefetching(len(sizes))


@exercise(
    "open",
    draw_uneven,
    harness=within_a_limit,
    trials=40,
    measure=milliseconds,
    unit="ms",
    baseline=one_block_ahead,
    must_beat=True,
)
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


fast_order.mistakes = """
blocks = len(sizes) => return one_block_ahead(sizes, limit)
    | one block is gathered ahead whatever the limit; look whether there is room
> limit => > limit + 10**6 | more is gathered at once than the limit allows
if kind == "backward" or block < blocks - 1: => if False: | blocks are not freed once they have run
events.append(("reduce", block)) => pass | gradients are never sent
"""


# How many layers to a checkpoint


def bytes_kept(best_size: Callable, layers: int, boundary: int, inside: int) -> Named:
    """Another size that keeps as little is as right."""
    size = best_size(layers, boundary, inside)
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"the size must be an int, got {size!r}")
    size = operator.index(size)
    if not 1 <= size <= layers:
        raise ValueError(f"the size must be between 1 and {layers}, got {size}")
    return Named({"bytes kept": math.ceil(layers / size) * boundary + size * inside})


@exercise(
    "optional",
    {"layers": lambda generator, size: generator.randint(2, 8 + size)}
    | {"boundary": choices(1, 2, 3), "inside": choices(1, 2, 4, 12)},
    harness=bytes_kept,
    # as in a Transformer, whose blocks keep about 20 times their input
    measure=lambda best_size: best_size(34, 1, 20),
    unit="of 34 blocks in a checkpoint",
)
def best_size(layers: int, boundary: int, inside: int) -> int:
    def kept(size):
        return -(-layers // size) * boundary + size * inside

    return min(range(1, layers + 1), key=kept)


best_size.mistakes = """
min(range(1, layers + 1), key=kept) => min(layers, max(1, round(layers**0.5)))
    | the size is √L whatever a layer keeps; weigh a boundary against an inside
-(-layers // size) => layers / size
    | the last, shorter segment isn't counted as a whole one: there are ⌈L/k⌉
range(1, layers + 1) => range(1, layers)
    | one checkpoint around all layers is never tried; `range` stops before its end
return min(range(1, layers + 1), key=kept) => return min(map(kept, range(1, layers + 1)))
    | the bytes kept are returned, not the size that keeps the least
-(-layers // size) * boundary + size * inside => -(-layers // size) * inside + size * boundary
    | boundary and inside are mixed up
range(1, layers + 1) => [size for size in range(1, layers + 1) if layers % size == 0]
    | only sizes that divide the layers are tried; the last segment may be shorter
"""


# Tensor parallelism of an MLP


def draw_whole_mlp(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    # a part of d_ff is never as long as d_model or a part of it, so that a wrong cut does not fit
    d_model, d_ff = ranks, ranks * (ranks + generator.randint(1, 2))
    rows = generator.randint(1, 2)
    shapes = (rows, d_model), (d_ff, d_model), (d_model, d_ff), (rows, d_model)
    return *(whole_numbers(generator, *shape) for shape in shapes), ranks


def with_a_part(
    mlp: Callable, x: Tensor, w1: Tensor, w2: Tensor, grad_y: Tensor, ranks: Any
) -> Named:
    """The result of a rank that has only its parts of the matrices: the rest is NaN."""
    rows = torch.arange(len(w1)).chunk(ranks.count)[ranks.number]
    w1_part, w2_part = torch.full_like(w1, torch.nan), torch.full_like(w2, torch.nan)
    w1_part[rows], w2_part[:, rows] = w1[rows], w2[:, rows]
    y, backward = mlp(x, w1_part, w2_part, ranks)
    # first, since it explains a wrong y
    found = Named({"all-reduces in forward": ranks.calls["all-reduces"]})
    found["y"] = y.detach().clone()
    grad_x, grad_w1, grad_w2 = backward(grad_y)
    return Named(found, grad_x=grad_x, grad_w1=grad_w1, grad_w2=grad_w2)


@exercise(
    "core",
    draw_whole_mlp,
    harness=with_a_part,
    ranks=True,
    collectives=("all_reduce",),
    processes=2,
    trials=40,
)
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


tensor_parallel_mlp.mistakes = """
ranks.all_reduce(h.relu() @ w2.T) => h.relu() @ w2.T
    | y is only what this rank's hidden units give; add it up over the ranks
ranks.all_reduce(grad_h @ w1) => grad_h @ w1
    | the gradient of x is only what this rank's hidden units give; add it up over the ranks
w1 = w1.chunk(ranks.count, dim=0)[ranks.number] => pass
    && w2 = w2.chunk(ranks.count, dim=1)[ranks.number] => pass
    | every rank computes with the whole matrices; a rank has room for its own parts alone, and the
    rest is NaN here
x @ w1.T => ranks.all_reduce(x @ w1.T) && ranks.all_reduce(h.relu() @ w2.T) => h.relu() @ w2.T
    | hidden units are added up, but each rank has other ones; add up what W2 makes of them
dim=0 => dim=1 | W1 is cut by columns; a hidden unit is a row of it
dim=1 => dim=0 | W2 is cut by rows; a hidden unit is a column of it
"""
