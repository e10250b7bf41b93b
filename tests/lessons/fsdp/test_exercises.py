"""The exercises of notebook 10 on ranks; their mistakes: test_exercise.py."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from lib.lessons.exercise import edited, verdict
from lib.lessons.fsdp import exercises
from lib.lessons.fsdp.exercises import (
    clip,
    order,
    prefetching,
    reduce_scatter,
    sharded_mlp,
    tensor_parallel_mlp,
)
from lib.lessons.fsdp.toys import batch, mlp
from lib.lessons.ranks import run_on_threads

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


def holding(what):
    """The solution of exercise 2, whose backward refers to `what` from forward."""
    return edited(
        sharded_mlp.solve, "del w1, w2", f"held = {what}", "* (h > 0)", "* (h > 0 * len(held))"
    )


@pytest.mark.parametrize("what", ["w1", "w1[:1]"])
def test_a_rank_must_not_hold_whole_matrices_until_backward(what):
    text = verdict(sharded_mlp, holding(what))
    assert "rank 0, still holds a whole matrix when backward begins" in text
    assert "It looks as if backward gathers again, but holds" in text


def with_autograd(x, shard, d_ff, ranks):
    w1, w2 = ranks.all_gather(shard).requires_grad_().chunk(2)
    x = x.clone().requires_grad_()
    y = (x @ w1.view(d_ff, -1).T).relu() @ w2.view(-1, d_ff).T

    def backward(grad_y):
        grads = torch.autograd.grad(y, (x, w1, w2), grad_y)
        return grads[0], ranks.reduce_scatter(torch.cat(grads[1:])) / ranks.count

    return y, backward


def test_a_rank_must_not_let_autograd_hold_them_either():
    text = verdict(sharded_mlp, with_autograd)
    assert "raised RuntimeError: autograd kept forward's matrices" in text


@pytest.mark.parametrize("what", ["[x, h, shard]", "{'y': y, 'both': torch.cat([h, h.relu()])}"])
def test_a_rank_may_hold_what_is_no_whole_matrix(what):
    assert verdict(sharded_mlp, holding(what)).startswith("right")


def test_the_lesson_goes_on_with_a_right_order_or_with_that_of_the_solution(capsys):
    def stub(blocks):
        raise NotImplementedError

    assert exercises.take(stub, "order") is prefetching
    mine = edited(prefetching, "# forward", "# mine")
    assert exercises.take(mine, "order") is mine
    assert [line[:5] for line in capsys.readouterr().out.splitlines()] == ["not a", "right"]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([("gather", 0)], "what is wrong: yours 'forward of block 0 is mis"),
        (None, "the result is None; is a `return` missing?"),
    ],
)
def test_what_is_wrong_with_an_order_is_said(result, said):
    assert said in verdict(order, lambda blocks: result).splitlines()[1]


def test_what_ranks_compute_of_an_mlp_is_what_one_process_computes():
    shapes = (2, 4, 6), (12, 6), (6, 12), (2, 4, 6)
    x, w1, w2, grad_y = (torch.randn(shape) for shape in shapes)
    whole = torch.cat([w1.flatten(), w2.flatten()])
    given = [tensor.clone().requires_grad_() for tensor in (x, w1, w2)]
    y = (given[0] @ given[1].T).relu() @ given[2].T
    grad_x, grad_w1, grad_w2 = torch.autograd.grad(y, given, grad_y)

    def in_shards(ranks):
        me = ranks.number
        y, backward = sharded_mlp.solve(x[me], whole.chunk(2)[me], 12, ranks)
        return y, *backward(grad_y[me])

    mean = torch.cat([grad_w1.flatten(), grad_w2.flatten()]) / 2
    for me, found in enumerate(run_on_threads(in_shards, 2)):
        torch.testing.assert_close(found, (y[me].detach(), grad_x[me], mean.chunk(2)[me]))

    def in_parts(ranks):
        y, backward = tensor_parallel_mlp.solve(x.flatten(0, 1), w1, w2, ranks)
        return y, *backward(grad_y.flatten(0, 1))

    for me, found in enumerate(run_on_threads(in_parts, 2)):
        parts = grad_w1.chunk(2)[me], grad_w2.chunk(2, dim=1)[me]
        both = (y.detach().flatten(0, 1), grad_x.flatten(0, 1))
        torch.testing.assert_close(found, (*both, *parts))


def computing_again(x, shard, d_ff, ranks):
    def forward(x, whole):
        w1, w2 = whole.chunk(2)
        return (x @ w1.view(d_ff, -1).T).relu() @ w2.view(-1, d_ff).T

    def backward(grad_y):
        inputs = x.detach().requires_grad_(), ranks.all_gather(shard).requires_grad_()
        grad_x, grad_whole = torch.autograd.grad(forward(*inputs), inputs, grad_y)
        return grad_x, ranks.reduce_scatter(grad_whole) / ranks.count

    return forward(x, ranks.all_gather(shard)), backward


def test_backward_may_compute_the_block_again_by_autograd(capsys):
    exercises.check(computing_again, "sharded_mlp")
    assert capsys.readouterr().out.startswith("right")


def by_autograd(x, w1, w2, ranks):
    x.requires_grad_()
    w1 = w1.chunk(ranks.count)[ranks.number].requires_grad_()
    w2 = w2.chunk(ranks.count, dim=1)[ranks.number].requires_grad_()
    part = functional.relu(x @ w1.T) @ w2.T

    def backward(grad_y):
        grad_x, *own = torch.autograd.grad(part, (x, w1, w2), grad_y)
        return ranks.all_reduce(grad_x), *own

    return ranks.all_reduce(part), backward


def test_a_rank_that_computes_with_the_whole_matrices_finds_nan():
    def whole(x, w1, w2, ranks):
        y = ranks.all_reduce((x @ w1.T).relu() @ w2.T / ranks.count)
        return y, lambda grad_y: (ranks.all_reduce(x), w1, w2)

    assert "rank 0, y, position (0, 0): yours nan" in verdict(tensor_parallel_mlp, whole)


def test_its_backward_may_be_that_of_autograd(capsys):
    exercises.check(by_autograd, "tensor_parallel_mlp")
    assert capsys.readouterr().out.startswith("right")


def gradient_off_on_processes(x, w1, w2, ranks):
    y, backward = by_autograd(x, w1, w2, ranks)
    factor = 1 if type(ranks).__name__ == "Threads" else 1.01

    def nearly(grad_y):
        *others, grad_w2 = backward(grad_y)
        return *others, factor * grad_w2

    return y, nearly


def test_a_tensor_parallel_mlp_that_is_off_on_processes_is_not_right(capsys):
    exercises.check(gradient_off_on_processes, "tensor_parallel_mlp")
    text = capsys.readouterr().out
    assert re.match(r"not yet: as expected on 40 .*; on 2 processes, rank \d, grad_w2", text)


def test_ranks_have_sequences_of_their_own():
    whole = batch(1, 0, 3)
    assert torch.equal(torch.cat([batch(1, r, r + 1) for r in range(3)], dim=1), whole)
    assert not torch.equal(batch(1, 0, 1), batch(1, 1, 2))
    assert not torch.equal(batch(1, 0, 1), batch(2, 0, 1))
    assert sum(param.numel() for param in mlp().parameters()) == 384
