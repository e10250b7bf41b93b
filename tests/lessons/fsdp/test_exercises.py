"""The exercises of notebook 09 on ranks; their mistakes: test_exercise.py."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lib.ddp.launcher import launch
from lib.lessons.ddp.ranks import in_turn
from lib.lessons.exercise import edited, verdict
from lib.lessons.fsdp.exercises import (
    CLIP,
    FAST_ORDER,
    ORDER,
    REDUCE_SCATTER,
    SHARDED_MLP,
    TENSOR_PARALLEL_MLP,
    check_fast_order,
    check_order,
    check_sharded_mlp,
    check_tensor_parallel_mlp,
    clipping,
    fast_order,
    limited,
    on_all_ranks,
    on_threads,
    prefetching,
    sharded_mlp,
    timed,
)
from lib.lessons.fsdp.ranks import mlp_alone
from lib.lessons.fsdp.stack import time_steps
from lib.lessons.ranks import run_on_threads

pytestmark = pytest.mark.usefixtures("quick_ranks")


def test_the_reduce_scatter_of_the_exercise_is_that_of_ranks_with_padding():
    gradients = [torch.arange(6.0), torch.arange(6.0) ** 2, torch.ones(6)]
    slices = run_on_threads(lambda r: r.reduce_scatter(gradients[r.number]) / 3, 3)
    assert torch.equal(REDUCE_SCATTER.solve(gradients), torch.stack(slices))
    assert REDUCE_SCATTER.solve([torch.ones(4)] * 3).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_clipping_on_ranks_is_that_of_pytorch():
    shards, vector = torch.randn(3, 5), torch.randn(4)
    params = [nn.Parameter(torch.zeros(5)) for _ in range(3)] + [nn.Parameter(torch.zeros(4))]
    for param, grad in zip(params, [*shards, vector]):
        param.grad = grad.clone()
    nn.utils.clip_grad_norm_(params, 1.0)
    expected = torch.stack([torch.cat([p.grad, params[3].grad]) for p in params[:3]])
    torch.testing.assert_close(CLIP.solve(shards, vector, 1.0), expected)


def variant(old, new):
    """The solution of exercise 2, edited."""
    return edited(sharded_mlp, old, new)


DROP = "    del w1, w2\n\n    def backward(grad_y):\n"


def holding(what):
    """The solution of exercise 2, whose backward refers to `what` from forward."""
    return variant(DROP, f"    held = {what}\n\n    def backward(grad_y):\n        len(held)\n")


@pytest.mark.parametrize(
    "what",
    [
        *("w1[:1]", "{'both': [torch.cat([w1.flatten(), w2.flatten()])]}"),
        *("w1.numpy().copy(),", "w2.tolist()", "[{'a': w1.T}]"),
    ],
)
def test_a_rank_must_not_hold_whole_matrices_until_backward(what):
    text = verdict(SHARDED_MLP, holding(what))
    assert "rank 0 still holds a whole matrix, or a copy of one, when backward begins" in text
    assert "It looks as if backward gathers again, but holds" in text


@pytest.mark.parametrize("what", ["[x, h, shard]", "{'y': y, 'both': torch.cat([h, h.relu()])}"])
def test_a_rank_may_hold_what_is_no_whole_matrix(what):
    assert verdict(SHARDED_MLP, holding(what)).startswith("right")


def with_autograd(x, shard, d_ff, ranks):
    w1, w2 = ranks.all_gather(shard).requires_grad_().chunk(2)
    x = x.clone().requires_grad_()
    y = (x @ w1.view(d_ff, -1).T).relu() @ w2.view(-1, d_ff).T

    def backward(grad_y):
        grads = torch.autograd.grad(y, (x, w1, w2), grad_y)
        return grads[0], ranks.reduce_scatter(torch.cat(grads[1:])) / ranks.count

    return y, backward


def test_a_rank_must_not_let_autograd_hold_them_either():
    text = verdict(SHARDED_MLP, on_threads(with_autograd))
    assert "raised RuntimeError: autograd kept forward's matrices" in text


def test_the_lesson_goes_on_with_a_right_order_or_with_that_of_the_solution(capsys):
    def stub(blocks):
        raise NotImplementedError

    assert check_order(stub)(3) == prefetching(3)
    assert check_order(prefetching) is prefetching
    assert [line[:5] for line in capsys.readouterr().out.splitlines()] == ["not a", "right"]


def test_a_right_order_of_exercise_5_is_shown_beside_that_of_the_lesson(capsys):
    check_fast_order(fast_order.__wrapped__)
    times = capsys.readouterr().out.splitlines()[1]
    assert times == "  yours 56 ms, the solution 56 ms, `one_block_ahead` 60 ms"


@pytest.mark.parametrize(
    ("exercise", "around"),
    [
        (SHARDED_MLP, on_threads),
        (CLIP, clipping),
        (ORDER, timed),
        (FAST_ORDER, limited),
        (TENSOR_PARALLEL_MLP, on_all_ranks),
    ],
)
def test_a_missing_return_is_named(exercise, around):
    text = verdict(exercise, around(lambda *_: None))
    assert "the result is None; is a `return` missing?" in text.splitlines()[1]
    assert "expected" not in text or exercise is CLIP


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
    check_sharded_mlp(computing_again)
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


def test_its_backward_may_be_that_of_autograd(capsys):
    check_tensor_parallel_mlp(by_autograd)
    assert capsys.readouterr().out.startswith("right")


def gradient_off_on_processes(x, w1, w2, ranks):
    y, backward = by_autograd(x, w1, w2, ranks)
    factor = 1 if type(ranks).__name__ == "Threads" else 1.01

    def nearly(grad_y):
        *others, grad_w2 = backward(grad_y)
        return *others, factor * grad_w2

    return y, nearly


def test_a_tensor_parallel_mlp_that_is_off_on_processes_is_not_right(capsys):
    check_tensor_parallel_mlp(gradient_off_on_processes)
    text = capsys.readouterr().out
    assert text.startswith("not yet: as expected on 40 random inputs; on two processes")
    told = dict(map(str.split, text.split("off from one process by: ")[1].strip().split(", ")))
    assert [name for name, off in told.items() if float(off) > 1e-4] == ["grad_w2"]


def test_what_the_ranks_find_together_is_what_one_process_finds():
    first, second = mlp_alone(0, 2), mlp_alone(1, 2)
    whole = mlp_alone(0, 1)
    assert torch.equal(torch.cat([first["grad_w1"], second["grad_w1"]]), whole["grad_w1"])
    assert torch.equal(torch.cat([first["grad_w2"], second["grad_w2"]], dim=1), whole["grad_w2"])
    assert torch.equal(first["y"], whole["y"])


def test_steps_of_the_stack_are_timed_and_their_messages_counted():
    for one in launch(in_turn, 2, [(time_steps, (3, 16, 8, 1))], backend="gloo"):
        steps = one[0]
        assert steps.gathers == steps.gathers_checkpointed == 2 * 3 - 1
        assert min(steps.computing_ms, steps.gather_ms, steps.prefetch_ms) > 0
        assert min(steps.just_in_time_ms, steps.instant_ms) > 0
