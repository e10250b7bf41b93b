"""Answers to exercises as readers write them: right in another way, wrong in an unforeseen one."""

import functools
import linecache
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lib.lessons import exercise
from lib.lessons.exercise import verdict
from lib.lessons.mesh import context
from tests.lessons.test_exercise import CHECKED, TOPICS


def verdict_on(name: str, code: str) -> str:
    """The verdict on the function `f` of a cell, whose source can be found."""
    lesson, _ = name.split(".")
    names = vars(TOPICS[lesson]) | {"np": np, "torch": torch, "F": F, "math": math}
    names |= {"context": context, "__name__": "a notebook"}
    file = f"<cell {hash(code)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)
    return verdict(CHECKED[name], names["f"], seed=0)


# exercise -> a right answer that is not the solution
RIGHT = {
    # autograd, a chunk at a time
    "profiling.loss_in_chunks": """
def f(hidden, weight, targets, chunk_tokens):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = 0.0
    for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens)):
        loss = F.cross_entropy(F.linear(h, weight), t, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    return total, hidden.grad, weight.grad""",
    # another choice among equally likely tokens
    "training.top_p_filter": """
def f(probabilities, top_p):
    return top_p_filter.solve(probabilities.flip(0), top_p).flip(0)""",
    # tiles of queries first
    "flash_attention.tiled_backward": """
def f(q, k, v, out, lse, grad_out, BQ, BK):
    scale, grads = q.shape[1] ** -0.5, [torch.zeros_like(x) for x in (q, k, v)]
    rows = range(0, len(q), BQ)
    for i, Q, O, L, dO in zip(rows, *(x.split(BQ) for x in (q, out, lse, grad_out))):
        for j in range(0, len(k), BK):
            queries, keys = slice(i, i + BQ), slice(j, j + BK)
            P = torch.exp(scale * Q @ k[keys].T - L[:, None])
            dS = scale * P * ((dO @ v[keys].T) - (dO * O).sum(1, keepdim=True))
            grads[0][queries] += dS @ k[keys]
            grads[1][keys] += dS.T @ Q
            grads[2][keys] += P.T @ dO
    return grads""",
    # a heap of programs
    "hopper.deal": """
import heapq
def f(work, programs):
    hands = [[] for _ in range(programs)]
    heap = [(0, program) for program in range(programs)]
    for tile in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        busy, program = heapq.heappop(heap)
        hands[program].append(tile)
        heapq.heappush(heap, (busy + work[tile], program))
    return hands""",
    # inputs and outputs apart
    "mesh.run_stage": """
def f(events, stage, loss, micro_batches, ranks):
    me, last = ranks.number, ranks.count - 1
    xs, ys = {}, {}
    for kind, i in events:
        if kind == "forward":
            x, target = micro_batches[i]
            if me != 0:
                x = ranks.receive(me - 1, x)
                x.requires_grad_()
            y = stage(x)
            xs[i], ys[i] = x, y if me != last else loss(y, target)
            if me != last:
                ranks.send(y.detach(), me + 1)
            del x, y
        else:
            x, y = xs.pop(i), ys.pop(i)
            y.backward(*([] if me == last else [ranks.receive(me + 1, like=y)]))
            if me != 0:
                ranks.send(x.grad, me - 1)
            del x, y""",
    # keys and values in one message
    "mesh.ring_attention": """
def f(q, k, v, shares, ranks):
    n, me, out = ranks.count, ranks.number, None
    for step in range(n):
        source = (me - step) % n
        part = context.attend(q, k, v, shares[me].unsqueeze(1) >= shares[source])
        out, lse = part if out is None else context.merge(out, lse, *part)
        if step < n - 1:
            k, v = context.pass_on(torch.stack([k, v]), ranks)
    return out, lse""",
    # x gathered once more in backward
    "mesh.sequence_parallel_mlp": """
def f(x, w1, w2, ranks):
    d = x.shape[1]
    gather = lambda rows: ranks.all_gather(rows.reshape(-1)).view(-1, d)
    scatter = lambda rows: ranks.reduce_scatter(rows.reshape(-1)).view(-1, d)
    h = gather(x) @ w1.T
    def backward(grad_y):
        whole = gather(grad_y)
        grad_h = (whole @ w2) * (h > 0)
        return scatter(grad_h @ w1), grad_h.T @ gather(x), whole.T @ h.relu()
    return scatter(h.relu() @ w2.T), backward""",
    # by way of the larger one
    "mesh.merge": """
def f(out, lse, new_out, new_lse):
    m = torch.maximum(lse, new_lse)
    a, b = (lse - m).exp(), (new_lse - m).exp()
    return (a * out + b * new_out) / (a + b), m + (a + b).log()""",
    # to the ranks after it first
    "mesh.all_to_all": """
def f(parts, ranks):
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
    return received""",
    # halves in place
    "mesh.zigzag_ring": """
def f(q, k, v, ranks):
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
    return out, lse""",
}
# (exercise, words of the verdict, an unforeseen wrong answer)
WRONG = [
    (
        "profiling.loss_in_chunks",
        "as many numbers as the logits of",
        """
def f(hidden, weight, targets, chunk_tokens):
    return loss_in_chunks.solve(hidden, weight, targets, 2 * chunk_tokens)""",
    ),
    (
        "training.top_p_filter",
        "it changes the probabilities that are given",
        """
def f(probabilities, top_p):
    probabilities.copy_(top_p_filter.solve(probabilities, top_p))
    return probabilities""",
    ),
    (
        "model.cross_entropy_loss",
        "whose mean is right by luck; sum without `keepdim=True`",
        """
def f(logits, targets):
    of_target = logits[torch.arange(len(targets)), targets]
    return (logits.logsumexp(-1, keepdim=True) - of_target).mean()""",
    ),
    (
        "model.attention",
        "autograd can't follow it",
        """
def f(x, *given):
    return attention.solve(torch.tensor(x.detach().numpy()), *given)""",
    ),
    (
        "model.rotate",
        "it changes the tensor that is given",
        """
def f(x, *given):
    x[...] = rotate.solve(x.clone(), *given)
    return x""",
    ),
    (
        "model.rotate",
        "the dtype must be that of the tensor given, got torch.float64",
        """
def f(x, *given):
    return rotate.solve(x.double(), *given)""",
    ),
    (
        "model.bigram_gradient",
        "grad does all of it; write it out",
        """
def f(weight, inputs, targets):
    with torch.enable_grad():
        weight = weight.clone().requires_grad_()
        loss = F.cross_entropy(weight[inputs], targets)
        return loss.detach(), *torch.autograd.grad(loss, weight)""",
    ),
    (
        "model.attention",
        "scaled_dot_product_attention does all of it; write it out",
        """
def f(x, w_q, w_k, w_v, w_out, num_heads, rope):
    batch, length, _ = x.shape
    head_dim = len(w_q) // num_heads
    q, k, v = (
        (x @ w.T).view(batch, length, -1, head_dim).transpose(1, 2) for w in (w_q, w_k, w_v)
    )
    q, k = rope(q), rope(k)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(-2) @ w_out.T""",
    ),
    (
        "training.adamw_step",
        "AdamW does all of it; write the update out",
        """
def f(weight, gradient, state, lr, weight_decay=0.0):
    weight = torch.nn.Parameter(weight)
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([weight], lr=lr, **options)
    weight.grad = gradient
    optimizer.step()
    return weight.detach()""",
    ),
    (
        "training.train",
        "call backward for each batch before the next one's loss",
        """
def f(weights, loss_of, batches, rates, update, on_step, accumulate=1, max_norm=1.0):
    sum(loss_of(weights, *next(batches)) for _ in range(2)).backward()""",
    ),
    (
        "training.resume",
        "are saved already, and it goes on for",
        """
def f(make_run, before, after):
    make_run()
    run = make_run()
    run.train(before + after)
    return run.weights""",
    ),
    (
        "training.resume",
        "the first run was trained for",
        """
def f(make_run, before, after):
    run, _ = make_run(), make_run()
    run.train(before + after)
    return run.weights""",
    ),
    (
        "flash_attention.tiled_forward",
        "numbers in the largest tensor: yours ",
        """
def f(q, k, v, BQ, BK):
    scores = q @ k.T / math.sqrt(q.shape[1])
    return scores.softmax(1) @ v, scores.logsumexp(1)""",
    ),
    (
        "ddp.ring",
        "rank 0, ranks that it sends to: yours 2, at most 1",
        """
def f(tensor, ranks):
    if ranks.number:
        ranks.send(tensor, 0)
        return ranks.receive(0, like=tensor)
    others = range(1, ranks.count)
    total = sum((ranks.receive(other, like=tensor) for other in others), tensor)
    for other in others:
        ranks.send(total, other)
    return total""",
    ),
]
# (exercise, words of the verdict, an edit of its right answer above)
SLIPS = [
    ("mesh.run_stage", "keep y from the forward pass", "ys.pop(i)", "ys.pop(i); stage(x)"),
    ("mesh.run_stage", "inputs held after", "x = ranks.receive(", "x[:] = ranks.receive("),
    ("mesh.merge", "not yet", "torch.maximum(lse, new_lse)", "lse + (new_lse - lse).exp().log1p()"),
]
# without Triton, which is for Linux, some exercises are not there
TRIED_RIGHT = [name for name in RIGHT if name in CHECKED]
TRIED_WRONG = [case for case in WRONG if case[0] in CHECKED]


@pytest.mark.parametrize("name", TRIED_RIGHT)
def test_a_right_answer_passes_however_it_is_written(name):
    assert verdict_on(name, RIGHT[name]).startswith("right")


@pytest.mark.parametrize(
    ("name", "words", "code"),
    TRIED_WRONG + [(name, words, RIGHT[name].replace(*edit)) for name, words, *edit in SLIPS],
)
def test_a_wrong_answer_fails_for_its_own_reason(name, words, code):
    text = verdict_on(name, code)
    assert text.startswith("not yet")
    assert words in text


class Strange:
    """An object that can be neither compared nor shown."""

    def __eq__(self, other):
        raise ValueError("no comparison")

    __hash__ = None

    def __repr__(self):
        raise ValueError("no text")


def fails_strangely(*given):
    raise Exception(Strange())


STRANGE = {
    "an object": lambda *given: Strange(),
    "objects in a list": lambda *given: [Strange(), {"a": Strange()}],
    "complex numbers": lambda *given: torch.zeros(3, dtype=torch.cfloat),
    "a sparse tensor": lambda *given: torch.eye(3).to_sparse(),
    "a tensor without numbers": lambda *given: torch.zeros(3, device="meta"),
    "a dict of tensors": lambda *given: {"a": torch.ones(2), "b": [torch.ones(3)]},
    "a generator": lambda *given: (value for value in given),
    "a function": lambda *given: len,
    "three of them": lambda *given: (torch.ones(2), None, Strange()),
    "an error without text": fails_strangely,
    "the end of the kernel": lambda *given: exit(),
    "another number of arguments": lambda: None,
    "no function at all": 42,
    "its input": lambda given=None, *_: given,
    "a partial function": functools.partial(max, 3),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_never_raises(name, monkeypatch):
    # the first input will do
    monkeypatch.setattr(exercise, "_recognize", lambda *given: None)
    for what, attempt in STRANGE.items():
        text = verdict(CHECKED[name], attempt)
        # one copies its input
        assert text.startswith("not yet") or (name, what) == ("triton.copy", "its input"), what
