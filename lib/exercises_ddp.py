"""Exercises of notebook 06: buckets, the hook that starts an all-reduce, its cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lib.communication_costs import predicted_ms
from lib.exercises import Exercise, check


def _like(function: Callable, name: str, **how) -> Callable:
    """`function` with the keywords `how`, which make a mistake, under a name of its own."""

    def mistaken(*arguments):
        return function(*arguments, **how)

    mistaken.__name__ = name
    return mistaken


def _draw_sizes(generator: random.Random, size: int) -> tuple:
    count = generator.randint(1, 3 + size // 2)
    cap = generator.randint(8, 12)
    # some larger than a bucket, some that fill one to the last byte
    sizes = [generator.choice([1, 2, 3, 4, 5, cap, cap + 3]) for _ in range(count)]
    return sizes, cap, generator.randint(2, 5)


def _assign_buckets(
    sizes: Sequence[int],
    cap: int,
    first_cap: int,
    *,
    is_reversed: bool = True,
    caps: Callable[[int, int, int], int] = lambda full, cap, first: cap if full else first,
    overfills: bool = False,
    fits_exactly: bool = True,
    keeps_last: bool = True,
    keeps_closing: bool = True,
    alone: bool = False,
    leaves_empty: bool = False,
) -> list[list[int]]:
    """The parameters of each bucket; the keywords make mistakes."""
    order = list(range(len(sizes)))
    full: list[list[int]] = []
    bucket: list[int] = []
    for index in reversed(order) if is_reversed else order:
        before = sum(sizes[other] for other in bucket)
        limit = caps(len(full), cap, first_cap)
        filled = before if overfills else before + sizes[index]
        is_over = filled >= limit if overfills or not fits_exactly else filled > limit
        if (bucket or leaves_empty) and (is_over or (alone and bucket)):
            full.append(bucket)
            bucket = []
            if not keeps_closing:
                continue
        bucket.append(index)
    if keeps_last:
        full.append(bucket)
    return full


def _written(name: str, write: Callable[[list[int], Sequence[int]], list[int]]) -> Callable:
    """Right buckets, each written down in another way: `write(bucket, sizes)`."""

    def mistaken(sizes, cap, first_cap):
        return [write(bucket, sizes) for bucket in _assign_buckets(sizes, cap, first_cap)]

    mistaken.__name__ = name
    return mistaken


ASSIGN_BUCKETS = Exercise(
    solve=_assign_buckets,
    draw=_draw_sizes,
    mistakes={
        "parameters go into buckets in the order of their use; gradients arrive in the reverse "
        "order, the last parameter's first": (
            _like(_assign_buckets, "in_order_of_use", is_reversed=False)
        ),
        "the first bucket has the same cap as the others; it is to be full early": (
            _like(_assign_buckets, "one_cap", caps=lambda full, cap, first: cap)
        ),
        "all buckets have the cap of the first": (
            _like(_assign_buckets, "all_small", caps=lambda full, cap, first: first)
        ),
        "a bucket is closed only once it is over its cap; look before you put a parameter in": (
            _like(_assign_buckets, "overfills", overfills=True)
        ),
        "a parameter that fills a bucket exactly is kept out of it; it is within the cap": (
            _like(_assign_buckets, "not_exactly", fits_exactly=False)
        ),
        "the last bucket is missing; what is left after the loop needs one too": (
            _like(_assign_buckets, "no_last", keeps_last=False)
        ),
        "the parameter that closes a bucket goes into none; it begins the next one": (
            _like(_assign_buckets, "loses_one", keeps_closing=False)
        ),
        "each parameter has a bucket of its own, as in `overlap`": (
            _like(_assign_buckets, "each_alone", alone=True)
        ),
        "there is an empty bucket before a parameter that is larger than the cap": (
            _like(_assign_buckets, "leaves_empty", leaves_empty=True)
        ),
        "parameters are numbered as their gradients arrive; a number is the place in `sizes`": (
            _written("from_the_end", lambda bucket, sizes: [len(sizes) - 1 - i for i in bucket])
        ),
        "the numbers in a bucket are sorted; they stand in the order in which gradients arrive": (
            _written("sorted_numbers", lambda bucket, sizes: sorted(bucket))
        ),
        "buckets hold the sizes of parameters; they are to hold their numbers": (
            _written("sizes", lambda bucket, sizes: [sizes[i] for i in bucket])
        ),
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
    """A function that lets gradients arrive where `add_hooks` has put hooks, and notes what starts.

    It takes `buckets`, lists of parameters' numbers, and `steps`, for each step the order in which
    gradients arrive, and returns what happened in words. There are real tensors and real hooks, but
    no process group: `start(k)` is only noted, with what bucket k would send.
    """

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

    played.__name__ = add_hooks.__name__
    return played


def _add_hooks(
    params: Sequence[Tensor],
    buckets: Sequence[Sequence[int]],
    start: Callable[[int], None],
    *,
    waits_for_all: bool = True,
    waits_for_turn: bool = True,
    starts_all_full: bool = True,
    forgets: bool = True,
    binds_late: bool = False,
    too_early: bool = False,
    at_the_end: bool = False,
    repeats: bool = False,
) -> None:
    """Hooks that start each bucket when it is full, in order; the keywords make mistakes."""
    arrived: set[int] = set()
    started: list[int] = []

    def is_full(number: int) -> bool:
        return (all if waits_for_all else any)(index in arrived for index in buckets[number])

    def hook(index: int) -> None:
        arrived.add(index)
        if at_the_end and len(arrived) < len(params):
            return
        for number in range(len(buckets)):
            if number in started and not repeats:
                continue
            if is_full(number):
                start(number)
                started.append(number)
                if not starts_all_full:
                    break
            elif waits_for_turn:
                break
        if forgets and len(arrived) == len(params) and len(set(started)) == len(buckets):
            arrived.clear()
            started.clear()

    for index, param in enumerate(params):
        register = param.register_hook if too_early else param.register_post_accumulate_grad_hook
        number = len(params) - 1 if binds_late else index
        register(lambda grad, number=number: hook(number))


def _mistaken_hooks(name: str, **how) -> Callable:
    def add_hooks(params, buckets, start):
        _add_hooks(params, buckets, start, **how)

    add_hooks.__name__ = name
    return play(add_hooks)


ADD_HOOKS = Exercise(
    solve=play(_add_hooks),
    draw=_draw_backward,
    mistakes={
        "a bucket starts with its first gradient; wait until all of them are there": (
            _mistaken_hooks("any_gradient", waits_for_all=False)
        ),
        "a bucket starts before an earlier one; ranks whose gradients come in another order would "
        "then mix up buckets": _mistaken_hooks("out_of_turn", waits_for_turn=False),
        "a hook starts one bucket at most; a gradient can also free full buckets that waited for "
        "their turn": _mistaken_hooks("one_at_most", starts_all_full=False),
        "the second step starts nothing; once the last bucket has started, forget what arrived": (
            _mistaken_hooks("never_forgets", forgets=False)
        ),
        "all hooks take themselves for that of the last parameter: a function made in a loop sees "
        "the loop's variable as it is later (functools.partial keeps its value)": (
            _mistaken_hooks("binds_late", binds_late=True)
        ),
        "the hooks run before the gradient is there; "
        "param.register_post_accumulate_grad_hook runs them after": (
            _mistaken_hooks("too_early", too_early=True)
        ),
        "nothing starts before the last gradient, so that nothing overlaps": (
            _mistaken_hooks("at_the_end", at_the_end=True)
        ),
        "a bucket starts again with each later gradient; remember which have started": (
            _mistaken_hooks("starts_again", repeats=True)
        ),
    },
)


def _draw_cost(generator: random.Random, size: int) -> tuple:
    num_bytes = generator.choice([0, 1000, 10**6, 25 * 10**6, 10**9])
    ranks = generator.choice([1, 2, 3, 4, 8, 64])
    return num_bytes, ranks, generator.choice([0, 5, 20, 300]), generator.choice([1, 12.5, 300])


def _all_reduce_ms(
    num_bytes: int,
    ranks: int,
    latency_us: float,
    bandwidth_gbs: float,
    *,
    messages: Callable[[int], float] = lambda n: 2 * (n - 1),
    share: Callable[[int], float] = lambda n: 2 * (n - 1) / n,
    us: float = 1e3,
    gbs: float = 1e6,
) -> np.float64:
    """Milliseconds of a ring's all-reduce; the keywords make mistakes."""
    waiting = messages(ranks) * latency_us / us
    return np.float64(waiting + share(ranks) * num_bytes / (bandwidth_gbs * gbs))


def _right_cost(num_bytes: int, ranks: int, latency_us: float, bandwidth_gbs: float) -> np.float64:
    return np.float64(predicted_ms("all_reduce", num_bytes, ranks, latency_us, bandwidth_gbs))


ALL_REDUCE_MS = Exercise(
    solve=_right_cost,
    draw=_draw_cost,
    mistakes={
        "only one of the two phases is counted; all-gather takes as many steps as reduce-scatter": (
            _like(
                _all_reduce_ms,
                "one_phase",
                messages=lambda n: n - 1,
                share=lambda n: (n - 1) / n,
            )
        ),
        "the bytes of only one of the two phases are counted": (
            _like(_all_reduce_ms, "bytes_of_one_phase", share=lambda n: (n - 1) / n)
        ),
        "the latency of only one of the two phases is counted": (
            _like(_all_reduce_ms, "latency_of_one_phase", messages=lambda n: n - 1)
        ),
        "each step sends all bytes; it sends one chunk of n": (
            _like(_all_reduce_ms, "whole_messages", share=lambda n: 2 * (n - 1))
        ),
        "there are n steps in each phase; n - 1 are enough, since each rank has one part itself": (
            _like(_all_reduce_ms, "n_steps", messages=lambda n: 2 * n, share=lambda n: 2)
        ),
        "the latency counts once; every step waits for it": (
            _like(_all_reduce_ms, "latency_once", messages=lambda n: 1)
        ),
        "the latency is missing": _like(_all_reduce_ms, "no_latency", messages=lambda n: 0),
        "the latency is left in µs; the result is in ms": (
            _like(_all_reduce_ms, "latency_in_us", us=1)
        ),
        "the time of the bytes is in seconds; the result is in ms": (
            _like(_all_reduce_ms, "bytes_in_s", gbs=1e9)
        ),
        "the result is in seconds, and not in ms": (
            _like(_all_reduce_ms, "in_seconds", us=1e6, gbs=1e9)
        ),
        "a GB is taken for 2³⁰ bytes; of bandwidth it is 10⁹": (
            _like(_all_reduce_ms, "binary", gbs=2**30 / 1e3)
        ),
    },
)


def check_assign_buckets(attempt: Callable) -> None:
    """Check `assign_buckets(sizes, cap, first_cap)`: -> lists of parameters' numbers."""
    check(ASSIGN_BUCKETS, attempt)


def check_add_hooks(attempt: Callable) -> None:
    """Check `add_hooks(params, buckets, start)`: hooks that call `start(k)` for full buckets."""
    check(ADD_HOOKS, play(attempt))


def check_all_reduce_ms(attempt: Callable) -> None:
    """Check `all_reduce_ms(num_bytes, ranks, latency_us, bandwidth_gbs)`: -> milliseconds."""
    check(ALL_REDUCE_MS, attempt)
