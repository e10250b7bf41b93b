"""Answers to exercises as readers write them: right in another way, wrong in an unforeseen one.

Each is a cell; its verdict is that of the wrapper that the lesson's check uses.
"""

import functools
import importlib
import importlib.util
import linecache
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lib.lessons import exercise
from lib.lessons.exercise import verdict
from tests.lessons.test_exercise import CHECKED, DATA, KERNELS, TOPICS

NEEDS_TRITON = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Triton is for Linux"
)


def room_of(lesson: str) -> dict[str, Any]:
    """The names that a cell of a lesson may use."""
    names = dict(vars(TOPICS[lesson]))
    names |= {"np": np, "torch": torch, "F": F, "math": math, "verdict": verdict}
    return names | {"edited": exercise.edited, "functools": functools, "__name__": "a notebook"}


def cell(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a cell, whose source can be found as that of a kernel's cell can."""
    file = f"<cell {hash(code)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)
    return names


# (lesson, the verdict on `f`, the cell)
RIGHT = {
    "profiling: autograd, a chunk at a time": (
        "profiling",
        "verdict(loss_in_chunks, f)",
        """
def f(hidden, weight, targets, chunk_tokens):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = 0.0
    for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens)):
        loss = F.cross_entropy(F.linear(h, weight), t, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    return total, hidden.grad, weight.grad""",
    ),
    "training: weights that are replaced, gradients that are returned": (
        "training",
        "verdict(train, f)",
        """
def f(weights, loss_of, batches, rates, update, on_step, accumulate=1, max_norm=1.0):
    memory = {}
    for lr in rates:
        loss, sums = 0.0, dict.fromkeys(weights, 0)
        for x, y in (next(batches) for _ in range(accumulate)):
            small = loss_of(weights, x, y)
            for name, grad in zip(weights, torch.autograd.grad(small, list(weights.values()))):
                sums[name] = sums[name] + grad / accumulate
            loss += small.item() / accumulate
        norm = math.sqrt(sum((grad**2).sum().item() for grad in sums.values()))
        for name, grad in sums.items():
            grad = grad * min(1, max_norm / norm)
            new = update(weights[name].detach(), grad, memory.setdefault(name, {}), lr)
            weights[name] = new.requires_grad_(True)
        on_step(loss, norm)""",
    ),
    "model: a gradient with the loss as a number": (
        "model",
        "verdict(bigram_gradient, f)",
        """
def f(*given):
    loss, gradient = bigram_gradient.solve(*given)
    return loss.item(), gradient""",
    ),
    "training: top-p, another choice among equally likely tokens": (
        "training",
        "verdict(top_p_filter, f)",
        """
def f(probabilities, top_p):
    return top_p_filter.solve(probabilities.flip(0), top_p).flip(0)""",
    ),
    "start: numbers of NumPy's": (
        "start",
        "verdict(previous_token_head, f)",
        """
def f(weights):
    means = weights.diagonal(-1, axis1=2, axis2=3).mean(-1)
    return np.unravel_index(means.argmax(), means.shape)""",
    ),
    "training: moments changed in place": (
        "training",
        "verdict(adamw_step, f)",
        """
def f(weight, gradient, state, lr, weight_decay=0.0):
    if not state:
        state.update(t=0, m=torch.zeros_like(weight), v=torch.zeros_like(weight))
    state["t"] += 1
    weight *= 1 - lr * weight_decay
    state["m"].lerp_(gradient, 0.1)
    state["v"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
    scale = math.sqrt(1 - 0.95 ** state["t"])
    weight -= lr / (1 - 0.9 ** state["t"]) * state["m"] / (state["v"].sqrt() / scale + 1e-8)
    return weight""",
    ),
    "training: a run's state, pickled": (
        "training",
        "verdict(resume, f)",
        """
import pickle
def f(make_run, before, after):
    run = make_run()
    run.train(before)
    saved = pickle.dumps(vars(run))
    run.train(1)
    new = make_run()
    vars(new).update(pickle.loads(saved))
    new.train(after)
    return new.weights""",
    ),
    "profiling: a running mean, rounded otherwise": (
        "profiling",
        "verdict(train, f)",
        """
def f(gpu, batches):
    losses, mean = [gpu.step(gpu.load(batch)) for batch in batches], 0.0
    for count, loss in enumerate(losses, 1):
        mean += (loss.item() - mean) / count
    return [mean, max(loss.item() for loss in losses)]""",
    ),
    "flash_attention: the sum in logarithms": (
        "flash_attention",
        "verdict(add_tile, f)",
        """
def f(m, l, scores):
    new_m = torch.cat([m[None], scores]).max()
    return new_m, torch.logaddexp(l.log() + m - new_m, (scores - new_m).logsumexp(0)).exp()""",
    ),
    "flash_attention: tiles by split, scores in base 2": (
        "flash_attention",
        "verdict(tiled_forward, f)",
        """
def f(q, k, v, BQ, BK):
    outs, lses, scale = [], [], q.shape[1] ** -0.5 / math.log(2)
    for Q in q.split(BQ):
        m, l, O = torch.full((len(Q), 1), -math.inf), 0, 0
        for K, V in zip(k.split(BK), v.split(BK)):
            S = torch.einsum("id,jd->ij", Q, K) * scale
            new_m = torch.cat([m, S], 1).max(1, keepdim=True).values
            P, shrink = torch.exp2(S - new_m), torch.exp2(m - new_m)
            l, O, m = shrink * l + P.sum(1, keepdim=True), shrink * O + P @ V, new_m
        outs.append(O / l)
        lses.append(((m + l.log2()) * math.log(2))[:, 0])
    return torch.cat(outs), torch.cat(lses)""",
    ),
    "flash_attention: gradients of tiles of queries first": (
        "flash_attention",
        "verdict(tiled_backward, f)",
        """
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
    ),
    "hopper: a heap of programs": (
        "hopper",
        "verdict(deal, f)",
        """
import heapq
def f(work, programs):
    hands = [[] for _ in range(programs)]
    heap = [(0, program) for program in range(programs)]
    for tile in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        busy, program = heapq.heappop(heap)
        hands[program].append(tile)
        heapq.heappush(heap, (busy + work[tile], program))
    return hands""",
    ),
    "zero1: owners in a tensor": (
        "zero1",
        "verdict(balanced_owners, f)",
        """
def f(sizes, ranks):
    loads, owners = torch.zeros(ranks), torch.zeros(len(sizes), dtype=torch.long)
    for index in torch.tensor(sizes).argsort(descending=True):
        owners[index] = loads.argmin()
        loads[owners[index]] += sizes[index]
    return owners""",
    ),
    "zero1: boundaries in a tensor": (
        "zero1",
        "verdict(shard_boundaries, f)",
        """
def f(num_elements, ranks, alignment):
    length = math.ceil(num_elements / (ranks * alignment)) * alignment
    starts = torch.arange(ranks) * length
    return torch.stack([starts, starts + length], 1)""",
    ),
    "fsdp: a size from NumPy": (
        "fsdp",
        "verdict(best_size, f)",
        """
def f(layers, boundary, inside):
    sizes = np.arange(1, layers + 1)
    return sizes[np.argmin(np.ceil(layers / sizes) * boundary + sizes * inside)]""",
    ),
    "fsdp: parts of the matrices, by autograd": (
        "fsdp",
        "verdict(tensor_parallel_mlp, f)",
        """
def f(x, w1, w2, ranks):
    w1 = w1.tensor_split(ranks.count)[ranks.number].clone().requires_grad_()
    w2 = w2.tensor_split(ranks.count, 1)[ranks.number].clone().requires_grad_()
    part = F.linear(F.relu(F.linear(x.requires_grad_(), w1)), w2)
    def backward(grad_y):
        grad_x, grad_w1, grad_w2 = torch.autograd.grad(part, (x, w1, w2), grad_y)
        return ranks.all_reduce(grad_x), grad_w1, grad_w2
    return ranks.all_reduce(part), backward""",
    ),
}
# ... and words of the verdict
WRONG = {
    "profiling: chunks that are twice as long": (
        "profiling",
        "verdict(loss_in_chunks, f)",
        "def f(hidden, weight, targets, chunk_tokens):\n"
        "    return loss_in_chunks.solve(hidden, weight, targets, 2 * chunk_tokens)",
        "as many numbers as the logits of",
    ),
    "profiling: one-hot rows of all tokens": (
        "profiling",
        "verdict(loss_in_chunks, f)",
        "def f(hidden, weight, targets, chunk_tokens):\n"
        "    F.one_hot(targets, len(weight))\n"
        "    return loss_in_chunks.solve(hidden, weight, targets, chunk_tokens)",
        "tensor, as many numbers as the logits of all tokens",
    ),
    "model: the loss as a number": (
        "model",
        "verdict(cross_entropy_loss, lambda *given: cross_entropy_loss.solve(*given).item())",
        "",
        ", of type float; expected tensor(",
    ),
    "model: a column minus a row, whose mean is right": (
        "model",
        "verdict(cross_entropy_loss, f)",
        """
def f(logits, targets):
    of_target = logits[torch.arange(len(targets)), targets]
    return (logits.logsumexp(-1, keepdim=True) - of_target).mean()""",
        "whose mean is right by luck; sum without `keepdim=True`",
    ),
    "training: top-p by the least probability kept": (
        "training",
        "verdict(top_p_filter, f)",
        """
def f(probabilities, top_p):
    ranked = probabilities.sort(descending=True).values
    least = ranked[ranked.cumsum(0) - ranked < top_p][-1]
    kept = torch.where(probabilities >= least, probabilities, 0)
    return kept / kept.sum()""",
        "tokens as likely as the last one needed are kept, too",
    ),
    "training: top-p in the tensor that is given": (
        "training",
        "verdict(top_p_filter, f)",
        """
def f(probabilities, top_p):
    probabilities.copy_(top_p_filter.solve(probabilities, top_p))
    return probabilities""",
        "it changes the probabilities that are given",
    ),
    "training: a new name for the new weight": (
        "training",
        "verdict(train, f)",
        """
def f(weights, loss_of, batches, rates, update, on_step, accumulate=1, max_norm=1.0):
    states = {name: {} for name in weights}
    for rate in rates:
        losses = []
        for _ in range(accumulate):
            losses.append(loss_of(weights, *next(batches)) / accumulate)
            losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)
        for name, weight in weights.items():
            with torch.no_grad():
                weight = update(weight, weight.grad, states[name], rate)
            weight.grad = None
        on_step(sum(loss.item() for loss in losses), norm.item())""",
        "`weight = …` gives the new tensor a name",
    ),
    "start: the number of the head, of NumPy's": (
        "start",
        "verdict(previous_token_head, f)",
        """
def f(weights):
    return weights.diagonal(-1, axis1=2, axis2=3).mean(-1).argmax()""",
        "this is the number of the head among all",
    ),
    "model: the loss without a gradient": (
        "model",
        "verdict(cross_entropy_loss, lambda *given: cross_entropy_loss.solve(*given).detach())",
        "",
        "autograd can't follow it",
    ),
    "model: attention through NumPy": (
        "model",
        "verdict(attention, f)",
        """
def f(x, *given):
    return attention.solve(torch.tensor(x.detach().numpy()), *given)""",
        "autograd can't follow it",
    ),
    "model: the rotation of a copy": (
        "model",
        "verdict(rotate, lambda x, *given: rotate.solve(x.detach(), *given))",
        "",
        "autograd can't follow it",
    ),
    "model: a rotation in place": (
        "model",
        "verdict(rotate, f)",
        """
def f(x, *given):
    x[...] = rotate.solve(x.clone(), *given)
    return x""",
        "it changes the tensor that is given",
    ),
    "model: a rotation by float64 angles": (
        "model",
        "verdict(rotate, lambda x, *given: rotate.solve(x.double(), *given))",
        "",
        "the dtype must be that of the tensor given, got torch.float64",
    ),
    "model: the maximum subtracted in place": (
        "model",
        "verdict(cross_entropy_loss, f)",
        """
def f(logits, targets):
    logits -= logits.amax(-1, keepdim=True)
    return cross_entropy_loss.solve(logits, targets)""",
        "it changes the tensor that is given",
    ),
    "model: a gradient by autograd": (
        "model",
        "verdict(bigram_gradient, f)",
        """
def f(weight, inputs, targets):
    with torch.enable_grad():
        weight = weight.clone().requires_grad_()
        loss = F.cross_entropy(weight[inputs], targets)
        return loss.detach(), *torch.autograd.grad(loss, weight)""",
        "grad does all of it; write it out",
    ),
    "model: a gradient by backward": (
        "model",
        "verdict(bigram_gradient, f)",
        """
def f(weight, inputs, targets):
    with torch.enable_grad():
        weight = weight.clone().requires_grad_()
        loss = F.cross_entropy(weight[inputs], targets)
        loss.backward()
        return loss.detach(), weight.grad""",
        "backward does all of it; write it out",
    ),
    "model: the loss by one call of PyTorch's": (
        "model",
        "verdict(cross_entropy_loss, lambda *given: F.cross_entropy(*given))",
        "",
        "cross_entropy does all of it; write it out",
    ),
    "model: attention by one call of PyTorch's": (
        "model",
        "verdict(attention, f)",
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
        "scaled_dot_product_attention does all of it; write it out",
    ),
    "model: heads as wide as d_model allows": (
        "model",
        'verdict(attention, edited(attention.solve, "len(w_q) //", "x.shape[-1] //"))',
        "",
        "not yet",
    ),
    "training: PyTorch's own AdamW": (
        "training",
        "verdict(adamw_step, f)",
        """
def f(weight, gradient, state, lr, weight_decay=0.0):
    weight = torch.nn.Parameter(weight)
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([weight], lr=lr, **options)
    weight.grad = gradient
    optimizer.step()
    return weight.detach()""",
        "AdamW does all of it; write the update out",
    ),
    "training: one backward for all batches of a step": (
        "training",
        "verdict(train, f)",
        """
def f(weights, loss_of, batches, rates, update, on_step, accumulate=1, max_norm=1.0):
    sum(loss_of(weights, *next(batches)) for _ in range(2)).backward()""",
        "call backward for each batch before the next one's loss",
    ),
    "training: a second run that begins anew": (
        "training",
        "verdict(resume, f)",
        """
def f(make_run, before, after):
    make_run()
    run = make_run()
    run.train(before + after)
    return run.weights""",
        "are saved already, and it goes on for",
    ),
    "training: a first run that does it all": (
        "training",
        "verdict(resume, f)",
        """
def f(make_run, before, after):
    run, _ = make_run(), make_run()
    run.train(before + after)
    return run.weights""",
        "the first run was trained for",
    ),
    "flash_attention: all scores at once": (
        "flash_attention",
        "verdict(tiled_forward, f)",
        """
def f(q, k, v, BQ, BK):
    scores = q @ k.T / math.sqrt(q.shape[1])
    return scores.softmax(1) @ v, scores.logsumexp(1)""",
        "numbers in the largest tensor: yours ",
    ),
    "flash_attention: delta of the tile's keys alone": (
        "flash_attention",
        "verdict(tiled_backward, f)",
        """
def f(q, k, v, out, lse, grad_out, BQ, BK):
    scale, grads = q.shape[1] ** -0.5, [torch.zeros_like(x) for x in (q, k, v)]
    for j in range(0, len(k), BK):
        keys = slice(j, j + BK)
        P = torch.exp(scale * q @ k[keys].T - lse[:, None])
        dP = grad_out @ v[keys].T
        dS = scale * P * (dP - (P * dP).sum(1, keepdim=True))
        grads[0] += dS @ k[keys]
        grads[1][keys], grads[2][keys] = dS.T @ q, P.T @ grad_out
    return grads""",
        "dQ, position (0, 0)",
    ),
    "ddp: all to rank 0, and back": (
        "ddp",
        "verdict(ring, f, seed=0)",
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
        "rank 0, ranks that it sends to: yours 2, at most 1",
    ),
    "fsdp: the whole MLP on every rank": (
        "fsdp",
        "verdict(tensor_parallel_mlp, with_the_whole)",
        "",
        "rank 0, computes with its parts of the matrices alone: yours False, expected True",
    ),
}


def verdict_in(lesson: str, expression: str, code: str) -> str:
    return eval(expression, cell(code, room_of(lesson)))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer, id=name, marks=NEEDS_TRITON if answer[0] in KERNELS else ())
        for name, answer in RIGHT.items()
    ],
)
def test_a_right_answer_passes_however_it_is_written(answer):
    assert verdict_in(*answer).startswith("right")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer, id=name, marks=NEEDS_TRITON if answer[0] in KERNELS else ())
        for name, answer in WRONG.items()
    ],
)
def test_a_wrong_answer_fails_for_its_own_reason(answer):
    *given, words = answer
    text = verdict_in(*given)
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
    "a partial function": functools.partial(max, 3),
}


# every check of every lesson, by name
CHECKS = {
    f"{lesson}.{name}": getattr(topic, name)
    for lesson, topic in TOPICS.items()
    for name in vars(topic)
    if name.startswith("check_")
    and getattr(topic, name).__module__ == topic.__name__
    and name not in ("check_run", "check_faster", "check_kernel")
} | {name: functools.partial(exercise.check, CHECKED[name]) for name in DATA}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_never_raises(name, capsys, monkeypatch):
    # the first input will do
    monkeypatch.setattr(exercise, "_recognize", lambda *given: None)
    for what, attempt in STRANGE.items():
        CHECKS[name](attempt)
        assert capsys.readouterr().out.startswith("not yet"), what
