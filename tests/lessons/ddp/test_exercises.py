"""The exercises of notebook 07 against the library; their mistakes: test_exercise.py."""

import functools
import itertools
import random

import pytest
import torch

from lib.ddp.buckets import fill_buckets
from lib.ddp.costs import predicted_ms
from lib.lessons.ddp.exercises import ADD_HOOKS, ALL_REDUCE_MS, ASSIGN_BUCKETS, play
from lib.lessons.exercise import verdict


def test_the_cost_is_that_of_the_library():
    attempt = functools.wraps(predicted_ms)(functools.partial(predicted_ms, "all_reduce"))
    assert verdict(ALL_REDUCE_MS, attempt).startswith("right")


def test_hooks_that_do_nothing_are_shown_what_should_have_started():
    text = verdict(ADD_HOOKS, play(lambda params, buckets, start: None), seed=0)
    assert "expected 'bucket 0 starts'" in text


def test_an_error_in_a_hook_is_shown():
    def attempt(params, buckets, start):
        for param in params:
            param.register_post_accumulate_grad_hook(lambda grad: grad.nothing)

    text = verdict(ADD_HOOKS, play(attempt))
    assert text.startswith("not yet: attempt(")
    assert "raised AttributeError: 'Tensor' object has no attribute" in text


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_those_of_the_wrapper(seed):
    generator = random.Random(seed)
    # the first bucket of the wrapper is 1 MiB
    sizes = [generator.choice([2**18, 2**19, 2**20, 2**21]) for _ in range(10)]
    params = [torch.empty(size // 4) for size in sizes]
    index = {id(param): i for i, param in enumerate(params)}
    buckets = fill_buckets(reversed(params), cap_bytes=3 * 2**20)
    numbers = [[index[id(param)] for param in bucket.params] for bucket in buckets]
    assert numbers == ASSIGN_BUCKETS.solve(sizes, 3 * 2**20, 2**20)


def test_gradients_arrive_in_order_and_out_of_order():
    drawn = [ADD_HOOKS.draw(random.Random(seed), 3) for seed in range(50)]
    in_order = {
        order == [*itertools.chain(*buckets)] for buckets, steps in drawn for order in steps
    }
    assert in_order == {True, False}
