"""Answers as readers wrote them: right in another way, or wrong in a way that a check must see."""

import math

import pytest
import torch

from lib.lessons.exercise import verdict
from lib.lessons.mesh import exercises
from lib.lessons.mesh.context import attend, merge, pass_on

NAMES = {"math": math, "torch": torch, "attend": attend, "merge": merge, "pass_on": pass_on}

STAGE = """
def run_stage(events, stage, loss, micro_batches, ranks):
    me, last = ranks.number, ranks.count - 1
    xs, ys = {{}}, {{}}
    for kind, i in {events}:
        if kind == "forward":
            x, target = micro_batches[i]
            if me != 0:
                {receive}
                x.requires_grad_()
            y = stage(x)
            xs[i], ys[i] = x, y if me != last else {loss}
            if me != last:
                ranks.send(y.detach(), me + 1)
            del x, y
        else:
            x, y = {popped}
            {backward}
            if {unless_first}:
                ranks.send(x.grad, me - 1)
            del x, y
"""
SAME = {
    "events": "events",
    "receive": "x = ranks.receive(me - 1, x)",
    "loss": "loss(y, target)",
    "popped": "xs.pop(i), ys.pop(i)",
    "backward": "y.backward(*([] if me == last else [ranks.receive(me + 1, like=y)]))",
    "unless_first": "me != 0",
}

RING = """
def ring_attention(q, k, v, shares, ranks):
    n, me, out = ranks.count, ranks.number, None
    for step in range(n):
        source = (me - step) % n
        part = attend(q, k, v, shares[me].unsqueeze(1) >= shares[source])
        out, lse = part if out is None else merge(out, lse, *part)
        {after}
    return out, lse
"""

MLP = """
def sequence_parallel_mlp(x, w1, w2, ranks):
    d = x.shape[1]
    gather = lambda rows: ranks.all_gather(rows.reshape(-1)).view(-1, d)
    scatter = lambda rows: ranks.reduce_scatter(rows.reshape(-1)).view(-1, d)
    h = gather(x) @ w1.T
    def backward(grad_y):
        whole = {grad_y}
        grad_h = (whole @ w2) * (h > 0)
        return scatter(grad_h @ w1), grad_h.T @ {x}, whole.T @ h.relu()
    return scatter(h.relu() @ w2.T), backward
"""

MLP_BY_WEIGHTS = """
def sequence_parallel_mlp(x, w1, w2, ranks):
    d = x.shape[1]
    gather = lambda rows: ranks.all_gather(rows.reshape(-1)).view(-1, d)
    scatter = lambda rows: ranks.reduce_scatter(rows.reshape(-1)).view(-1, d)
    w1, w2 = gather(w1), gather(w2.T).T
    h = x @ w1.T
    def backward(grad_y):
        grad_h = (grad_y @ w2) * (h > 0)
        return grad_h @ w1, scatter(grad_h.T @ x), scatter(h.relu().T @ grad_y).T
    return h.relu() @ w2.T, backward
"""

TWO_SUMS = """
def merge(out, lse, new_out, new_lse):
    {sums}
    return (a * out + b * new_out) / (a + b), {lse}
"""

LARGER_FIRST = "m = torch.maximum(lse, new_lse); a, b = (lse - m).exp(), (new_lse - m).exp()"

ALL_TO_ALL = """
def all_to_all(parts, ranks):
    n, me = ranks.count, ranks.number
    for to in {others}:
        {announce}
        ranks.send(parts[to], to)
    received = [None] * n
    received[me] = parts[me]
    for source in {others}:
        rows = {rows}
        received[source] = ranks.receive(source, {like}(rows, parts[0].shape[1]))
    return received
"""
COUNTS = {
    "others": "[r for r in range(n) if r != me]",
    "announce": "ranks.send(torch.tensor(len(parts[to])), to)",
    "rows": "int(ranks.receive(source, torch.tensor(0)))",
    "like": "parts[0].new_empty",
}

ZIGZAG_RING = """
def zigzag_ring(q, k, v, ranks):
    n, me, half = ranks.count, ranks.number, len(q) // 2
    own = torch.arange(2 * half)
    {own}
    for step in range(1, n):
        k, v = pass_on(k, ranks), pass_on(v, ranks)
        if step <= me:
            {lower}
        else:
            {higher}
    return out, lse
"""
BY_HALVES = {
    "own": "out, lse = attend(q, k, v, own[:, None] >= own)",
    "lower": "out, lse = merge(out, lse, *attend(q, *(x.chunk(2)[0] for x in (k, v))))",
    "higher": "out[half:], lse[half:] = merge(out[half:], lse[half:], *attend(q[half:], k, v))",
}
MASKED = "out, lse = merge(out, lse, *attend(q, k, v, {}))"


def verdict_on(source, **parts):
    """Check the function in `source`, with `parts` in its places; return the verdict."""
    code = source.format(**parts)
    name = code.split("(")[0].split()[-1]
    exec(code, names := dict(NAMES))
    return verdict(getattr(exercises, name), names[name], seed=0)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (STAGE, SAME),
        (RING, {"after": "if step < n - 1: k, v = pass_on(torch.stack([k, v]), ranks)"}),
        (MLP, {"grad_y": "gather(grad_y)", "x": "gather(x)"}),
        (
            TWO_SUMS,
            {"sums": LARGER_FIRST, "lse": "m + (a + b).log()"},
        ),
        (ALL_TO_ALL, COUNTS | {"others": "[(me + shift) % n for shift in range(1, n)]"}),
        (ZIGZAG_RING, BY_HALVES),
    ],
    ids=lambda part: part.split("(")[0].split()[-1] if isinstance(part, str) else "",
)
def test_a_right_answer_of_another_kind_passes(source, parts):
    assert verdict_on(source, **parts).startswith("right")


@pytest.mark.parametrize(
    ("source", "parts", "named"),
    [
        (
            STAGE,
            SAME | {"events": "sorted(events, key=lambda event: (event[0] == 'backward', event))"},
            "`events` is not followed",
        ),
        (STAGE, SAME | {"popped": "xs[i], ys.pop(i)"}, "inputs held after their backward"),
        (STAGE, SAME | {"popped": "xs.pop(i), ys[i]"}, "outputs stay held"),
        (STAGE, SAME | {"popped": "xs.pop(next(iter(xs))), ys.pop(next(iter(ys)))"}, "came first"),
        (STAGE, SAME | {"unless_first": "True"}, "send `if me > 0`"),
        (STAGE, SAME | {"receive": "ranks.receive(me - 1, x)"}, "what is received is dropped"),
        (
            STAGE,
            SAME | {"receive": "x.copy_(ranks.receive(me - 1, x))"},
            "don't copy what arrives into the template",
        ),
        (STAGE, SAME | {"loss": "loss(y, target) / len(micro_batches)"}, "the loss is divided"),
        (
            STAGE,
            SAME
            | {
                "popped": "xs.pop(i), ys.pop(i); "
                "y = stage(x) if me != last else loss(stage(x), micro_batches[i][1])"
            },
            "keep y from the forward pass",
        ),
        (
            STAGE,
            SAME | {"backward": SAME["backward"].replace("like=y", "micro_batches[i][0]")},
            "on the first stage x is token ids",
        ),
        (STAGE, SAME | {"backward": "y.sum().backward()"}, "the gradient that the stage"),
        (RING, {"after": "k, v = pass_on(k, ranks), pass_on(v, ranks)"}, "which nobody needs"),
        (MLP, {"grad_y": "grad_y", "x": "gather(x)"}, "grad_y is not gathered"),
        (MLP, {"grad_y": "gather(grad_y)", "x": "x"}, "it needs all of them"),
        (MLP_BY_WEIGHTS, {}, "the weights travel, as in FSDP"),
        (TWO_SUMS, {"sums": "a, b = lse.exp(), new_lse.exp()", "lse": "(a + b).log()"}, "overflow"),
        (
            TWO_SUMS,
            {"sums": LARGER_FIRST, "lse": "(a + b).log()"},
            "add it again",
        ),
        (
            TWO_SUMS,
            {
                "sums": "L = lse + torch.log1p(torch.exp(new_lse - lse)); "
                "a, b = (lse - L).exp(), (new_lse - L).exp()",
                "lse": "L",
            },
            "not yet",
        ),
        (ALL_TO_ALL, COUNTS | {"announce": "", "rows": "len(parts[source])"}, "send their number"),
        (
            ALL_TO_ALL,
            COUNTS | {"rows": "int(ranks.receive(source, torch.tensor(0.0)))"},
            "`like` has the dtype",
        ),
        (ALL_TO_ALL, COUNTS | {"like": "torch.empty"}, "rows are received in the default dtype"),
        (
            ZIGZAG_RING,
            BY_HALVES | {"higher": "pass", "lower": "pass"},
            "not yet",
        ),
        (
            ZIGZAG_RING,
            BY_HALVES
            | {"lower": MASKED.format("(own < half).expand(len(q), -1)")}
            | {"higher": MASKED.format("(own >= half)[:, None].expand(-1, len(k))")},
            "hidden scores are computed and then masked",
        ),
        (
            ZIGZAG_RING,
            BY_HALVES | {"lower": BY_HALVES["lower"].replace("[0]", "[1]")},
            "take its early one",
        ),
    ],
    ids=lambda part: part.split("(")[0].split()[-1] if isinstance(part, str) else "",
)
def test_a_wrong_answer_is_refused_and_its_mistake_named(source, parts, named):
    text = verdict_on(source, **parts)
    assert text.startswith("not yet")
    assert named in text
