"""The exercises of notebook 10 on ranks; answers to them: test_answers.py."""

import re

import pytest
import torch
from torch import nn

from lib.lessons.exercise import edited
from lib.lessons.fsdp import exercises
from lib.lessons.fsdp.exercises import clip, prefetching, reduce_scatter
from lib.lessons.fsdp.toys import batch, mlp
from lib.lessons.ranks import Threads, run_on_threads
from tests.lessons.answers.fsdp import block_computed_again_by_autograd, by_autograd

pytestmark = pytest.mark.usefixtures("quick_ranks")


def test_the_reduce_scatter_of_the_exercise_is_that_of_ranks_with_padding():
    gradients = [torch.arange(6.0), torch.arange(6.0) ** 2, torch.ones(6)]
    slices = run_on_threads(lambda r: r.reduce_scatter(gradients[r.number]) / 3, 3)
    assert torch.equal(reduce_scatter.solve(gradients), torch.stack(slices))
    assert reduce_scatter.solve([torch.ones(4)] * 3).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_clipping_on_ranks_is_that_of_pytorch():
    shards, vector = torch.randn(3, 5), torch.randn(4)
    params = [nn.Parameter(torch.zeros(5)) for _ in range(3)] + [nn.Parameter(torch.zeros(4))]
    for param, grad in zip(params, [*shards, vector]):
        param.grad = grad.clone()
    nn.utils.clip_grad_norm_(params, 1.0)
    found = run_on_threads(lambda ranks: clip.solve(shards[ranks.number], vector, 1.0, ranks), 3)
    for param, (shard, clipped) in zip(params, found):
        torch.testing.assert_close([shard, clipped], [param.grad, params[3].grad])


def test_the_lesson_goes_on_with_a_right_order_or_with_that_of_the_solution(capsys):
    def stub(blocks):
        raise NotImplementedError

    assert exercises.take(stub, "order") is prefetching
    mine = edited(prefetching, "# forward", "# mine")
    assert exercises.take(mine, "order") is mine
    assert [line[:5] for line in capsys.readouterr().out.splitlines()] == ["not a", "right"]


def off_on_processes(x, w1, w2, ranks):
    y, backward = by_autograd(x, w1, w2, ranks)
    factor = 1 if isinstance(ranks, Threads) else 1.01

    def nearly(grad_y):
        *others, grad_w2 = backward(grad_y)
        return *others, factor * grad_w2

    return y, nearly


@pytest.mark.parametrize(
    ("name", "attempt", "said"),
    [
        ("sharded_mlp", block_computed_again_by_autograd, r"right: .*\n  on 2 processes, too"),
        ("tensor_parallel_mlp", by_autograd, r"right: .*\n  on 2 processes, too"),
        ("tensor_parallel_mlp", off_on_processes, r"not yet: .*; on 2 processes, rank \d, grad_w2"),
    ],
)
def test_backward_by_autograd_is_right_on_processes_too(name, attempt, said, capsys):
    exercises.check(attempt, name)
    assert re.match(said, capsys.readouterr().out)


def test_ranks_have_sequences_of_their_own():
    whole = batch(1, 0, 3)
    assert torch.equal(torch.cat([batch(1, r, r + 1) for r in range(3)], dim=1), whole)
    assert not torch.equal(batch(1, 0, 1), batch(1, 1, 2))
    assert not torch.equal(batch(1, 0, 1), batch(2, 0, 1))
    assert sum(param.numel() for param in mlp().parameters()) == 384
