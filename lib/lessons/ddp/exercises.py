"""Exercises of notebook 07: buckets, hooks that start their all-reduce, and what it costs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib.lessons.exercise import Exercise, check


def _draw_sizes(generator: random.Random, size: int) -> tuple:
    count = generator.randint(1, 3 + size // 2)
    cap = generator.randint(8, 12)
    # some larger than a bucket, some that fill one exactly
    sizes = [generator.choice([1, 2, 3, 4, 5, cap, cap + 3]) for _ in range(count)]
    return sizes, cap, generator.randint(2, 5)


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
    step. Tensors and hooks are real; `start(k)` only logs what bucket k would send.
    """

    @functools.wraps(add_hooks)
    def played(buckets: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]) -> list[str]:
        params = [torch.ones(2, requires_grad=True) for _ in range(sum(map(len, buckets)))]
        events: list[str] = []

        def start(number: int) -> None:
            absent = [i for i in buckets[number] if params[i].grad is None]
            what = f" without gradient {absent[0]}" if absent else ""
            events.append(f"bucket {number} starts{what}")

        add_hooks(params, buckets, start)
        for arrivals in steps:
            for index in arrivals:
                events.append(f"gradient {index} arrives")
                params[index].sum().backward()
            events.append("the step ends")
            for param in params:
                param.grad = None
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


ADD_HOOKS = Exercise(
    add_hooks,
    _draw_backward,
    {
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
        "the hooks run before the gradient is stored; register_post_accumulate_grad_hook runs them "
        "after": ("register_post_accumulate_grad_hook", "register_hook"),
        "nothing starts before the last gradient, so nothing overlaps": (
            "        for number,",
            "        if len(arrived) < len(params):\n            return\n        for number,",
        ),
        "a bucket starts again with each later gradient; remember which buckets have started in "
        "this step": ("number in started", "False"),
    },
)


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


def check_assign_buckets(attempt: Callable) -> None:
    """Check `assign_buckets(sizes, cap, first_cap)` -> lists of parameter numbers."""
    check(ASSIGN_BUCKETS, attempt)


def check_add_hooks(attempt: Callable) -> None:
    """Check `add_hooks(params, buckets, start)`: hooks that call `start(k)` for full buckets."""
    check(ADD_HOOKS, play(attempt))


def check_all_reduce_ms(attempt: Callable) -> None:
    """Check `all_reduce_ms(num_bytes, ranks, latency_us, bandwidth_gbs)` -> milliseconds."""
    check(ALL_REDUCE_MS, attempt)
