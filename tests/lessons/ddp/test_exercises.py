"""The exercises of notebook 07 against the library and on ranks; mistakes: test_exercise.py."""

import functools
import itertools
import random

import pytest
import torch

from lib.ddp.buckets import fill_buckets
from lib.ddp.costs import predicted_ms
from lib.lessons.ddp import exercises
from lib.lessons.ddp.exercises import (
    ADD_HOOKS,
    ALL_REDUCE_MS,
    ASSIGN_BUCKETS,
    AVERAGE,
    MEAN_GRADIENT,
    PLAN,
    RING,
    debugging,
    on_ring,
    partition,
    play,
)
from lib.lessons.exercise import verdict

pytestmark = pytest.mark.usefixtures("quick_ranks")


def test_the_cost_is_that_of_the_library():
    attempt = functools.wraps(predicted_ms)(functools.partial(predicted_ms, "all_reduce"))
    assert verdict(ALL_REDUCE_MS, attempt).startswith("right")


def test_a_right_ring_runs_on_four_processes(capsys):
    exercises.check_ring(RING.solve.__wrapped__)
    text = capsys.readouterr().out
    assert text.startswith("right: as expected on 40 random inputs")
    assert float(text.split("off by ")[1].split()[0]) < 1e-5


def test_chunks_of_different_lengths_are_right_too_where_they_fit():
    def attempt(tensor, ranks):
        n, me = ranks.count, ranks.number
        chunks = list(tensor.tensor_split(n))
        for step in range(2 * (n - 1)):
            out, into = (me - step) % n, (me - step - 1) % n
            ranks.send(chunks[out], (me + 1) % n)
            arrived = ranks.receive((me - 1) % n, like=chunks[into])
            chunks[into] = arrived + chunks[into] if step < n - 1 else arrived
        return torch.cat(chunks)

    assert verdict(RING, on_ring(attempt)).startswith("right")


def test_a_ring_that_waits_before_it_sends_is_told_who_waits():
    def attempt(tensor, ranks):
        other = ranks.receive((ranks.number - 1) % ranks.count, like=tensor)
        ranks.send(tensor, (ranks.number + 1) % ranks.count)
        return tensor + other

    assert "the ranks wait for one another forever" in verdict(RING, on_ring(attempt))


def test_the_mean_of_unequal_batches_is_the_gradient_of_all():
    w = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    batches = [torch.randn(n, 3) for n in (5, 2, 0)]
    own = [
        torch.autograd.grad((x @ w).square().mean(), w)[0]
        if len(x)
        else torch.full((3,), torch.nan)
        for x in batches
    ]
    (whole,) = torch.autograd.grad((torch.cat(batches) @ w).square().mean(), w)
    found = MEAN_GRADIENT.solve(own, [5, 2, 0])
    torch.testing.assert_close(found, whole.expand(3, 3))


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


def test_right_hooks_train_on_ranks_whose_gradients_arrive_in_different_orders(capsys):
    exercises.check_add_hooks(ADD_HOOKS.solve.__wrapped__)
    text = capsys.readouterr().out
    assert text.startswith("right")
    assert float(text.split("off by ")[1].split()[0]) < 1e-6


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


def test_the_broken_function_of_the_notebook_deadlocks():
    def average(params, gradients, ranks):
        means = {}
        for name, gradient in gradients.items():
            means[name] = ranks.all_reduce(gradient) / ranks.count
        return means

    text = verdict(AVERAGE, debugging(average), seed=1)
    assert text.startswith("not yet")
    assert "forever" in text or "of one shape" in text


def test_one_bucket_and_one_a_layer_are_plans_too():
    for attempt in (lambda s: [[*reversed(range(len(s)))]], lambda s: [[i] for i in range(len(s))]):
        is_right = verdict(PLAN, partition(attempt), seed=0).startswith("right")
        assert is_right == (attempt([1, 1])[0] != [0])
