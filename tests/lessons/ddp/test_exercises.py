"""The exercises of notebook 08 against the library and on ranks; answers: test_answers.py."""

import functools
import itertools
import random
import re

import pytest
import torch

from lib.ddp.flat import fill_buckets
from lib.lessons.ddp import exercises
from lib.lessons.ddp.exercises import assign_buckets, average, data_parallel, mean_gradient, plan
from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.ranks import run_on_threads
from tests.lessons.page import read_page


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
    counts = [5, 2, 0]
    for found in run_on_threads(
        lambda ranks: mean_gradient.solve(own[ranks.number], counts[ranks.number], ranks), 3
    ):
        torch.testing.assert_close(found, whole)


def test_gradients_are_the_mean_of_what_arrives_on_the_ranks():
    for buckets, steps, count in draw_inputs(data_parallel, 0)[:10]:
        job = functools.partial(exercises.take_steps, data_parallel.solve, buckets, steps)
        for found, index in itertools.product(
            run_on_threads(job, count), range(sum(map(len, buckets)))
        ):
            for step, arrivals in enumerate(steps):
                own = [(2 + index + 3 * me + step) * (index in arrivals[me]) for me in range(count)]
                gradient = found[f"gradient {index} of step {step}"]
                assert gradient.unique().tolist() == [sum(own) / count]


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_those_of_the_wrapper(seed):
    generator = random.Random(seed)
    # the first bucket of the wrapper is 1 MiB
    sizes = [generator.choice([2**18, 2**19, 2**20, 2**21]) for _ in range(10)]
    params = [torch.empty(size // 4) for size in sizes]
    index = {id(param): i for i, param in enumerate(params)}
    buckets = fill_buckets(reversed(params), cap_bytes=3 * 2**20)
    numbers = [[index[id(param)] for param in bucket] for bucket in buckets]
    assert numbers == assign_buckets.solve(sizes, 3 * 2**20, 2**20)


@pytest.mark.parametrize("seed", range(5))
def test_the_broken_function_of_the_notebook_is_first_told_who_waits_for_whom(seed):
    (stub,) = (c.source for c in read_page("08_ddp").cells if c.source.startswith("def average("))
    names: dict = {}
    exec(re.sub(r" +raise .*\n|exercises\..*", "", stub), names)
    text = verdict(average, names["average"], seed=seed)
    assert re.search(r"forever: rank 0 waits in all_reduce, .* rank \d has ended", text)
    # finding the reason is the exercise
    assert "It looks as if" not in text


def test_the_solution_plans_the_best_of_all_cuts():
    order = [*reversed(range(len(exercises.BOARD)))]
    ways = []
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        buckets = [[order[0]]]
        for index, is_cut in zip(order[1:], cuts):
            if is_cut:
                buckets.append([])
            buckets[-1].append(index)
        ways.append(exercises.step_ms(lambda sizes: buckets))  # noqa: B023
    assert exercises.step_ms(plan.solve) == pytest.approx(min(ways))
    # what two ranks took on a simulated network, as the notebook says
    assert exercises.step_ms(exercises.a_quarter_each) == pytest.approx(56.98)
    assert exercises.step_ms(plan.solve) == pytest.approx(51.26)
