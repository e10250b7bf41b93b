"""Answers to the exercises of notebook 11."""

import torch

from lib.lessons.mesh import context, exercises
from tests.lessons.answers.table import right, wrong, wrong_edit


def run_stage(events, stage, loss, micro_batches, ranks, *, receive, spoil=lambda x: None):
    """Inputs and outputs apart."""
    me, last = ranks.number, ranks.count - 1
    xs, ys = {}, {}
    for kind, i in events:
        if kind == "forward":
            x, target = micro_batches[i]
            if me != 0:
                x = receive(ranks, x)
                x.requires_grad_()
            y = stage(x)
            xs[i], ys[i] = x, y if me != last else loss(y, target)
            if me != last:
                ranks.send(y.detach(), me + 1)
            del x, y
        else:
            x, y = xs.pop(i), ys.pop(i)
            spoil(x)
            y.backward(*([] if me == last else [ranks.receive(me + 1, like=y)]))
            if me != 0:
                ranks.send(x.grad, me - 1)
            del x, y


def as_new(ranks, x):
    return ranks.receive(ranks.number - 1, x)


@right(exercises.run_stage)
def inputs_and_outputs_apart(*given):
    run_stage(*given, receive=as_new)


@wrong(exercises.run_stage, "keep y from the forward pass")
def forward_again_in_backward(events, stage, *given):
    run_stage(events, stage, *given, receive=as_new, spoil=stage)


@wrong(exercises.run_stage, "inputs held after")
def received_in_place(*given):
    def in_place(ranks, x):
        x[:] = as_new(ranks, x)
        return x

    run_stage(*given, receive=in_place)


# a warm-up of twice as many, which holds too much
wrong_edit(
    exercises.one_f_one_b,
    "micro-batches that stage 0 holds: yours 3, at most 2",
    *("min(ranks - 1 - rank, ", "min(2 * (ranks - 1 - rank), "),
)


@right(exercises.ring_attention)
def keys_and_values_in_one_message(q, k, v, shares, ranks):
    n, me, out, lse = ranks.count, ranks.number, None, None
    for step in range(n):
        source = (me - step) % n
        part = context.attend(q, k, v, shares[me].unsqueeze(1) >= shares[source])
        out, lse = part if out is None else context.merge(out, lse, *part)
        if step < n - 1:
            k, v = context.pass_on(torch.stack([k, v]), ranks)
    return out, lse


@right(exercises.sequence_parallel_mlp)
def gathered_again_in_backward(x, w1, w2, ranks):
    d = x.shape[1]

    def gather(rows):
        return ranks.all_gather(rows.reshape(-1)).view(-1, d)

    def scatter(rows):
        return ranks.reduce_scatter(rows.reshape(-1)).view(-1, d)

    h = gather(x) @ w1.T

    def backward(grad_y):
        whole = gather(grad_y)
        grad_h = (whole @ w2) * (h > 0)
        return scatter(grad_h @ w1), grad_h.T @ gather(x), whole.T @ h.relu()

    return scatter(h.relu() @ w2.T), backward


@right(exercises.merge)
def by_way_of_the_larger(out, lse, new_out, new_lse):
    m = torch.maximum(lse, new_lse)
    a, b = (lse - m).exp(), (new_lse - m).exp()
    return (a * out + b * new_out) / (a + b), m + (a + b).log()


@wrong(exercises.merge)
def by_way_of_the_sum(out, lse, new_out, new_lse):
    m = lse + (new_lse - lse).exp().log1p()
    a, b = (lse - m).exp(), (new_lse - m).exp()
    return (a * out + b * new_out) / (a + b), m + (a + b).log()


@right(exercises.all_to_all)
def ranks_behind_it_first(parts, ranks):
    n, me = ranks.count, ranks.number
    others = [(me + shift) % n for shift in range(1, n)]
    for to in others:
        ranks.send(torch.tensor(len(parts[to])), to)
        ranks.send(parts[to], to)
    received = [None] * n
    received[me] = parts[me]
    for source in others:
        rows = int(ranks.receive(source, torch.tensor(0)))
        received[source] = ranks.receive(source, parts[0].new_empty(rows, parts[0].shape[1]))
    return received


@right(exercises.zigzag_ring)
def halves_in_place(q, k, v, ranks):
    n, me, half = ranks.count, ranks.number, len(q) // 2
    own = torch.arange(2 * half)
    out, lse = context.attend(q, k, v, own[:, None] >= own)
    for step in range(1, n):
        k, v = context.pass_on(k, ranks), context.pass_on(v, ranks)
        if step <= me:
            early = [x.chunk(2)[0] for x in (k, v)]
            out, lse = context.merge(out, lse, *context.attend(q, *early))
        else:
            late = context.attend(q[half:], k, v)
            out[half:], lse[half:] = context.merge(out[half:], lse[half:], *late)
    return out, lse
