"""The exercises of notebook 09 on ranks; their mistakes: test_exercise.py."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lib.ddp.launcher import launch
from lib.lessons.ddp.ranks import in_turn
from lib.lessons.exercise import verdict
from lib.lessons.fsdp.exercises import (
    CLIP,
    REDUCE_SCATTER,
    SHARDED_MLP,
    check_sharded_mlp,
    clipping,
    on_threads,
    sharded_mlp,
)
from lib.lessons.fsdp.host import host_ms
from lib.lessons.fsdp.ranks import train_alone
from lib.lessons.fsdp.stack import time_steps
from lib.lessons.fsdp.toys import batch, mlp
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


def test_a_rank_that_leaves_a_collective_out_is_named():
    def attempt(shard, vector, max_norm, ranks):
        if ranks.number == 0:
            ranks.all_reduce(shard)
        return shard, vector

    text = verdict(CLIP, clipping(attempt))
    assert "forever: rank 0 waits in all_reduce, its collective 1, rank 1 has ended" in text


def test_what_forward_gathered_is_gone_in_backward():
    def attempt(x, shard, d_ff, ranks):
        w1, w2 = ranks.all_gather(shard).chunk(2)
        w1, w2 = w1.view(d_ff, -1), w2.view(-1, d_ff)

        def backward(grad_y):
            return grad_y @ w2 @ w1, shard

        return (x @ w1.T).relu() @ w2.T, backward

    assert "nan" in verdict(SHARDED_MLP, on_threads(attempt))


def test_a_right_answer_trains_on_two_processes_as_one_does(capsys):
    check_sharded_mlp(sharded_mlp.__wrapped__)
    text = capsys.readouterr().out
    assert text.startswith("right")
    assert "on two processes, after 3 steps: off by" in text
    assert float(text.split("off by ")[1].split()[0]) < 1e-6
    assert (train_alone(12, 2, 3) - train_alone(12, 2, 0)).abs().max() > 1e-2


def with_helpers(x, shard, d_ff, ranks):
    w1, w2 = halves(ranks.all_gather(shard))
    h = x @ w1.view(d_ff, -1).T
    y = functional.relu(h) @ w2.view(-1, d_ff).T

    def backward(grad_y):
        w1, w2 = halves(ranks.all_gather(shard))
        grad_h = (grad_y @ w2.view(-1, d_ff)) * (h > 0)
        whole = torch.cat([flat(grad_h.T @ x), flat(grad_y.T @ functional.relu(h))])
        return grad_h @ w1.view(d_ff, -1), ranks.reduce_scatter(whole) / ranks.count

    return y, backward


def halves(whole):
    return flat(whole).chunk(2)


def flat(tensor):
    return tensor.flatten()


def test_an_answer_may_use_helpers_and_modules_of_the_notebook(capsys):
    check_sharded_mlp(with_helpers)
    assert capsys.readouterr().out.startswith("right")


NEEDED = 1.0


def test_an_answer_that_fails_on_processes_is_not_right(capsys):
    def attempt(x, shard, d_ff, ranks):
        return sharded_mlp.__wrapped__(x * NEEDED, shard, d_ff, ranks)

    check_sharded_mlp(attempt)
    text = capsys.readouterr().out
    assert text.startswith("not yet: as expected on 40 random inputs; on processes")
    assert "belongs inside it" in text


def test_steps_of_the_stack_are_timed_and_their_messages_counted():
    for one in launch(in_turn, 2, [(time_steps, (3, 16, 8, 1))], backend="gloo"):
        steps = one[0]
        assert steps.gathers == steps.gathers_checkpointed == 2 * 3 - 1
        assert min(steps.computing_ms, steps.gather_ms, steps.prefetch_ms) > 0
        assert min(steps.just_in_time_ms, steps.instant_ms) > 0


def test_ranks_have_sequences_of_their_own():
    whole = batch(1, 0, 3)
    assert torch.equal(torch.cat([batch(1, r, r + 1) for r in range(3)], dim=1), whole)
    assert not torch.equal(batch(1, 0, 1), batch(1, 1, 2))
    assert not torch.equal(batch(1, 0, 1), batch(2, 0, 1))
    assert sum(param.numel() for param in mlp().parameters()) == 384


def test_a_step_keeps_the_host_busy_in_every_wrapper():
    busy = launch(host_ms, 2, 1, 2, backend="gloo")
    assert [list(one) for one in busy] == [["flashddp", "fsdp", "fsdp2"]] * 2
    assert all(value > 0 for one in busy for value in one.values())
