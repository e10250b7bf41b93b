"""Exercises of notebook 09: partitions, slices, the ZeRO-1 step, what ranks send, checkpoints."""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.lessons.differences import Named, is_array
from lib.lessons.exercise import check_of, exercise
from lib.lessons.inputs import choices, ints, lists
from lib.lessons.ranks import Threads
from lib.sharded_optimizer import whole_parameters

check = check_of(__name__)


def whole_numbers(values: Any, what: str) -> Any:
    """Lists of numbers, of which none may be a float: 8.0 equals 8, but can't cut."""
    if is_array(values):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return [whole_numbers(value, what) for value in values]
    if isinstance(values, float):
        raise TypeError(f"{what} must be a whole number, got {values!r}; divide with //")
    return values


# Better and worse partitions


def weigh(assign: Callable, sizes: list[int], n: int) -> Named:
    """Any partition that is as balanced as largest first is as good."""
    # a copy, since an attempt may sort the list in place
    owners = whole_numbers(assign([*sizes], n), "an owner")
    largest_first = whole_parameters.balanced_owners(sizes, [0] * n)
    fullest = max(max(loads(each, sizes, n)) for each in (owners, largest_first))
    owned = sum(owner in range(n) for owner in owners[: len(sizes)])
    return Named(
        {"owners": len(owners), "parameters with an owner": owned, "largest load": fullest}
    )


def loads(owners: Sequence[int], sizes: Sequence[int], n: int) -> list[int]:
    """The elements of each rank."""
    return [sum(s for s, owner in zip(sizes, owners) if owner == rank) for rank in range(n)]


PARAMETERS = {
    # vectors and matrices, in no order
    "sizes": lists(choices(1, 2, 3, *range(4, 40)), 3, 18),
    "n": ints(2, 4),
}


@exercise("optional", PARAMETERS, harness=weigh)
def balanced_owners(sizes: Sequence[int], n: int) -> list[int]:
    owners, loads = [0] * len(sizes), [0] * n
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


balanced_owners.mistakes = """
loads.index(min(loads)) => index % n
    | parameters go to the ranks round robin, whatever their sizes
return owners => return [number // -(-len(sizes) // n) for number in range(len(sizes))]
    | each rank gets equally many consecutive parameters; count elements, not parameters
return owners => return [owners[i] for i in sorted(range(len(sizes)), key=lambda i: -sizes[i])]
    | the owners are in the order in which they were assigned; return them in the order of `sizes`
sorted(range(len(sizes)), key=lambda index: -sizes[index]) => range(len(sizes))
    | the list is not sorted first; a large parameter that comes late finds no room on any rank
min(loads) => max(loads)
    | all go to one rank: the loads are never updated, or each goes to the rank with the most so far
"""


def excess(assign: Callable) -> float:
    """By how much the largest load is above an equal share, in %: the mean over fixed cases."""
    generator, found = random.Random(8), []
    for _ in range(40):
        n = generator.randint(3, 5)
        sizes = [generator.randint(20, 100) for _ in range(3 * n)]
        fullest = max(loads(assign(list(sizes), n), sizes, n))
        found.append(100 * (fullest * n / sum(sizes) - 1))
    return statistics.mean(found)


@exercise(
    "open",
    PARAMETERS,
    harness=weigh,
    trials=40,
    measure=excess,
    unit="% above an equal share",
    baseline=balanced_owners.solve,
    must_beat=True,
)
def fair_owners(sizes: Sequence[int], n: int) -> list[int]:
    # largest first
    owners, loads = [0] * len(sizes), [0] * n
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]

    def better():
        """A change that lowers the largest load: what moves, where to, and what comes back."""
        fullest = loads.index(max(loads))
        for index, owner in enumerate(owners):
            for other in range(len(sizes)):
                is_swap = owner == fullest != owners[other]
                if (
                    is_swap
                    and 0 < sizes[index] - sizes[other] < loads[fullest] - loads[owners[other]]
                ):
                    return index, owners[other], other
            for rank in range(n):
                if owner == fullest and sizes[index] < loads[fullest] - loads[rank]:
                    return index, rank, None
        return None

    while change := better():
        index, rank, back = change
        for moved, target in ((index, rank), (back, owners[index])):
            if moved is not None:
                loads[owners[moved]] -= sizes[moved]
                loads[target] += sizes[moved]
                owners[moved] = target
    return owners


fair_owners.mistakes = """
return owners => return [index % n for index in range(len(sizes))]
    | parameters go to the ranks round robin, whatever their sizes
return owners => return owners[:-1] | some parameters have no owner
"""


# The slices of a buffer


def cut(boundaries: Callable, *sizes: int) -> Any:
    """The boundaries, which must be whole numbers."""
    return whole_numbers(boundaries(*sizes), "a boundary")


@exercise(
    "optional",
    {
        "num_elements": ints(1, 300),
        "n": choices(1, 2, 3, 4, 8),
        "alignment": choices(1, 2, 4, 8),
    },
    harness=cut,
)
def shard_boundaries(num_elements: int, n: int, alignment: int) -> list[tuple[int, int]]:
    length = -(-num_elements // (n * alignment)) * alignment
    return [(rank * length, (rank + 1) * length) for rank in range(n)]


shard_boundaries.mistakes = """
-(-num_elements // (n * alignment)) * alignment => num_elements // n
    | there is no padding: the length is divided and rounded down, and elements are left over
(n * alignment)) * alignment => n)
    | the buffer is padded to a multiple of the ranks alone, not to a multiple of ranks times
    alignment
-(-num_elements // (n * alignment)) => (num_elements // (n * alignment) + 1)
    | a buffer that needs no padding is padded too; round up only where there is a remainder
(rank + 1) * length) => length) | the pairs are starts and lengths, not starts and stops
(rank + 1) * length) => min((rank + 1) * length, num_elements))
    | slices end with the elements, so the last ones are shorter; all must have equal length, with
    padding
(rank + 1) * length) => (rank + 1) * length - 1)
    | stops are off by one: a slice ends before its stop
"""


# The ZeRO-1 step


def three_steps(step: Callable, shapes: list[tuple], scale: float, ranks: Threads) -> Named:
    """What a rank has after each of three steps, the first of which begins without moments."""

    def tensors(seed: int) -> list[Tensor]:
        # whole numbers and powers of two, whose sums over ranks are exact in any order
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes]

    params, state, found = tensors(seed=0), dict[str, Any](), Named()
    for number in (1, 2, 3):
        grads = [gradient * scale for gradient in tensors(10 * number + ranks.number)]
        # a new list: what an attempt puts into it is no parameter
        step([*params], grads, state, ranks)
        held = sum(value.numel() for value in state.values() if isinstance(value, Tensor))
        moments = {name: state.get(name) for name in ("m", "v")}
        now = {f"params[{index}]": param for index, param in enumerate(params)}
        found[f"step {number}"] = Named({"numbers in state": held} | copy.deepcopy(moments | now))
    return found


@exercise(
    "core",
    {
        "shapes": lists(choices((2,), (3,), (5,), (1, 2), (3, 2)), 2, 3),
        # last, small gradients, whose ε counts
        "scale": lambda generator, size: 2.0**-20 if size > 10 else 1.0,
        "ranks": ints(2, 3),
    },
    harness=three_steps,
    ranks=True,
    collectives=("reduce_scatter", "all_gather"),
    processes=2,
    trials=30,
)
def zero1_step(
    params: list[Tensor], grads: list[Tensor], state: dict[str, Any], ranks: Threads
) -> None:
    lr, beta1, beta2, eps = 0.01, 0.9, 0.95, 1e-8

    def flat(tensors):
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.cat([joined, torch.zeros(-len(joined) % ranks.count)])

    # reduce-scatter: a slice of the mean gradient
    gradient = ranks.reduce_scatter(flat(grads)) / ranks.count

    # Adam on this slice
    step = state.get("step", 0) + 1
    m = beta1 * state.get("m", 0) + (1 - beta1) * gradient
    v = beta2 * state.get("v", 0) + (1 - beta2) * gradient**2
    state.update(m=m, v=v, step=step)
    mine = flat(params).chunk(ranks.count)[ranks.number]
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    mine = mine - lr * m_hat / (v_hat.sqrt() + eps)

    # all-gather: the new weights of all
    whole, offset = ranks.all_gather(mine), 0
    for param in params:
        param.copy_(whole[offset : offset + param.numel()].view_as(param))
        offset += param.numel()


zero1_step.mistakes = """
ranks.reduce_scatter(flat(grads)) / ranks.count => ranks.reduce_scatter(flat(grads))
    | the gradient is the sum over the ranks; divide it by their number
ranks.reduce_scatter(flat(grads)) => ranks.all_reduce(flat(grads)).chunk(ranks.count)[ranks.number]
    | gradients are all-reduced, and every rank gets all of them; a reduce-scatter brings the slice
    alone
param.copy_(whole[offset : offset + param.numel()].view_as(param)) => pass
    | the parameters stay what they were; write into them, with copy_
ranks.reduce_scatter(flat(grads)) => ranks.all_gather(ranks.reduce_scatter(flat(grads)))
    && mine = flat(params).chunk(ranks.count)[ranks.number] => mine = flat(params)
    && ranks.all_gather(mine), 0 => mine, 0
    | every rank keeps the moments of all weights; keep those of its slice alone
step=step) => step=0) | the step isn't counted up in `state`; bias correction needs it
ranks.reduce_scatter(flat(grads)) / ranks.count => flat(grads).chunk(ranks.count)[ranks.number]
    | each rank updates its slice with its own gradient; the mean over the ranks is needed
"""


# Bytes that ranks send


@exercise(
    "warm-up",
    {
        "method": choices("ddp", "zero1_parameters", "zero1_flat", "zero3"),
        "num_bytes": choices(1000, 10**6, 25 * 10**6, 10**9, 4 * 10**9),
        "n": choices(1, 2, 3, 4, 8, 64),
    },
)
def sent_bytes(method: str, num_bytes: int, n: int) -> float:
    passes = {"ddp": 2, "zero1_parameters": 3, "zero1_flat": 2, "zero3": 3}
    return passes[method] * (n - 1) / n * num_bytes


sent_bytes.mistakes = """
(n - 1) / n => 1 | (n - 1) / n is missing; each rank keeps one part
(n - 1) / n => (n - 1) | the factor is n - 1; each message is one part of n
"ddp": 2, "zero1_parameters": 3 => "ddp": 1, "zero1_parameters": 2
    | an all-reduce counts once, in ddp and in zero1_parameters; it is a reduce-scatter and an
    all-gather
"zero1_parameters": 3 => "zero1_parameters": 2
    | zero1_parameters lacks the broadcast after the update, or counts half of the all-reduce
"zero1_flat": 2 => "zero1_flat": 3
    | zero1_flat counts an all-reduce and an all-gather; a reduce-scatter is enough for gradients
"zero3": 3 => "zero3": 2 | zero3 gathers weights once; backward needs them again
"""


# A checkpoint for another number of ranks


def load(attempt: Callable, num_elements: int, saved_by: int, n: int) -> Named:
    """The slices that ranks load, and how much they read.

    Element number i is i + 1, and the padding of a file is -1, so that what comes from it shows.
    """
    length = -(-num_elements // saved_by)
    numbers = [*range(1, num_elements + 1)] + [-1] * (saved_by * length - num_elements)
    files, num_read = torch.tensor(numbers).float().view(saved_by, length), 0

    def read(file: int, start: int, stop: int) -> Tensor:
        nonlocal num_read
        if not (0 <= file < saved_by and 0 <= start <= stop <= length):
            told = f"each of the files 0 to {saved_by - 1} has {length} elements, from 0 on"
            raise ValueError(f"{told}, got read({file}, {start}, {stop})")
        num_read += stop - start
        return files[file, start:stop].clone()

    found = Named()
    for rank in range(n):
        num_read = 0
        found[f"slice of rank {rank}"] = attempt(read, num_elements, saved_by, n, rank)
        found[f"elements that rank {rank} reads"] = num_read
    return found


@exercise(
    "core",
    {"num_elements": ints(1, 38), "saved_by": choices(1, 2, 3, 4), "n": choices(1, 2, 3, 5)},
    harness=load,
    trials=60,
)
def reshard(
    read: Callable[[int, int, int], Tensor],
    num_elements: int,
    saved_by: int,
    n: int,
    rank: int,
) -> Tensor:
    saved, length = -(-num_elements // saved_by), -(-num_elements // n)
    mine = torch.zeros(length)
    start, stop = rank * length, min((rank + 1) * length, num_elements)
    for file in range(saved_by):
        # of this file, what is in both slices, counted in the buffer
        first, last = max(start, file * saved), min(stop, (file + 1) * saved)
        if first < last:
            part = read(file, first - file * saved, last - file * saved)
            mine[first - start : last - start] = part
    return mine


reshard.mistakes = """
first - file * saved, last - file * saved) => 0, saved)[first - file * saved : last - file * saved]
    | every file is read whole; read what is in this rank's slice
min((rank + 1) * length, num_elements) => min((rank + 1) * length, saved_by * saved)
    | the padding at the end of the files is taken for elements; stop at `num_elements`
in range(saved_by) => in range(rank, min(rank + 1, saved_by))
    | only the file of the same number is read
first - file * saved, last - file * saved) => first, last)
    | `read` gets positions in the buffer; it counts from the start of its file
mine[first - start : last - start] => mine[first:last]
    | what was read is put where it is in the buffer; in the slice, count from its own start
min(stop, (file + 1) * saved) => stop
    | a file is read past its end; stop where the next one begins
"""
