"""Exercises of notebook 08: the ring, buckets, hooks in one order, a deadlock, unequal batches."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.lessons.differences import AtMost, Named
from lib.lessons.exercise import check_of, exercise
from lib.lessons.inputs import choices, ints, lists
from lib.lessons.ranks import Threads, whole_numbers

check = check_of(__name__)


# The ring


def add_up(ring: Callable, length: int, ranks: Threads) -> Named:
    """The sum on a rank, and what it sends; who sends less than the solution is as right."""
    tensor = whole_numbers(random.Random(ranks.number), length)
    found = Named(sum=ring(tensor, ranks))
    sent_to = sum(direction == "to" for direction, _ in ranks.messages)
    found["ranks that it sends to"] = AtMost(sent_to)
    found["elements that it sends"] = AtMost(ranks.elements_sent)
    return found


@exercise(
    "core",
    # mostly no multiple of the ranks
    {"length": ints(1, 23), "ranks": ints(2, 5)},
    harness=add_up,
    ranks=True,
    collectives=("send",),
    processes=4,
    trials=40,
)
def ring(tensor: Tensor, ranks: Threads) -> Tensor:
    n, me = ranks.count, ranks.number
    length = -(-len(tensor) // n)
    padded = torch.cat([tensor, torch.zeros(n * length - len(tensor))])
    chunks = list(padded.split(length))
    for step in range(2 * (n - 1)):
        out, into = (me - step) % n, (me - step - 1) % n
        ranks.send(chunks[out], (me + 1) % n)
        arrived = ranks.receive((me - 1) % n, like=chunks[into])
        chunks[into] = arrived + chunks[into] if step < n - 1 else arrived
    return torch.cat(chunks)[: len(tensor)]


ring.mistakes = """
length = -(-len(tensor) // n) => length = len(tensor) | whole tensors are sent around; send chunks
(me - step) % n, (me - step - 1) % n =>
    (me - step % (n - 1)) % n, (me - step % (n - 1) - 1) % n
    | each chunk ends up as one rank's own, not as a sum: either what arrives is never added, or the
    second half begins again with this rank's own chunk, not with the one just become whole
if step < n - 1 else arrived =>
    | what arrives is added in both halves; in the second half it is a whole sum, and replaces what
    the rank had
range(2 * (n - 1)) => range(n - 1)
    | the second half is missing: each rank has one whole sum, and sends it around
torch.cat(chunks)[: len(tensor)] => torch.cat(chunks) | the padding is still there; cut it off
arrived + chunks[into] => arrived + chunks[out]
    | what arrives is added to the chunk just sent; add it to the chunk of its own number
"""


# What it costs


@exercise(
    "warm-up",
    {
        "num_bytes": choices(0, 1000, 10**6, 25 * 10**6, 10**9),
        "n": choices(1, 2, 3, 4, 8, 64),
        "latency_us": choices(0, 5, 20, 300),
        "bandwidth_gbs": choices(1, 12.5, 300),
    },
)
def all_reduce_ms(num_bytes: int, n: int, latency_us: float, bandwidth_gbs: float) -> float:
    messages = 2 * (n - 1)
    waiting = messages * latency_us / 1e3
    return waiting + messages / n * num_bytes / (bandwidth_gbs * 1e6)


all_reduce_ms.mistakes = """
2 * (n - 1) => n - 1
    | only one of the two phases is counted; an all-gather takes as many steps as the reduce-scatter
messages / n * => messages * | each step sends all the bytes; it sends one chunk of n
messages / n * num_bytes => num_bytes
    | the bytes count once; each rank sends 2 (n - 1) / n times as many
messages * latency_us => latency_us | the latency counts once; every step waits for it
/ 1e3 => | the latency is left in µs; the result is in ms
1e6) => 1e9) | bytes over bytes a second are seconds; the result is in ms
"""


# Unequal last batches


def draw_uneven(generator: random.Random, size: int) -> tuple:
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
    return gradients, counts, ranks


def average_own(average: Callable, gradients: list, sequences: list, ranks: Threads) -> Any:
    """The average that a rank finds with its own gradient and number of sequences."""
    return average(gradients[ranks.number], sequences[ranks.number], ranks)


@exercise("optional", draw_uneven, harness=average_own, ranks=True, same_calls=False, trials=60)
def mean_gradient(gradient: Tensor, sequences: int, ranks: Threads) -> Tensor:
    total = ranks.all_reduce(torch.tensor(float(sequences)))
    own = gradient * sequences if sequences else torch.zeros_like(gradient)
    return ranks.all_reduce(own) / total


mean_gradient.mistakes = """
ranks.all_reduce(own) / total => ranks.all_reduce(gradient) / ranks.count
    | this is the mean of the ranks' gradients; ranks with more sequences count more, and those
    without any have nan
ranks.all_reduce(own) / total => ranks.all_reduce(own / max(sequences, 1)) / ranks.count
    | every rank counts the same; a rank with twice the sequences counts twice
ranks.all_reduce(own) / total => ranks.all_reduce(own) / ranks.count
    | the sum is divided by the number of ranks; divide by that of all sequences
ranks.all_reduce(own) / total => ranks.all_reduce(own) / sequences
    | the sum is divided by this rank's sequences; divide by those of all ranks
ranks.all_reduce(own) / total => own / torch.tensor(float(sequences))
    | the sum that `ranks.all_reduce` returns is not used; its argument stays as it is
gradient * sequences if sequences else torch.zeros_like(gradient) => gradient * sequences
    | nan gets into the sum; nan times 0 is nan
"""


# Buckets


@exercise(
    "warm-up",
    {
        # some larger than a bucket, some that fill one exactly
        "sizes": lists(choices(1, 2, 3, 4, 5, 8, 10, 13), 1, 10),
        "cap": ints(8, 12),
        "first_cap": ints(2, 5),
    },
)
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


assign_buckets.mistakes = """
reversed(range(len(sizes))) => range(len(sizes))
    | parameters go into buckets in forward order; gradients arrive in the reverse order, the last
    parameter's first
if len(buckets) > 1 else first_cap =>
    | the first bucket has the same cap as the others; it should be smaller, to be full early
filled + sizes[index] > => filled >=
    | a bucket is closed only once it is over its cap; check before you add a parameter to it, not
    after
> limit => >= limit | a parameter that fills a bucket exactly is kept out of it
return buckets => return buckets[:-1] | the last, partly filled bucket is missing
.append(index) => .append(len(sizes) - 1 - index)
    | parameters are numbered in the order in which gradients arrive; a parameter's number is its
    index in `sizes`
"""


# Hooks in one order


def draw_backward(generator: random.Random, size: int) -> tuple:
    """Buckets of numbers of parameters, and for two steps the order in which gradients arrive."""
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


def log_events(add_hooks: Callable, buckets: list[list[int]], steps: list[list[int]]) -> list[str]:
    """The events of backward passes with hooks.

    Tensors and hooks are real; `start(k)` only logs what bucket k would send. In the second step
    gradients begin as zeros, as after `zero_grad(set_to_none=False)`.
    """
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


@exercise("optional", draw_backward, harness=log_events)
def add_hooks(params: Sequence[Tensor], buckets: Sequence[Sequence[int]], start: Callable) -> None:
    arrived, started = set(), []

    def hook(index, param):
        arrived.add(index)
        while len(started) < len(buckets) and arrived.issuperset(buckets[len(started)]):
            started.append(len(started))
            start(started[-1])
        if len(started) == len(buckets):
            arrived.clear()
            started.clear()

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(functools.partial(hook, index))


add_hooks.mistakes = """
arrived.issuperset(buckets[len(started)]) =>
    all(params[i].grad is not None for i in buckets[len(started)])
    | a bucket counts as full once no gradient of it is None; a gradient may also be left from the
    step before, as zeros
while len(started) < len(buckets) and arrived.issuperset(buckets[len(started)]): =>
    for k in [k for k, b in enumerate(buckets) if k not in started and arrived.issuperset(b)]:
    && started.append(len(started)) => started.append(k)
    | a bucket starts before an earlier one; on ranks whose gradients arrive in another order,
    all-reduces would be mixed up
while => if
    | one gradient starts at most one bucket (`if` in place of `while`); it may also release full
    buckets that waited for an earlier one
            started.clear() => pass
    | the second step starts nothing; once the last bucket has started, forget what arrived
functools.partial(hook, index) => lambda param: hook(index, param)
    | all hooks act as the last parameter's: a function made in a loop sees the loop variable's
    final value, unless functools.partial keeps the present one
arrived.issuperset(buckets[len(started)]) => len(arrived) == len(params)
    | nothing starts before the last gradient, so nothing overlaps
"""


# A deadlock


def draw_deadlock(generator: random.Random, size: int) -> tuple:
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
    return {name: torch.ones(length) for name, length in shapes.items()}, gradients, ranks


def average_all(average: Callable, params: dict, gradients: list[dict], ranks: Threads) -> Any:
    """The means that a rank finds with its own gradients."""
    return average(params, gradients[ranks.number], ranks)


@exercise("optional", draw_deadlock, harness=average_all, ranks=True, same_calls=False, trials=60)
def average(params: dict, gradients: dict, ranks: Threads) -> dict:
    means = {}
    for name, param in params.items():
        gradient = gradients.get(name, torch.zeros_like(param))
        means[name] = ranks.all_reduce(gradient) / ranks.count
    return means


average.mistakes = """
params.items() => [(n, params[n]) for n in params if n in gradients]
    | a rank averages only the gradients that it has; others wait for the ones it lacks
params.items() => [(n, params[n]) for n in {**gradients, **params}]
    | ranks go through gradients in the order in which they arrived, which is not the same on all;
    go through the parameters
/ ranks.count => / ranks.all_reduce(torch.tensor(float(name in gradients))).clamp(min=1)
    | the sum is divided by the ranks that have a gradient; in one process the others' part of the
    batch counts, with a gradient of 0
/ ranks.count => | you return the sum; divide it by the number of ranks
ranks.all_reduce(gradient) / ranks.count => gradient / ranks.count
    | the sum that `ranks.all_reduce` returns is not used; its argument stays as it is
"""


# A wrapper


def draw_training(generator: random.Random, size: int) -> tuple:
    buckets, _ = draw_backward(generator, size)
    count = sum(map(len, buckets))
    # of each step, the parameters whose gradients arrive on each rank, mostly not all
    steps = [
        [generator.sample(range(count), generator.randint(count - 1, count)) for _ in range(2)]
        for _ in range(2)
    ]
    return buckets, steps, 2


def take_steps(wrapper: Callable, buckets: list, steps: list, ranks: Threads) -> Named:
    """The gradients of each step with a wrapper, and when it sends and waits."""
    count, me = sum(map(len, buckets)), ranks.number
    params = [torch.full((1 + n % 3,), 10.0 * me + n, requires_grad=True) for n in range(count)]
    finish = wrapper(params, buckets, ranks)
    if not callable(finish):
        raise TypeError(f"return the function that ends a step, not {finish!r}")
    found = Named(weights=[param.detach().clone() for param in params])
    for step, arrivals in enumerate(steps):
        sent, waits = ranks.calls["all-reduces"], ranks.waits
        for index in arrivals[me]:
            (params[index].sum() * (2 + index + 3 * me + step)).backward()
        sent, waits = ranks.calls["all-reduces"] - sent, ranks.waits - waits
        found[f"all-reduces that start in backward {step}"] = sent
        found[f"all-reduces that backward {step} waits for"] = waits
        finish()
        for index, param in enumerate(params):
            found[f"gradient {index} of step {step}"] = param.grad
            param.grad = None
    return found


@exercise(
    "core",
    draw_training,
    harness=take_steps,
    ranks=True,
    processes=2,
    same_calls=False,
    trials=40,
)
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


data_parallel.mistakes = """
param.data.copy_(ranks.broadcast(param.data)) => pass
    | ranks keep weights of their own; all begin with those of rank 0
/ ranks.count => | you return the sum of gradients; divide it by the number of ranks
and arrived.issuperset(buckets[len(works)]) => and not arrived
    | nothing is sent before backward is done, so nothing overlaps
works.append(ranks.start_all_reduce(torch.cat([grad.flatten() for grad in grads]))) =>
    total = ranks.start_all_reduce(torch.cat([grad.flatten() for grad in grads]))()
    ; works.append(lambda: total)
    | backward waits for an all-reduce as soon as it has started, so nothing overlaps; wait in
    `finish`
        works.clear() => pass
    | buckets of one step count as sent in the next; forget what was sent
part.view_as(params[i]) => part.view_as(params[i]) if params[i].grad is not None else None
    | a parameter without a gradient on this rank stays without; it gets the mean, too
"""


# A plan of buckets

# The weights of each layer: a table of embeddings comes first, and a head last.
BOARD = (800_000, *[60_000] * 10, 300_000)


def in_order(planner: Callable, sizes: list[int]) -> list[int]:
    """What is in the buckets, in their order."""
    buckets = planner(sizes)
    if not all(map(len, buckets)):
        raise ValueError("there is an empty bucket")
    return [index for bucket in buckets for index in bucket]


def a_quarter_each(sizes: Sequence[int]) -> list[list[int]]:
    return assign_buckets.solve(sizes, sum(sizes) / 4, sum(sizes) / 4)


def step_ms(planner: Callable) -> float:
    """The step of a fixed stack, with the buckets that a function plans, played on a clock."""
    now, network = 1.0 * len(BOARD), 0.0  # forward has run
    for bucket in planner(list(BOARD)):
        now += 2.0 * len(bucket)  # backward, until the bucket is full
        network = max(now, network) + 1.5 + 16e-6 * sum(BOARD[index] for index in bucket)
    return network


@exercise(
    "open",
    {"sizes": lists(choices(1, 60_000, 300_000, 800_000), 2, 16)},
    harness=in_order,
    trials=40,
    measure=step_ms,
    unit="ms a step",
    baseline=a_quarter_each,
    must_beat=True,
)
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


plan.mistakes = """
reversed(range(len(sizes))) => range(len(sizes))
    | layers are in the order of forward; gradients arrive from the last layer to the first
return best[-1][1] => return [bucket[:-1] or bucket for bucket in best[-1][1]]
    | the layer that closes a bucket is in none
"""
