"""The exercises of notebook 07 against the library and on ranks; mistakes: test_exercise.py."""

import functools
import itertools
import random
import re
from pathlib import Path

import nbformat
import pytest
import torch

from lib.ddp.flat import fill_buckets
from lib.lessons.ddp import exercises
from lib.lessons.ddp.exercises import (
    ADD_HOOKS,
    ALL_REDUCE_MS,
    ASSIGN_BUCKETS,
    AVERAGE,
    DATA_PARALLEL,
    MEAN_GRADIENT,
    PLAN,
    RING,
    debugging,
    on_ring,
    partition,
    play,
)
from lib.lessons.exercise import edited, verdict
from lib.profiling.collectives import predicted_ms

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks/07_ddp.ipynb"

pytestmark = pytest.mark.usefixtures("quick_ranks")


def test_the_cost_is_that_of_the_library():
    attempt = functools.wraps(predicted_ms)(functools.partial(predicted_ms, "all_reduce"))
    assert verdict(ALL_REDUCE_MS, attempt).startswith("right")


@pytest.mark.parametrize("way", [1, -1])
def test_a_ring_may_go_either_way_with_chunks_of_different_lengths(way):
    def attempt(tensor, ranks):
        n, me = ranks.count, way * ranks.number
        chunks = list(tensor.tensor_split(n))
        for step in range(2 * (n - 1)):
            out, into = (me - step) % n, (me - step - 1) % n
            ranks.send(chunks[out], (ranks.number + way) % n)
            arrived = ranks.receive((ranks.number - way) % n, like=chunks[into])
            chunks[into] = arrived + chunks[into] if step < n - 1 else arrived
        return torch.cat(chunks)

    assert verdict(RING, on_ring(attempt)).startswith("right")


@pytest.mark.parametrize(
    ("exercise", "play_it"), [(RING, on_ring), (MEAN_GRADIENT, exercises.averaging)]
)
def test_an_attempt_that_returns_nothing_is_told_so(exercise, play_it):
    assert "is a `return` missing?" in verdict(exercise, play_it(lambda *arguments: None))


def test_the_plain_mean_is_recognized_and_its_place_has_words():
    def attempt(gradient, sequences, ranks):
        return ranks.all_reduce(gradient) / ranks.count

    text = verdict(MEAN_GRADIENT, exercises.averaging(attempt))
    assert re.search(r"rank \d, element \d: yours", text)
    assert "It looks as if this is the mean of the ranks' gradients" in text


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


def test_a_wrapper_that_returns_nothing_is_told_what_to_return():
    text = verdict(DATA_PARALLEL, exercises.training(lambda *arguments: None))
    assert "return the function that ends a step, not None" in text


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_those_of_the_wrapper(seed):
    generator = random.Random(seed)
    # the first bucket of the wrapper is 1 MiB
    sizes = [generator.choice([2**18, 2**19, 2**20, 2**21]) for _ in range(10)]
    params = [torch.empty(size // 4) for size in sizes]
    index = {id(param): i for i, param in enumerate(params)}
    buckets = fill_buckets(reversed(params), cap_bytes=3 * 2**20)
    numbers = [[index[id(param)] for param in bucket] for bucket in buckets]
    assert numbers == ASSIGN_BUCKETS.solve(sizes, 3 * 2**20, 2**20)


def test_buckets_may_be_tuples():
    attempt = exercises.bucket_lists(lambda *given: [*map(tuple, ASSIGN_BUCKETS.solve(*given))])
    assert verdict(ASSIGN_BUCKETS, attempt).startswith("right")


def test_counters_do_as_well_as_sets():
    assert verdict(ADD_HOOKS, exercises._count_down).startswith("right")


def test_a_bucket_in_place_of_its_number_is_named():
    def attempt(params, buckets, start):
        params[0].register_post_accumulate_grad_hook(lambda param: start(buckets[0]))

    text = verdict(ADD_HOOKS, play(attempt))
    assert "start takes the number of a bucket, got [" in text


@pytest.mark.parametrize("seed", range(5))
def test_the_broken_function_of_the_notebook_is_first_told_who_waits_for_whom(seed):
    (stub,) = (
        cell.source
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells
        if cell.source.startswith("def average(")
    )
    names: dict = {}
    exec(re.sub(r" +raise .*\n|exercises\..*", "", stub), names)
    text = verdict(AVERAGE, debugging(names["average"]), seed=seed)
    assert re.search(r"forever: rank 0 waits in all_reduce, .* rank \d has ended", text)
    # finding the reason is the exercise
    assert "It looks as if" not in text


def test_a_set_that_is_sorted_has_the_same_order_on_each_rank():
    in_order = "[(n, params[n]) for n in sorted(set(params))]"
    attempt = edited(AVERAGE.solve, "params.items()", in_order)
    assert verdict(AVERAGE, attempt).startswith("right")


def test_the_solution_plans_the_best_of_all_cuts():
    def sent_after(buckets):
        layers, sent = 0, 0.0
        for bucket in buckets:
            layers += len(bucket)
            weights = sum(exercises.BOARD.sizes[index] for index in bucket)
            sent = max(sent, 2.0 * layers) + 1.5 + 16e-6 * weights
        return sent

    order = [*reversed(range(len(exercises.BOARD.sizes)))]
    ways = []
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        buckets = [[order[0]]]
        for index, is_cut in zip(order[1:], cuts):
            if is_cut:
                buckets.append([])
            buckets[-1].append(index)
        ways.append(sent_after(buckets))
    found = PLAN.solve.__wrapped__(list(exercises.BOARD.sizes))
    assert sent_after(found) == pytest.approx(min(ways))
    # forward takes 1 ms a layer
    assert exercises.step_ms(PLAN.solve) == pytest.approx(len(order) + min(ways), rel=1e-3)


def test_one_bucket_is_a_plan_too():
    attempt = partition(lambda sizes: [[*reversed(range(len(sizes)))]])
    assert verdict(PLAN, attempt, seed=0).startswith("right")
