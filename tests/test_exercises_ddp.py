"""The exercises of notebook 06 against independent answers; their mistakes: test_exercises.py."""

import functools
import itertools
import random

import pytest
import torch

from lib.ddp_buckets import fill_buckets
from lib.exercises import verdict
from lib.exercises_ddp import ADD_HOOKS, ALL_REDUCE_MS, ASSIGN_BUCKETS, play
from lib.ring import ring_all_reduce

CHECKED = {"buckets": ASSIGN_BUCKETS, "hooks": ADD_HOOKS, "cost": ALL_REDUCE_MS}


def assign_buckets(sizes, cap, first_cap):
    buckets, room = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or sizes[index] > room:
            room = cap if buckets else first_cap
            buckets.append([])
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


def all_reduce_ms(num_bytes, ranks, latency_us, bandwidth_gbs):
    """Message by message, of a ring that is played through."""
    steps = ring_all_reduce([[0] * ranks] * ranks)[1:]
    each = latency_us * 1e-6 + num_bytes / ranks / (bandwidth_gbs * 1e9)
    return 1e3 * sum(each for _ in steps)


def add_hooks(params, buckets, start):
    left = [set(bucket) for bucket in buckets]
    number = 0

    def hook(index, _):
        nonlocal number
        for bucket in left:
            bucket.discard(index)
        while number < len(left) and not left[number]:
            start(number)
            number += 1
        if number == len(left):
            left[:] = [set(bucket) for bucket in buckets]
            number = 0

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(functools.partial(hook, index))


ANSWERS = [
    (ASSIGN_BUCKETS, assign_buckets),
    (ADD_HOOKS, play(add_hooks)),
    (ALL_REDUCE_MS, all_reduce_ms),
]


@pytest.mark.parametrize(("exercise", "independent"), ANSWERS, ids=CHECKED)
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


def test_hooks_that_do_nothing_are_told_what_should_have_started():
    def attempt(params, buckets, start):
        pass

    text = verdict(ADD_HOOKS, play(attempt), seed=0)
    assert text.startswith("not yet: attempt(")
    assert "expected 'bucket 0 starts'" in text


def test_an_error_in_a_hook_is_shown():
    def attempt(params, buckets, start):
        for param in params:
            param.register_post_accumulate_grad_hook(lambda grad: grad.nothing)

    assert "it raised AttributeError: 'Tensor' object has no attribute" in verdict(
        ADD_HOOKS, play(attempt)
    )


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_those_of_the_wrapper(seed):
    generator = random.Random(seed)
    # of the wrapper's first bucket
    first_cap = 2**20
    sizes = [generator.choice([2**18, 2**19, 2**20, 2**21]) for _ in range(10)]
    params = [torch.empty(size // 4) for size in sizes]
    place = {id(param): index for index, param in enumerate(params)}
    found = fill_buckets(reversed(params), cap_bytes=3 * 2**20)
    numbers = [[place[id(param)] for param in bucket.params] for bucket in found]
    assert numbers == ASSIGN_BUCKETS.solve(sizes, 3 * 2**20, first_cap)


def test_gradients_arrive_out_of_order_too():
    drawn = [ADD_HOOKS.draw(random.Random(seed), 3) for seed in range(50)]
    in_order = [
        order == [*itertools.chain(*buckets)] for buckets, steps in drawn for order in steps
    ]
    assert any(in_order)
    assert not all(in_order)
