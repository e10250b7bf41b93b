"""Answers to the exercises of notebook 10."""

import torch
import torch.nn.functional as F

from lib.lessons.fsdp import exercises
from tests.lessons.answers.table import right, right_edit, wrong, wrong_edit

# a rank may hold what is no whole matrix until backward, and nothing else
HELD, USED = ("del w1, w2", "held = {}"), ("* (h > 0)", "* (h > 0 * len(held))")
for what in ("[x, h, shard]", "{'y': y, 'both': torch.cat([h, h.relu()])}"):
    right_edit(exercises.sharded_mlp, HELD[0], HELD[1].format(what), *USED)
STILL = "rank 0, still holds a whole matrix when backward begins: yours True, expected False"
LOOKS = "\n  It looks as if backward gathers again, but holds"
for what, told in {"w1": STILL + LOOKS, "w1[:1]": STILL + LOOKS, "w1.clone()": STILL}.items():
    wrong_edit(exercises.sharded_mlp, told, HELD[0], HELD[1].format(what), *USED)


@wrong(exercises.sharded_mlp, "raised RuntimeError: autograd kept forward's matrices")
def matrices_held_by_autograd(x, shard, d_ff, ranks):
    w1, w2 = ranks.all_gather(shard).requires_grad_().chunk(2)
    x = x.clone().requires_grad_()
    y = (x @ w1.view(d_ff, -1).T).relu() @ w2.view(-1, d_ff).T

    def backward(grad_y):
        grads = torch.autograd.grad(y, (x, w1, w2), grad_y)
        return grads[0], ranks.reduce_scatter(torch.cat(grads[1:])) / ranks.count

    return y, backward


@right(exercises.sharded_mlp)
def block_computed_again_by_autograd(x, shard, d_ff, ranks):
    def forward(x, whole):
        w1, w2 = whole.chunk(2)
        return (x @ w1.view(d_ff, -1).T).relu() @ w2.view(-1, d_ff).T

    def backward(grad_y):
        inputs = x.detach().requires_grad_(), ranks.all_gather(shard).requires_grad_()
        grad_x, grad_whole = torch.autograd.grad(forward(*inputs), inputs, grad_y)
        return grad_x, ranks.reduce_scatter(grad_whole) / ranks.count

    return forward(x, ranks.all_gather(shard)), backward


@right(exercises.tensor_parallel_mlp)
def by_autograd(x, w1, w2, ranks):
    x.requires_grad_()
    w1 = w1.chunk(ranks.count)[ranks.number].requires_grad_()
    w2 = w2.chunk(ranks.count, dim=1)[ranks.number].requires_grad_()
    part = F.relu(x @ w1.T) @ w2.T

    def backward(grad_y):
        grad_x, *own = torch.autograd.grad(part, (x, w1, w2), grad_y)
        return ranks.all_reduce(grad_x), *own

    return ranks.all_reduce(part), backward


@wrong(exercises.tensor_parallel_mlp, "rank 0, y, position (0, 0): yours nan")
def with_whole_matrices(x, w1, w2, ranks):
    y = ranks.all_reduce((x @ w1.T).relu() @ w2.T / ranks.count)
    return y, lambda grad_y: (ranks.all_reduce(x), w1, w2)


wrong(exercises.order, "what is wrong: yours 'forward of block 0 is mis")(lambda _: [("gather", 0)])
wrong(exercises.order, "the result is None; is a `return` missing?")(lambda _: None)
