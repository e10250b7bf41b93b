"""Exercises of notebook 08: partitions, slices, the ZeRO-1 step, what ranks send, checkpoints."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lib.lessons.differences import is_array
from lib.lessons.exercise import (
    Exercise,
    check,
    difference,
    name_of,
    report,
    result_of,
    verdict,
)
from lib.lessons.ranks import (
    Threads,
    check_on_processes,
    compared_with,
    run_on_threads,
    whole_numbers,
)
from lib.lessons.zero1.attempts import train_alone, train_attempt
from lib.sharded_optimizer import whole_parameters


def _draw_parameters(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    # vectors and matrices, in no order
    sizes = [generator.choice([1, 2, 3, generator.randint(4, 40)]) for _ in range(ranks + size)]
    return sizes, ranks


def weighed(assign: Callable) -> Callable[[Sequence[int], int], dict[str, int]]:
    """A function that weighs the owners given by `assign(sizes, ranks)`.

    It counts the owners and those that are ranks, and takes the largest load, but at least that of
    largest first: any partition that is as balanced is as good.
    """

    def largest_load(owners: Sequence[int], sizes: Sequence[int], ranks: int) -> int:
        owned = list(zip(owners, sizes))
        return max(sum(size for owner, size in owned if owner == rank) for rank in range(ranks))

    @functools.wraps(assign)
    def weighing(sizes: Sequence[int], ranks: int) -> dict[str, int]:
        # a copy, since an attempt may sort the list in place
        owners = assign([*sizes], ranks)
        # a tensor of one number has a `__len__`, too
        if strange := [o for o in owners if hasattr(o, "__len__") and getattr(o, "ndim", 1)]:
            raise TypeError(f"an owner must be the number of a rank, got {strange[0]!r}")
        owners = [int(owner) for owner in owners]
        largest_first = whole_parameters.balanced_owners(sizes, [0] * ranks)
        return {
            "parameters with an owner": sum(o in range(ranks) for o in owners[: len(sizes)]),
            "owners": len(owners),
            "largest load": max(
                largest_load(owners, sizes, ranks), largest_load(largest_first, sizes, ranks)
            ),
        }

    return weighing


@weighed
def balanced_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    owners, loads = [0] * len(sizes), [0] * ranks
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for index in largest_first:
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


BALANCED_OWNERS = Exercise(
    balanced_owners,
    _draw_parameters,
    {
        "parameters go to the ranks round robin, whatever their sizes": (
            "return owners",
            "return [index % ranks for index in range(len(sizes))]",
        ),
        "parameters are sorted by size, but dealt round robin, or from the small end; take the "
        "largest first, for the rank with the least so far": (
            "loads.index(min(loads))",
            "largest_first.index(index) % ranks",
        ),
        "each rank gets equally many consecutive parameters; count elements, not parameters": (
            "return owners",
            "return [index // -(-len(sizes) // ranks) for index in range(len(sizes))]",
        ),
        "the owners are in the order in which they were assigned; return them in the order of "
        "`sizes`": ("return owners", "return [owners[index] for index in largest_first]"),
        "the list is not sorted first; a large parameter that comes late finds no room on any "
        "rank": ("in largest_first", "in range(len(sizes))"),
        "all go to one rank: the loads are never updated, or each goes to the rank with the most "
        "so far": ("min(loads)", "max(loads)"),
    },
)


def _draw_buffer(generator: random.Random, size: int) -> tuple:
    ranks = generator.choice([1, 2, 3, 4, 8])
    alignment = generator.choice([1, 2, 4, 8])
    elements = generator.randint(1, 20 * size)
    if generator.random() < 0.3:
        # nothing to pad
        elements = generator.randint(1, 3) * ranks * alignment
    return elements, ranks, alignment


def in_whole_numbers(attempt: Callable) -> Callable[..., list[tuple[int, int]]]:
    """The function `attempt`, whose boundaries must be whole numbers: 8.0 equals 8, but can't cut.

    Raises:
        TypeError: one of them is a float.
    """

    @functools.wraps(attempt)
    def checked(*arguments: int) -> list[tuple[int, int]]:
        found = attempt(*arguments)
        if is_array(found):
            found = [tuple(pair) for pair in found.tolist()]
        pairs = [pair for pair in found if isinstance(pair, (list, tuple))] if found else []
        if floats := [stop for pair in pairs for stop in pair if isinstance(stop, float)]:
            raise TypeError(f"a boundary must be a whole number, got {floats[0]!r}; divide with //")
        return found

    return checked


def shard_boundaries(num_elements: int, ranks: int, alignment: int) -> list[tuple[int, int]]:
    length = -(-num_elements // (ranks * alignment)) * alignment
    starts = [rank * length for rank in range(ranks)]
    return [(start, start + length) for start in starts]


def _rest_to_last(num_elements: int, ranks: int, alignment: int) -> list[tuple[int, int]]:
    starts = [rank * (num_elements // ranks) for rank in range(ranks)]
    return list(pairwise([*starts, num_elements]))


SHARD_BOUNDARIES = Exercise(
    shard_boundaries,
    _draw_buffer,
    {
        "there is no padding: the length is divided and rounded down, and elements are left over": (
            "-(-num_elements // (ranks * alignment)) * alignment",
            "num_elements // ranks",
        ),
        "there is no padding: the length is rounded down, and the last rank takes the rest; "
        "slices must be equal": _rest_to_last,
        "the buffer is padded to a multiple of the ranks alone, not to a multiple of ranks times "
        "alignment": ("(ranks * alignment)) * alignment", "ranks)"),
        "the buffer is padded to a multiple of the alignment alone, which need not divide by the "
        "ranks": ("(ranks * alignment)) * alignment", "alignment) * alignment // ranks"),
        "the length is rounded down to a multiple of the alignment; it must be rounded up to hold "
        "all elements": (
            "-(-num_elements // (ranks * alignment))",
            "num_elements // (ranks * alignment)",
        ),
        "the pairs are starts and lengths, not starts and stops": ("start + length", "length"),
        "a buffer that needs no padding is padded too; round up only where there is a remainder": (
            "-(-num_elements // (ranks * alignment))",
            "(num_elements // (ranks * alignment) + 1)",
        ),
        "the last rank overlaps the one before: its slice is moved back to end with the elements "
        "instead of the padding": (
            "    return",
            "    starts[-1] = num_elements - length\n    return",
        ),
        "slices end with the elements, so the last ones are shorter; all must have equal length, "
        "with padding": ("start + length", "min(start + length, num_elements)"),
        "starts and stops end with the elements; the padding belongs to the last slices": (
            "(start, start + length)",
            "(min(start, num_elements), min(start + length, num_elements))",
        ),
        "the buffer is padded for the ranks and then for the alignment; it must be a multiple of "
        "their product": (
            "-(-num_elements // (ranks * alignment)) * alignment",
            "-(num_elements // -ranks * ranks // alignment) * alignment // ranks",
        ),
        "stops are off by one: a slice ends before its stop": ("+ length", "+ length - 1"),
        "starts are off by one: rank 0 begins with element 0": ("(start,", "(start + 1,"),
    },
)


# The ZeRO-1 step


class Close(float):
    """A number that equals another one up to rounding."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, float)):
            return NotImplemented
        both_nan = math.isnan(self) and math.isnan(other)
        return both_nan or math.isclose(self, other, rel_tol=1e-4, abs_tol=1e-6)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{float(self):.6g}"


class Tensors(list):
    """Tensors that show their shapes alone."""

    def __repr__(self) -> str:
        return f"tensors of {', '.join(str(tuple(tensor.shape)) for tensor in self)}"


class Steps(list):
    """The gradients of each step by rank."""

    def __repr__(self) -> str:
        return f"gradients of {len(self)} steps on {len(self[0])} ranks"


def _draw_step(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 3)
    shapes = [(generator.randint(1, 2 + size // 4), 2), (ranks + generator.randint(1, 3),)]

    # last, small gradients, whose ε counts; a power of two keeps sums exact
    scale = 2.0**-20 if size > 10 else 1.0

    def tensors(scale: float = 1.0) -> Tensors:
        return Tensors(whole_numbers(generator, *shape) * scale for shape in shapes)

    # several steps, since the first one begins without moments
    return tensors(), Steps([tensors(scale) for _ in range(ranks)] for _ in range(3))


def stepping(attempt: Callable) -> Callable[[list[Tensor], list], dict[str, Any]]:
    """A function that takes steps with `attempt` on ranks, and tells what each then has.

    Args:
        attempt: `attempt(params, grads, state, ranks)` updates `params` and `state` in place.
    """

    @functools.wraps(attempt)
    def played(params: list[Tensor], grads: list[list[list[Tensor]]]) -> dict[str, Any]:
        def job(ranks: Threads) -> list[dict[str, Any]]:
            own, state, found = [param.clone() for param in params], {}, []
            for step in grads:
                # a new list: what an attempt puts into it is no parameter
                attempt([*own], [grad.clone() for grad in step[ranks.number]], state, ranks)
                found.append(_numbers_of(own, state) | ranks.calls)
            return found

        by_rank = run_on_threads(job, len(grads[0]))
        return {
            f"{key} on rank {rank} after step {step}": value
            for step, found in enumerate(zip(*by_rank), 1)
            for rank, one in enumerate(found)
            for key, value in one.items()
        }

    return played


def _numbers_of(params: Sequence[Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """The tensors and state of a rank after a step, one number at a time."""
    held = [value for value in state.values() if isinstance(value, Tensor)]
    found: dict[str, Any] = {"numbers in state": sum(value.numel() for value in held)}
    tensors = {name: state[name] for name in ("m", "v") if isinstance(state.get(name), Tensor)}
    tensors |= {f"params[{index}]": param for index, param in enumerate(params)}
    for name, tensor in tensors.items():
        for place, value in enumerate(tensor.flatten().tolist()):
            found[f"element {place} of {name}"] = Close(value)
    return found


@stepping
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


def _all_reduced(flat: Tensor, ranks: Threads) -> Tensor:
    return ranks.all_reduce(flat) / ranks.count


def _scattered_and_gathered(flat: Tensor, ranks: Threads) -> Tensor:
    padded = torch.cat([flat, torch.zeros(-len(flat) % ranks.count)])
    return ranks.all_gather(ranks.reduce_scatter(padded) / ranks.count)


def _state_of_all(
    average: Callable[[Tensor, Threads], Tensor],
    params: list[Tensor],
    grads: list[Tensor],
    state: dict[str, Any],
    ranks: Threads,
) -> None:
    """Plain data parallelism: every rank keeps all moments, and updates all."""
    lr, beta1, beta2, eps = 0.01, 0.9, 0.95, 1e-8
    gradient = average(torch.cat([grad.flatten() for grad in grads]), ranks)
    step = state.get("step", 0) + 1
    m = beta1 * state.get("m", 0) + (1 - beta1) * gradient
    v = beta2 * state.get("v", 0) + (1 - beta2) * gradient**2
    state.update(m=m, v=v, step=step)
    change = lr * m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    sizes = [param.numel() for param in params]
    for param, part in zip(params, change[: sum(sizes)].split(sizes)):
        param -= part.view_as(param)


ZERO1_STEP = Exercise(
    zero1_step,
    _draw_step,
    {
        "the gradient is the sum over the ranks; divide it by their number": (
            "ranks.reduce_scatter(flat(grads)) / ranks.count",
            "ranks.reduce_scatter(flat(grads))",
        ),
        "each rank takes the slice of its own gradient; reduce-scatter it": (
            "ranks.reduce_scatter(flat(grads)) / ranks.count",
            "flat(grads).chunk(ranks.count)[ranks.number]",
        ),
        "gradients are all-reduced, and every rank gets all of them; a reduce-scatter brings the "
        "slice alone": (
            "ranks.reduce_scatter(flat(grads)) / ranks.count",
            "ranks.all_reduce(flat(grads)).chunk(ranks.count)[ranks.number] / ranks.count",
        ),
        "every rank keeps the moments of all elements; keep those of your slice": stepping(
            functools.partial(_state_of_all, _all_reduced)
        ),
        "mean gradients are gathered, and every rank keeps all moments; update your slice, and "
        "gather weights": stepping(functools.partial(_state_of_all, _scattered_and_gathered)),
        "the moments are never kept, so each step is a first one": (
            "    state.update(m=m, v=v, step=step)\n",
            "",
        ),
        "`state` begins anew in each step; go on from what it holds": (
            'state.get("step", 0) + 1',
            "1\n    state.clear()",
        ),
        "the step number is never kept, so bias correction is that of the first step": (
            "state.update(m=m, v=v, step=step)",
            "state.update(m=m, v=v)",
        ),
        "bias correction is missing": (
            "m / (1 - beta1**step), v / (1 - beta2**step)",
            "m, v",
        ),
        "bias correction of m is missing": ("m / (1 - beta1**step)", "m"),
        "bias correction of v is missing": ("v / (1 - beta2**step)", "v"),
        "gradients are gathered in place of the new weights": (
            "all_gather(mine)",
            "all_gather(gradient)",
        ),
        "the new weights of the other ranks never come; all-gather them": (
            "ranks.all_gather(mine), 0",
            "flat(params), 0\n    whole.chunk(ranks.count)[ranks.number].copy_(mine)",
        ),
        "the parameters stay what they were; write into them, with copy_": (
            "param.copy_(whole[offset : offset + param.numel()].view_as(param))",
            "param = whole[offset : offset + param.numel()].view_as(param)",
        ),
        "all ranks update the weights of rank 0's slice": ("[ranks.number]", "[0]"),
        "the last elements are cut off; pad to a multiple of the ranks": (
            "torch.cat([joined, torch.zeros(-len(joined) % ranks.count)])",
            "joined[: len(joined) // ranks.count * ranks.count]",
        ),
        "the padding comes first; it belongs to the end": (
            "torch.cat([joined, torch.zeros(-len(joined) % ranks.count)])",
            "torch.cat([torch.zeros(-len(joined) % ranks.count), joined])",
        ),
        "elements that divide evenly are padded, too; that takes `-len % ranks.count`": (
            "-len(joined) % ranks.count",
            "ranks.count - len(joined) % ranks.count",
        ),
        "each parameter gets the first elements of the buffer; the offset never moves": (
            "        offset += param.numel()\n",
            "",
        ),
        "the second moment is that of the gradient itself; square it": ("gradient**2", "gradient"),
        "ε is inside the root; add it to the root": (
            "(v_hat.sqrt() + eps)",
            "(v_hat + eps).sqrt()",
        ),
        "ε is missing, so that an element without gradient gives 0 / 0": (" + eps)", ")"),
        "β₂ is 0.999, as in PyTorch; here it is 0.95": ("0.95", "0.999"),
        "β₁ is in the second moment, too; that has β₂": ("0.9, 0.95", "0.9, 0.9"),
        "the learning rate is 0.001, as in PyTorch; here it is 0.01": ("0.01", "0.001"),
        "the first step has the number 0, so that bias correction divides by 0": (
            "    m_hat, v_hat",
            "    step -= 1\n    m_hat, v_hat",
        ),
        "weights go up the gradient; subtract the update": ("mine - lr", "mine + lr"),
    },
    tier="core",
    trials=30,
    describe=difference,
)

# Bytes that ranks send

METHODS = ("ddp", "zero1_parameters", "zero1_flat", "zero3")


def _draw_volume(generator: random.Random, size: int) -> tuple:
    num_bytes = generator.choice([1000, 10**6, 25 * 10**6, 10**9, 4 * 10**9])
    return generator.choice(METHODS), num_bytes, generator.choice([1, 2, 3, 4, 8, 64])


def sent_bytes(method: str, num_bytes: int, ranks: int) -> float:
    passes = {"ddp": 2, "zero1_parameters": 3, "zero1_flat": 2, "zero3": 3}
    share = (ranks - 1) / ranks
    return passes[method] * share * num_bytes


SENT_BYTES = Exercise(
    sent_bytes,
    _draw_volume,
    {
        "(n - 1) / n is missing; each rank keeps one part": ("(ranks - 1) / ranks", "1"),
        "(n - 1) / n is missing, except for n = 1": ("(ranks - 1) / ranks", "ranks > 1"),
        "the factor is n - 1; each message is one part of n": (" / ranks", ""),
        "num_bytes counts for gradients and weights together; each of them has num_bytes by "
        "itself": ("* num_bytes", "* num_bytes / 2"),
        "(n - 1) // n is 0; divide with /": (" / ", " // "),
        "the factor is 1 / n; n - 1 parts of n are sent": ("(ranks - 1)", "1"),
        "an all-reduce counts once, in ddp and in zero1_parameters; it is a reduce-scatter and an "
        "all-gather": ('"ddp": 2, "zero1_parameters": 3', '"ddp": 1, "zero1_parameters": 2'),
        "ddp's all-reduce counts once; it makes two passes": ('"ddp": 2', '"ddp": 1'),
        "zero1_parameters lacks the broadcast after the update": ('meters": 3', 'meters": 2'),
        "zero1_parameters lacks the all-reduce of the gradients": ('meters": 3', 'meters": 1'),
        "only a rank's own part of the broadcasts counts; on a ring it also forwards the parts of "
        "others": (
            "    return",
            '    if method == "zero1_parameters":\n'
            "        return (2 * share + 1 / ranks) * num_bytes\n"
            "    return",
        ),
        "the broadcasts count like an all-reduce; together they are one pass": (
            'meters": 3',
            'meters": 4',
        ),
        "in the broadcasts each rank sends all weights to every other; they go around the ring": (
            "    return",
            '    if method == "zero1_parameters":\n'
            "        return (2 * share + ranks - 1) * num_bytes\n"
            "    return",
        ),
        "zero1_flat lacks its reduce-scatter or its all-gather": ('flat": 2', 'flat": 1'),
        "zero1_flat counts an all-reduce and an all-gather; a reduce-scatter is enough for the "
        "gradients": ('"zero1_flat": 2', '"zero1_flat": 3'),
        "zero3 counts one pass instead of two gathers and a reduce-scatter": (
            'zero3": 3',
            'zero3": 1',
        ),
        "zero3 gathers weights once; backward needs them again": ('"zero3": 3', '"zero3": 2'),
        "zero3 all-reduces gradients; reduce-scatter is enough": ('"zero3": 3', '"zero3": 4'),
    },
)


# A checkpoint for another number of ranks


def _draw_checkpoint(generator: random.Random, size: int) -> tuple:
    saved_by = generator.randint(1, 4)
    ranks = generator.choice([number for number in range(1, 6) if number != saved_by])
    return generator.randint(max(saved_by, ranks), 8 + 2 * size), saved_by, ranks


def loading(attempt: Callable) -> Callable[[int, int, int], dict[str, Any]]:
    """A function that loads the slices of `ranks` with `attempt` from the files of `saved_by`.

    Element number i is i + 1, and the padding of a file is -1, so that what comes from it shows.

    Args:
        attempt: `attempt(read, num_elements, saved_by, ranks, rank)` -> slice of that rank.
    """

    @functools.wraps(attempt)
    def played(num_elements: int, saved_by: int, ranks: int) -> dict[str, Any]:
        length = -(-num_elements // saved_by)
        numbers = [*range(1, num_elements + 1)] + [-1] * (saved_by * length - num_elements)
        files = torch.tensor(numbers, dtype=torch.float32).view(saved_by, length)
        found = {}
        for rank in range(ranks):
            count = 0

            def read(file: int, start: int, stop: int) -> Tensor:
                nonlocal count
                if not (0 <= file < saved_by and 0 <= start <= stop <= length):
                    told = f"each of the files 0 to {saved_by - 1} has {length} elements, from 0 on"
                    raise ValueError(f"{told}, got read({file}, {start}, {stop})")
                count += stop - start
                return files[file, start:stop].clone()

            own = attempt(read, num_elements, saved_by, ranks, rank)
            found[f"slice of rank {rank}"] = None if own is None else own.tolist()
            found[f"elements that rank {rank} reads"] = count
        return found

    return played


@loading
def reshard(
    read: Callable[[int, int, int], Tensor],
    num_elements: int,
    saved_by: int,
    ranks: int,
    rank: int,
) -> Tensor:
    saved, length = -(-num_elements // saved_by), -(-num_elements // ranks)
    mine = torch.zeros(length)
    start, stop = rank * length, min((rank + 1) * length, num_elements)
    for file in range(saved_by):
        # of this file, what is in both slices, counted in the buffer
        first, last = max(start, file * saved), min(stop, (file + 1) * saved)
        if first < last:
            part = read(file, first - file * saved, last - file * saved)
            mine[first - start : last - start] = part
    return mine


def _whole_files(read: Callable, num_elements: int, saved_by: int, ranks: int, rank: int) -> Tensor:
    saved, length = -(-num_elements // saved_by), -(-num_elements // ranks)
    whole = torch.cat([read(file, 0, saved) for file in range(saved_by)])[:num_elements]
    return torch.cat([whole, torch.zeros(ranks * length - num_elements)]).chunk(ranks)[rank]


RESHARD = Exercise(
    reshard,
    _draw_checkpoint,
    {
        "every file is read whole; read what is in this rank's slice": loading(_whole_files),
        "the padding at the end of the files is taken for elements; stop at `num_elements`": (
            "min((rank + 1) * length, num_elements)",
            "min((rank + 1) * length, saved_by * saved)",
        ),
        "the slice has no padding; all slices have equal length": (
            "return mine",
            "return mine[: max(0, stop - start)]",
        ),
        "only the file of the same number is read": (
            "in range(saved_by):",
            "in range(rank, min(rank + 1, saved_by)):",
        ),
        "a slice is as long as before, for `saved_by` ranks": (
            "-(-num_elements // ranks)",
            "saved",
        ),
        "lengths are rounded down, and the last elements are left out": (
            "saved, length = -(-num_elements // saved_by), -(-num_elements // ranks)",
            "saved, length = num_elements // saved_by, num_elements // ranks",
        ),
        "parts are put where they are in their file; count from the start of the slice": (
            "mine[first - start : last - start] = part",
            "put = first - file * saved\n"
            "            mine[put : put + len(part)] = part[: length - put]",
        ),
    },
    tier="core",
    trials=60,
    describe=difference,
)


# Better than largest first


@weighed
def fair_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    # largest first
    owners, loads = [0] * len(sizes), [0] * ranks
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
            for rank in range(ranks):
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


def _excess(played: Callable) -> float:
    """By how much the largest load is above an equal share, in %: the mean over fixed cases."""
    generator, found = random.Random(8), []
    for _ in range(40):
        ranks = generator.randint(3, 5)
        sizes = [generator.randint(20, 100) for _ in range(3 * ranks)]
        owners = played.__wrapped__(list(sizes), ranks)  # type: ignore[attr-defined]
        loads = [sum(s for s, o in zip(sizes, owners) if o == rank) for rank in range(ranks)]
        found.append(100 * (max(loads) * ranks / sum(sizes) - 1))
    return statistics.mean(found)


FAIR_OWNERS = Exercise(
    fair_owners,
    _draw_parameters,
    {
        "parameters go to the ranks round robin, whatever their sizes": (
            "return owners",
            "return [index % ranks for index in range(len(sizes))]",
        ),
        "some parameters have no owner": ("return owners", "return owners[:-1]"),
    },
    tier="open",
    trials=40,
    measure=_excess,
    unit="% above an equal share",
)


def check_balanced_owners(attempt: Callable) -> None:
    """Check `balanced_owners(sizes, ranks)` -> the rank that owns each parameter."""
    check(BALANCED_OWNERS, weighed(attempt))


def check_shard_boundaries(attempt: Callable) -> None:
    """Check `shard_boundaries(num_elements, ranks, alignment)` -> (start, stop) of each rank."""
    check(SHARD_BOUNDARIES, in_whole_numbers(attempt))


def check_zero1_step(attempt: Callable) -> None:
    """Check `zero1_step(params, grads, state, ranks)`, and run a right one on two processes."""
    judge = compared_with(functools.partial(train_alone, 2, 5), "on two processes, after 5 steps")
    check_on_processes(ZERO1_STEP, stepping(attempt), train_attempt, 2, 5, judge=judge)


def check_reshard(attempt: Callable) -> None:
    """Check `reshard(read, num_elements, saved_by, ranks, rank)` -> the slice of that rank."""
    check(RESHARD, loading(attempt))


def check_fair_owners(attempt: Callable) -> None:
    """Check `fair_owners(sizes, ranks)` -> the rank that owns each parameter, and measure it.

    A partition that is as good as largest first on each input is right only if it is better on
    average.
    """
    played, rule = weighed(attempt), _excess(balanced_owners)
    text = verdict(FAIR_OWNERS, played)
    # one that draws at random may be as good now, and better then
    if result_of(text) == "passed" and _excess(played) >= rule:
        text = text.replace("right: as expected", "not yet: as good as largest first", 1)
        text += f"\n  On average it must be below largest first, {rule:.3g} % above an equal share."
    report(text, name_of(attempt), FAIR_OWNERS.tier)


def check_sent_bytes(attempt: Callable) -> None:
    """Check `sent_bytes(method, num_bytes, ranks)` -> bytes that each rank sends in a step."""
    check(SENT_BYTES, attempt)
