"""Exercises of notebook 07: the ring, buckets, hooks in one order, a deadlock, unequal batches."""

from __future__ import annotations

import functools
import operator
import random
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.ddp.launcher import launch
from lib.lessons.ddp import attempts
from lib.lessons.ddp.stack import Layers, bucketed, time_steps
from lib.lessons.exercise import Exercise, check, check_on_processes, difference, edited
from lib.lessons.ranks import (
    MOST_OFF,
    Threads,
    compared_with,
    run_on_threads,
    whole_numbers,
)
from lib.lessons.simulated_network import Network
from lib.profiling.collectives import Link

# A network of no particular speed, by a virtual clock, that names calls that do not match.
STRICT_NETWORK = Network(Link(1.0, 1.0), clock="virtual")


def _returned(found: Any) -> Tensor:
    """The result of an attempt as a tensor.

    Raises:
        ValueError: it returned nothing.
    """
    if found is None:
        raise ValueError("it returned None (is a `return` missing?)")
    return torch.as_tensor(found)


# Exercise 1


def _draw_cost(generator: random.Random, size: int) -> tuple:
    num_bytes = generator.choice([0, 1000, 10**6, 25 * 10**6, 10**9])
    ranks = generator.choice([1, 2, 3, 4, 8, 64])
    return num_bytes, ranks, generator.choice([0, 5, 20, 300]), generator.choice([1, 12.5, 300])


def all_reduce_ms(num_bytes: int, ranks: int, latency_us: float, bandwidth_gbs: float) -> float:
    messages = 2 * (ranks - 1)
    waiting = messages * latency_us / 1e3
    sending = messages / ranks * num_bytes / (bandwidth_gbs * 1e6)
    return waiting + sending


ALL_REDUCE_MS = Exercise(
    all_reduce_ms,
    _draw_cost,
    {
        "only one of the two phases is counted; an all-gather takes as many steps as the "
        "reduce-scatter": ("2 * (ranks - 1)", "ranks - 1"),
        "the bytes of only one of the two phases are counted": ("/ ranks *", "/ 2 / ranks *"),
        "the latency of only one of the two phases is counted": ("* latency", "/ 2 * latency"),
        "each step sends all the bytes; it sends one chunk of n": (" / ranks *", " *"),
        "the bytes count once; each rank sends 2 (n - 1) / n times as many": (
            "messages / ranks * num_bytes",
            "num_bytes",
        ),
        "the bandwidth is in bits; it is GB/s, of bytes": ("* 1e6", "* 1e6 / 8"),
        "each phase has n steps; n - 1 are enough, since each rank already has one chunk of the "
        "result": ("2 * (ranks - 1)", "2 * ranks"),
        "the latency counts once; every step waits for it": ("messages * latency", "latency"),
        "the latency is missing": ("waiting + sending", "sending"),
        "the latency is left in µs; the result is in ms": (" / 1e3", ""),
        "the time for the bytes is in seconds; the result is in ms": ("1e6", "1e9"),
        "the result is in seconds, not in ms": ("waiting + sending", "(waiting + sending) / 1e3"),
        "a GB counts as 2³⁰ bytes; for bandwidth it is 10⁹": ("1e6", "2**30 / 1e3"),
    },
)


# Exercise 2


def _draw_ring(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 5)
    # mostly no multiple of the ranks
    length = ranks * generator.randint(1, 1 + size // 4) + generator.choice([0, 1, 1, 2])
    return ([whole_numbers(generator, length) for _ in range(ranks)],)


def on_ring(attempt: Callable) -> Callable[[Sequence[Tensor]], dict[str, Any]]:
    """A function that adds up with `attempt(tensor, ranks)` on threads, and counts what is sent.

    It has to be a ring, of no collectives. Who sends fewer elements than the solution is as right.
    """

    @functools.wraps(attempt)
    def played(tensors: Sequence[Tensor]) -> dict[str, Any]:
        def job(ranks: Threads) -> tuple[list, int, int, int]:
            found = _returned(attempt(tensors[ranks.number].clone(), ranks)).tolist()
            sent_to = sum(direction == "to" for direction, _ in ranks.messages)
            return found, ranks.collectives, sent_to, ranks.elements_sent

        count, length = len(tensors), len(tensors[0])
        best = 2 * (count - 1) * -(-length // count)
        found: dict[str, Any] = {}
        for number, (total, collectives, sent_to, sent) in enumerate(run_on_threads(job, count)):
            found[f"sum on rank {number}"] = total
            found[f"collectives that rank {number} calls"] = collectives
            found[f"ranks that rank {number} sends to"] = max(sent_to, 1)
            found[f"elements that rank {number} sends"] = max(sent, best)
        return found

    return played


@on_ring
def ring_all_reduce(tensor: Tensor, ranks: Threads) -> Tensor:
    n, me = ranks.count, ranks.number
    # as many chunks as ranks, of one length
    length = -(-len(tensor) // n)
    padded = torch.cat([tensor, torch.zeros(n * length - len(tensor))])
    chunks = list(padded.split(length))
    for step in range(2 * (n - 1)):
        out, into = (me - step) % n, (me - step - 1) % n
        ranks.send(chunks[out], (me + 1) % n)
        arrived = ranks.receive((me - 1) % n, like=chunks[into])
        chunks[into] = arrived + chunks[into] if step < n - 1 else arrived
    return torch.cat(chunks)[: len(tensor)]


@on_ring
def _send_everything_around(tensor: Tensor, ranks: Threads) -> Tensor:
    total = passed = tensor
    for _ in range(ranks.count - 1):
        ranks.send(passed, (ranks.number + 1) % ranks.count)
        passed = ranks.receive((ranks.number - 1) % ranks.count, like=tensor)
        total = total + passed
    return total


@on_ring
def _call_the_collective(tensor: Tensor, ranks: Threads) -> Tensor:
    return ranks.all_reduce(tensor)


@on_ring
def _send_chunks_to_their_ranks(tensor: Tensor, ranks: Threads) -> Tensor:
    n, me = ranks.count, ranks.number
    length = -(-len(tensor) // n)
    padded = torch.cat([tensor, torch.zeros(n * length - len(tensor))])
    chunks = list(padded.split(length))
    others = [rank for rank in range(n) if rank != me]
    for other in others:
        ranks.send(chunks[other], other)
    chunks[me] = chunks[me] + sum(ranks.receive(other, like=chunks[me]) for other in others)
    for other in others:
        ranks.send(chunks[me], other)
    for other in others:
        chunks[other] = ranks.receive(other, like=chunks[me])
    return torch.cat(chunks)[: len(tensor)]


def _ring_fault(yours: Any, expected: Any) -> str:
    """The first wrong value, with what is counted as a sentence."""
    found = difference(yours, expected)
    counted = re.match(
        r"'(ranks|elements|collectives).* rank (\d+).*': yours (\d+), expected (\d+)", found
    )
    if counted is None:
        return found
    kind, rank, count, right = counted.groups()
    times = "once" if count == "1" else f"{count} times"
    return {
        "ranks": f"rank {rank} sent to {count} ranks; in a ring, a rank sends to one",
        "elements": f"rank {rank} sent {count} elements; {right} are enough",
        "collectives": f"rank {rank} called a collective {times}; use `send` and `receive` alone",
    }[kind]


RING = Exercise(
    ring_all_reduce,
    _draw_ring,
    {
        "you call the all-reduce that there is; make one of `send` and `receive`": (
            _call_the_collective
        ),
        "chunks go straight to the rank that adds them up, or sums straight to all ranks; in a "
        "ring a rank sends only to its neighbor": _send_chunks_to_their_ranks,
        "each chunk ends up as one rank's own, not as a sum: either what arrives is never added, "
        "or the second half begins again with this rank's own chunk, not with the one just become "
        "whole": (
            "(me - step) % n, (me - step - 1) % n",
            "(me - step % (n - 1)) % n, (me - step % (n - 1) - 1) % n",
        ),
        "what arrives is added in both halves; in the second half it is a whole sum, and replaces "
        "what the rank had": (" if step < n - 1 else arrived", ""),
        "the second half is missing: each rank has one whole sum, and sends it around": (
            "range(2 * (n - 1))",
            "range(n - 1)",
        ),
        "each rank sends its own chunk in every step; pass on the one that has just arrived": (
            "out, into = (me - step) % n, (me - step - 1) % n",
            "out, into = me, (me - 1) % n",
        ),
        "the first half is one step too long; after n - 1 steps each rank has a whole sum": (
            "step < n - 1",
            "step < n",
        ),
        "whole tensors are sent around; send chunks": _send_everything_around,
        "the padding is still there; cut it off": (
            "torch.cat(chunks)[: len(tensor)]",
            "torch.cat(chunks)",
        ),
    },
    tier="core",
    trials=40,
    describe=_ring_fault,
)


# Exercise 3


def _draw_uneven(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    # the last batch may leave a rank with nothing
    counts = [generator.choice([0, 1, 2, 3, 4, 8]) for _ in range(ranks)]
    counts[generator.randrange(ranks)] = 4
    shape = 1 + size // 4
    # the gradient of a mean over nothing is nan
    gradients = [
        whole_numbers(generator, shape) if count else torch.full((shape,), torch.nan)
        for count in counts
    ]
    return gradients, counts


def averaging(attempt: Callable) -> Callable[[Sequence[Tensor], Sequence[int]], Tensor]:
    """A function that averages on threads with `attempt(gradient, sequences, ranks)`."""

    @functools.wraps(attempt)
    def played(gradients: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        def job(ranks: Threads) -> Tensor:
            own = gradients[ranks.number].clone()
            return _returned(attempt(own, counts[ranks.number], ranks))

        return torch.stack(run_on_threads(job, len(counts)))

    return played


@averaging
def mean_gradient(gradient: Tensor, sequences: int, ranks: Threads) -> Tensor:
    total = ranks.all_reduce(torch.tensor(float(sequences)))
    own = gradient * sequences if sequences else torch.zeros_like(gradient)
    return ranks.all_reduce(own) / total


def _by_rank(yours: Any, expected: Any) -> str:
    """The first difference, with the rank and the element in place of a position."""
    found = difference(yours, expected)
    return re.sub(r"^position \((\d+), (\d+)\)", r"rank \1, element \2", found)


MEAN_GRADIENT = Exercise(
    mean_gradient,
    _draw_uneven,
    {
        "this is the mean of the ranks' gradients; ranks with more sequences count more, and those "
        "without any have nan": (
            "own = gradient * sequences if sequences else torch.zeros_like(gradient)\n"
            "    return ranks.all_reduce(own) / total",
            "return ranks.all_reduce(gradient) / ranks.count",
        ),
        "all ranks that have sequences count the same; a rank with twice the sequences counts "
        "twice": (
            "own = gradient * sequences if sequences else torch.zeros_like(gradient)\n"
            "    return ranks.all_reduce(own) / total",
            "own = gradient if sequences else torch.zeros_like(gradient)\n"
            "    return ranks.all_reduce(own) / ranks.all_reduce(torch.tensor(sequences > 0.0))",
        ),
        "every rank counts the same; a rank with twice the sequences counts twice": (
            "ranks.all_reduce(own) / total",
            "ranks.all_reduce(own / max(sequences, 1)) / ranks.count",
        ),
        "the sum is divided by the number of ranks; divide by that of all sequences": (
            "ranks.all_reduce(own) / total",
            "ranks.all_reduce(own) / ranks.count",
        ),
        "the sum is divided by this rank's sequences; divide by those of all ranks": (
            "ranks.all_reduce(own) / total",
            "ranks.all_reduce(own) / sequences",
        ),
        "the sum that `ranks.all_reduce` returns is not used; its argument stays as it is": (
            "ranks.all_reduce(own) / total",
            "own / torch.tensor(float(sequences))",
        ),
        "nan gets into the sum; nan times 0 is nan": (
            "gradient * sequences if sequences else torch.zeros_like(gradient)",
            "gradient * sequences",
        ),
        "gradients are added up without their number of sequences": (
            "gradient * sequences if",
            "gradient if",
        ),
    },
    tier="core",
    trials=60,
    describe=_by_rank,
)


# Exercise 4


def _draw_sizes(generator: random.Random, size: int) -> tuple:
    count = generator.randint(1, 3 + size // 2)
    cap = generator.randint(8, 12)
    # some larger than a bucket, some that fill one exactly
    sizes = [generator.choice([1, 2, 3, 4, 5, cap, cap + 3]) for _ in range(count)]
    return sizes, cap, generator.randint(2, 5)


def bucket_lists(attempt: Callable) -> Callable[[Sequence[int], int, int], Any]:
    """A function that returns what `attempt` does, with buckets that are tuples as lists."""

    @functools.wraps(attempt)
    def played(sizes: Sequence[int], cap: int, first_cap: int) -> Any:
        found = attempt(sizes, cap, first_cap)
        if not isinstance(found, (list, tuple)):
            return found
        return [list(bucket) if isinstance(bucket, tuple) else bucket for bucket in found]

    return played


@bucket_lists
def assign_buckets(sizes: Sequence[int], cap: int, first_cap: int) -> list[list[int]]:
    buckets, filled = [[]], 0
    for index in reversed(range(len(sizes))):
        limit = cap if len(buckets) > 1 else first_cap
        if buckets[-1] and filled + sizes[index] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


ASSIGN_BUCKETS = Exercise(
    assign_buckets,
    _draw_sizes,
    {
        "parameters go into buckets in forward order; gradients arrive in the reverse order, the "
        "last parameter's first": ("reversed(range(len(sizes)))", "range(len(sizes))"),
        "the first bucket has the same cap as the others; it should be smaller, so that it is full "
        "early": (" if len(buckets) > 1 else first_cap", ""),
        "all buckets have the cap of the first": ("cap if len(buckets) > 1 else ", ""),
        "a bucket is closed only once it is over its cap; check before you add a parameter to it, "
        "not after": ("filled + sizes[index] >", "filled >="),
        "a parameter that fills a bucket exactly is kept out of it": ("> limit", ">= limit"),
        "the last, partly filled bucket is missing": ("return buckets", "return buckets[:-1]"),
        "the parameter that closes a bucket is in none of them; it should be the first of the next "
        "bucket": ("filled = 0\n", "filled = 0\n            continue\n"),
        "each parameter has its own bucket": (" and filled + sizes[index] > limit", ""),
        "there is an empty bucket before a parameter above the cap": ("buckets[-1] and ", ""),
        "parameters are numbered in the order in which gradients arrive; a parameter's number is "
        "its index in `sizes`": ("(index)", "(len(sizes) - 1 - index)"),
        "the numbers in each bucket are sorted; keep them in the order in which their gradients "
        "arrive": ("return buckets", "return [sorted(bucket) for bucket in buckets]"),
        "buckets hold the sizes of parameters, not their numbers": ("(index)", "(sizes[index])"),
    },
)


# Exercise 5


def _draw_backward(generator: random.Random, size: int) -> tuple:
    count = generator.randint(2, 4 + size // 4)
    params = list(range(count))
    generator.shuffle(params)
    cuts = sorted(generator.sample(range(1, count), generator.randint(0, min(3, count - 1))))
    buckets = [params[a:b] for a, b in zip([0, *cuts], [*cuts, count])]
    steps = []
    for _ in range(2):
        # mostly about in the order of the buckets, now and then not at all
        arrivals = list(params)
        for _ in range(generator.choice([0, 1, 1, 4])):
            a, b = generator.randrange(count), generator.randrange(count)
            arrivals[a], arrivals[b] = arrivals[b], arrivals[a]
        steps.append(arrivals)
    return buckets, steps


def play(add_hooks: Callable) -> Callable[[Sequence, Sequence], list[str]]:
    """A function that runs backward passes with the hooks of `add_hooks` and logs the events.

    Its arguments are the parameters of each bucket, and the order in which gradients arrive in each
    step. Tensors and hooks are real; `start(k)` only logs what bucket k would send. In the second
    step gradients begin as zeros, as after `zero_grad(set_to_none=False)`.
    """

    @functools.wraps(add_hooks)
    def played(buckets: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]) -> list[str]:
        params = [torch.ones(2, requires_grad=True) for _ in range(sum(map(len, buckets)))]
        events: list[str] = []

        def start(number: int) -> None:
            if not hasattr(number, "__index__"):
                raise TypeError(f"start takes the number of a bucket, got {number!r}")
            number = operator.index(number)
            # every gradient is 1
            absent = [i for i in buckets[number] if params[i].grad is None or params[i].grad[0] < 1]
            what = f" without gradient {absent[0]}" if absent else ""
            events.append(f"bucket {number} starts{what}")

        add_hooks(params, buckets, start)
        for arrivals in steps:
            for index in arrivals:
                events.append(f"gradient {index} arrives")
                params[index].sum().backward()
            events.append("the step ends")
            for param in params:
                if param.grad is not None:
                    param.grad.zero_()
        return events

    return played


@play
def add_hooks(params: Sequence[Tensor], buckets: Sequence[Sequence[int]], start: Callable) -> None:
    arrived, started = set(), set()

    def hook(index, param):
        arrived.add(index)
        for number, bucket in enumerate(buckets):
            if number in started:
                continue
            if not arrived.issuperset(bucket):
                break
            start(number)
            started.add(number)
        if len(started) == len(buckets):
            arrived.clear()
            started.clear()

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(functools.partial(hook, index))


@play
def _count_down(
    params: Sequence[Tensor], buckets: Sequence[Sequence[int]], start: Callable
) -> None:
    absent, started = [len(bucket) for bucket in buckets], []

    def hook(number, param):
        absent[number] -= 1
        while len(started) < len(buckets) and absent[len(started)] == 0:
            started.append(len(started))
            start(started[-1])
        if len(started) == len(buckets):
            absent[:] = [len(bucket) for bucket in buckets]
            started.clear()

    for number, bucket in enumerate(buckets):
        for index in bucket:
            params[index].register_post_accumulate_grad_hook(functools.partial(hook, number))


ADD_HOOKS = Exercise(
    add_hooks,
    _draw_backward,
    {
        "a bucket counts as full once no gradient of it is None; a gradient may also be left from "
        "the step before, as zeros": (
            "not arrived.issuperset(bucket)",
            "any(params[i].grad is None for i in bucket)",
        ),
        "a bucket starts with its first gradient; wait until all gradients of the bucket have "
        "arrived": ("not arrived.issuperset", "arrived.isdisjoint"),
        "a bucket starts before an earlier one; on ranks whose gradients arrive in another order, "
        "all-reduces would be mixed up": ("break", "continue"),
        "a hook starts at most one bucket; a gradient may also release full buckets that "
        "waited for an earlier one": (
            "started.add(number)",
            "started.add(number)\n            break",
        ),
        "the second step starts nothing; once the last bucket has started, forget what arrived": (
            "            arrived.clear()\n            started.clear()",
            "            pass",
        ),
        "all hooks act as the last parameter's: a function made in a loop sees the loop variable's "
        "final value, unless functools.partial keeps the present one": (
            "functools.partial(hook, index)",
            "lambda param: hook(index, param)",
        ),
        "all hooks act as the last bucket's: a function made in a loop sees the loop variable's "
        "final value, unless functools.partial keeps the present one": edited(
            _count_down, "functools.partial(hook, number)", "lambda param: hook(number, param)"
        ),
        "one gradient starts at most one bucket (`if` in place of `while`); it may also release "
        "full buckets that waited for an earlier one": edited(_count_down, "while", "if"),
        "the hooks run before the gradient is stored; register_post_accumulate_grad_hook runs them "
        "after": ("register_post_accumulate_grad_hook", "register_hook"),
        "nothing starts before the last gradient, so nothing overlaps": (
            "        for number,",
            "        if len(arrived) < len(params):\n            return\n        for number,",
        ),
        "a bucket starts again with each later gradient; remember which buckets have started in "
        "this step": ("number in started", "False"),
    },
    tier="core",
)


# Exercise 6


def _draw_deadlock(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 3)
    shapes = {f"w{n}": generator.randint(1, 3) for n in range(generator.randint(2, 3 + size // 5))}
    gradients = []
    for number in range(ranks):
        # in the order in which backward made them, mostly not all
        names = generator.sample(list(shapes), generator.randint(1, len(shapes)))
        if size == 1:
            # at first only the last rank lacks only the last: then the others wait for it
            names = list(shapes)[: len(shapes) - (number == ranks - 1)]
        gradients.append({name: whole_numbers(generator, shapes[name]) for name in names})
    return {name: torch.ones(length) for name, length in shapes.items()}, gradients


class Name(str):
    """A name whose hash depends on the rank, as that of any string does in real processes.

    So a set of names has another order on each rank.
    """

    def __new__(cls, name: str, rank: int) -> Name:
        made = super().__new__(cls, name)
        made.number = zlib.crc32(f"{rank} {name}".encode())  # type: ignore[attr-defined]
        return made

    def __hash__(self) -> int:
        return self.number  # type: ignore[attr-defined]


def debugging(attempt: Callable) -> Callable[[dict, list[dict]], dict[str, list]]:
    """A function that averages on threads with `attempt(params, gradients, ranks)`."""

    @functools.wraps(attempt)
    def played(params: dict, gradients: list[dict]) -> dict[str, Any]:
        def job(ranks: Threads) -> dict[str, Any]:
            names = {name: Name(name, ranks.number) for name in params}
            own = {names[name]: gradient for name, gradient in gradients[ranks.number].items()}
            found = attempt({names[name]: param for name, param in params.items()}, own, ranks)
            return {
                str(name): [float(f"{x:.6g}") for x in _returned(mean).tolist()]
                for name, mean in found.items()
            }

        found = run_on_threads(job, len(gradients))
        return {f"{name} on rank {n}": one[name] for n, one in enumerate(found) for name in one}

    return played


@debugging
def average(params: dict, gradients: dict, ranks: Threads) -> dict:
    means = {}
    for name, param in params.items():
        gradient = gradients.get(name, torch.zeros_like(param))
        means[name] = ranks.all_reduce(gradient) / ranks.count
    return means


AVERAGE = Exercise(
    average,
    _draw_deadlock,
    {
        "a rank averages only the gradients that it has; others wait for the ones it lacks": (
            "params.items():\n        gradient = gradients.get(name, torch.zeros_like(param))",
            "params.items():\n        if name not in gradients:\n            continue\n"
            "        gradient = gradients[name]",
        ),
        "ranks go through gradients in the order in which they arrived, which is not the same on "
        "all; go through the parameters": (
            "params.items():\n        gradient = gradients.get(name, torch.zeros_like(param))",
            "[*gradients.items(), *((n, torch.zeros_like(p)) for n, p in params.items() "
            "if n not in gradients)]:\n        gradient = param",
        ),
        "the sum is divided by the ranks that have a gradient; in one process the others' part of "
        "the batch counts, with a gradient of 0": (
            "/ ranks.count",
            "/ ranks.all_reduce(torch.tensor(float(name in gradients))).clamp(min=1)",
        ),
        "ranks go through a set; a set of strings has another order in each process": (
            "params.items()",
            "[(name, params[name]) for name in set(params)]",
        ),
        "you return the sum; divide it by the number of ranks": (" / ranks.count", ""),
        "the sum that `ranks.all_reduce` returns is not used; its argument stays as it is": (
            "ranks.all_reduce(gradient) / ranks.count",
            "gradient / ranks.count",
        ),
    },
    tier="core",
    trials=60,
)


# Exercise 7


def _draw_training(generator: random.Random, size: int) -> tuple:
    buckets, _ = _draw_backward(generator, size)
    count = sum(map(len, buckets))
    # of each step, the parameters whose gradients arrive on each rank, mostly not all
    steps = [
        [generator.sample(range(count), generator.randint(count - 1, count)) for _ in range(2)]
        for _ in range(2)
    ]
    return buckets, steps


def training(attempt: Callable) -> Callable[[Sequence, Sequence], dict[str, Any]]:
    """A function that runs steps on threads with the wrapper `attempt(params, buckets, ranks)`."""

    @functools.wraps(attempt)
    def played(buckets: Sequence, steps: Sequence) -> dict[str, Any]:
        def job(ranks: Threads) -> dict[str, Any]:
            count, me = sum(map(len, buckets)), ranks.number
            params = [
                torch.full((1 + n % 3,), 10.0 * me + n, requires_grad=True) for n in range(count)
            ]
            finish = attempt(params, buckets, ranks)
            if not callable(finish):
                raise TypeError(f"return the function that ends a step, not {finish!r}")
            found: dict[str, Any] = {"weights": [param.tolist() for param in params]}
            for step, arrivals in enumerate(steps):
                sent, waits = ranks.calls["all-reduces"], ranks.waits
                for index in arrivals[me]:
                    (params[index].sum() * (2 + index + 3 * me + step)).backward()
                sent, waits = ranks.calls["all-reduces"] - sent, ranks.waits - waits
                found[f"all-reduces that start in backward {step}"] = sent
                found[f"all-reduces that backward {step} waits for"] = waits
                finish()
                for index, param in enumerate(params):
                    own = None if param.grad is None else param.grad.tolist()
                    found[f"gradient {index} of step {step}"] = own
                    param.grad = None
            return found

        by_rank = run_on_threads(job, len(steps[0]))
        return {f"{what}, rank {n}": one[what] for n, one in enumerate(by_rank) for what in one}

    return played


@training
def data_parallel(params: Sequence[Tensor], buckets: Sequence, ranks: Threads) -> Callable:
    for param in params:
        param.data.copy_(ranks.broadcast(param.data))
    arrived, works = set(), []

    def start():
        grads = [
            params[i].grad if i in arrived else torch.zeros_like(params[i])
            for i in buckets[len(works)]
        ]
        works.append(ranks.start_all_reduce(torch.cat([grad.flatten() for grad in grads])))

    def hook(index, param):
        arrived.add(index)
        while len(works) < len(buckets) and arrived.issuperset(buckets[len(works)]):
            start()

    def finish():
        while len(works) < len(buckets):
            start()
        for bucket, wait in zip(buckets, works):
            mean = wait() / ranks.count
            for i, part in zip(bucket, mean.split([params[i].numel() for i in bucket])):
                params[i].grad = part.view_as(params[i])
        arrived.clear()
        works.clear()

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(functools.partial(hook, index))
    return finish


@training
def _send_any_full_bucket(params: Sequence[Tensor], buckets: Sequence, ranks: Threads) -> Callable:
    for param in params:
        param.data.copy_(ranks.broadcast(param.data))
    arrived, works = set(), {}

    def start(number):
        grads = [
            params[i].grad if i in arrived else torch.zeros_like(params[i]) for i in buckets[number]
        ]
        flat = torch.cat([grad.flatten() for grad in grads])
        works[number] = ranks.start_all_reduce(flat)

    def hook(index, param):
        arrived.add(index)
        for number, bucket in enumerate(buckets):
            if number not in works and arrived.issuperset(bucket):
                start(number)

    def finish():
        for number in range(len(buckets)):
            if number not in works:
                start(number)
        for number, bucket in enumerate(buckets):
            mean = works[number]() / ranks.count
            for i, part in zip(bucket, mean.split([params[i].numel() for i in bucket])):
                params[i].grad = part.view_as(params[i])
        arrived.clear()
        works.clear()

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(functools.partial(hook, index))
    return finish


DATA_PARALLEL = Exercise(
    data_parallel,
    _draw_training,
    {
        "ranks keep weights of their own; all begin with those of rank 0": (
            "param.data.copy_(ranks.broadcast(param.data))",
            "pass",
        ),
        "you return the sum of gradients; divide it by the number of ranks": (" / ranks.count", ""),
        "nothing is sent before backward is done, so nothing overlaps": (
            "and arrived.issuperset(buckets[len(works)])",
            "and not arrived",
        ),
        "backward waits for an all-reduce as soon as it has started, so nothing overlaps; wait in "
        "`finish`": (
            "ranks.start_all_reduce(torch.cat([grad.flatten() for grad in grads])))",
            "lambda total=ranks.start_all_reduce(\n"
            "            torch.cat([grad.flatten() for grad in grads]))(): total)",
        ),
        "a bucket is sent before an earlier one; on ranks whose gradients arrive in another order, "
        "all-reduces are mixed up": _send_any_full_bucket,
        "a gradient sends at most one bucket (`if` in place of `while`); it may also release full "
        "buckets that waited for an earlier one": (
            "while len(works) < len(buckets) and",
            "if len(works) < len(buckets) and",
        ),
        "buckets that lack a gradient are never sent; at the end of a step send zeros for it": (
            "        while len(works) < len(buckets):\n            start()\n        for",
            "        for",
        ),
        "what arrived in one step still counts in the next": ("arrived.clear()", "pass"),
        "what one step sent still counts in the next, which sends nothing": (
            "works.clear()",
            "pass",
        ),
    },
    tier="core",
    trials=40,
)


# Exercise 8

# A table of embeddings comes first, and a head last; 100 Gb Ethernet is slow beside this model.
BOARD = Layers((800_000, *[60_000] * 10, 300_000), forward=1.0, backward=2.0)
BOARD_NETWORK = Network(Link(750.0, 0.25), clock="virtual")


def _draw_plan(generator: random.Random, size: int) -> tuple:
    return ([generator.choice([1, 2, 5]) for _ in range(1 + size)],)


def partition(attempt: Callable) -> Callable[[Sequence[int]], list[int]]:
    """A function that lists what `attempt(sizes)` puts into buckets, in their order."""

    @functools.wraps(attempt)
    def played(sizes: Sequence[int]) -> list[int]:
        buckets = attempt(list(sizes))
        if buckets is None:
            raise ValueError("it returned None (is a `return` missing?)")
        if not all(map(len, buckets)):
            raise ValueError("there is an empty bucket")
        return [index for bucket in buckets for index in bucket]

    return played


@partition
def a_quarter_each(sizes: Sequence[int]) -> list[list[int]]:
    cap = sum(sizes) / 4
    buckets, filled = [[]], 0
    for index in reversed(range(len(sizes))):
        if buckets[-1] and filled + sizes[index] > cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


@partition
def plan(sizes: Sequence[int]) -> list[list[int]]:
    order = [*reversed(range(len(sizes)))]
    # for the first k layers of backward: when they are sent at the earliest, and in which buckets
    best = [(0.0, [])]
    for k in range(1, len(order) + 1):
        ways = []
        for j in range(k):
            message = 1.5 + 16e-6 * sum(sizes[index] for index in order[j:k])
            sent, buckets = best[j]
            ways.append((max(sent, 2.0 * k) + message, [*buckets, order[j:k]]))
        best.append(min(ways))
    return best[-1][1]


def step_ms(played: Callable) -> float:
    """The step of a fixed stack on two ranks, with the buckets that a function plans."""
    maker = bucketed(played.__wrapped__(list(BOARD.sizes)))  # type: ignore[attr-defined]
    steps = launch(time_steps, 2, {"": maker}, {"": BOARD_NETWORK}, BOARD, backend="gloo")
    return max(step["", ""].step_ms for step in steps)


PLAN = Exercise(
    plan,
    _draw_plan,
    {
        "layers are in the order of forward; gradients arrive from the last layer to the first": (
            "reversed(range(len(sizes)))",
            "range(len(sizes))",
        ),
        "the layer that closes a bucket is in none": edited(
            a_quarter_each, "filled = 0\n", "filled = 0\n            continue\n"
        ),
    },
    tier="open",
    trials=40,
    measure=step_ms,
    unit="ms a step",
    baseline=a_quarter_each,
)


def check_all_reduce_ms(attempt: Callable) -> None:
    """Check `all_reduce_ms(num_bytes, ranks, latency_us, bandwidth_gbs)` -> milliseconds."""
    check(ALL_REDUCE_MS, attempt)


def check_ring(attempt: Callable) -> None:
    """Check `ring_all_reduce(tensor, ranks)` -> the sum, and run a right one on four processes."""

    def judge(found: list[tuple[float, float]]) -> tuple[bool, str]:
        off, milliseconds = max(one[0] for one in found), found[0][1]
        words = (
            f"on four processes, 4 MB in {milliseconds:.0f} ms: off by {off:.1g} from gloo's sum"
        )
        return off < MOST_OFF, words

    check_on_processes(RING, on_ring(attempt), attempts.ring, 4, judge=judge)


def check_mean_gradient(attempt: Callable) -> None:
    """Check `mean_gradient(gradient, sequences, ranks)` -> the gradient of the whole batch."""
    check(MEAN_GRADIENT, averaging(attempt))


def check_assign_buckets(attempt: Callable) -> None:
    """Check `assign_buckets(sizes, cap, first_cap)` -> lists of parameter numbers."""
    check(ASSIGN_BUCKETS, bucket_lists(attempt))


def check_add_hooks(attempt: Callable) -> None:
    """Check `add_hooks(params, buckets, start)`, and train with a right one on two processes."""
    where = "on two ranks whose gradients arrive in different orders"
    _train_branches(ADD_HOOKS, play(attempt), attempts.train_with_hooks, where)


def check_average(attempt: Callable) -> None:
    """Check `average(params, gradients, ranks)` -> the mean of each parameter's gradient."""
    check(AVERAGE, debugging(attempt))


def check_data_parallel(attempt: Callable) -> None:
    """Check `data_parallel(params, buckets, ranks)` -> `finish`, and train on two processes."""
    where = "your wrapper on two processes"
    _train_branches(DATA_PARALLEL, training(attempt), attempts.train_wrapped, where)


def _train_branches(exercise: Exercise, played: Callable, job: Callable, where: str) -> None:
    judge = compared_with(functools.partial(attempts.train_branches_alone, 2), where)
    network = {"backend": "simulated", "options": STRICT_NETWORK}
    check_on_processes(exercise, played, job, 2, judge=judge, **network)


def check_plan(attempt: Callable) -> None:
    """Check `plan(sizes)` -> buckets of layers, and time a step with them on two ranks."""
    check(PLAN, partition(attempt))
