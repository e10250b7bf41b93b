"""Answers to exercises as readers write them: right in another way, wrong in an unforeseen one.

Each is a cell; its verdict is that of the wrapper that the lesson's check uses.
"""

import functools
import linecache
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lib.lessons import exercise
from lib.lessons.exercise import verdict
from tests.lessons.test_exercise import CHECKED, DATA, TOPICS


def room_of(lesson: str) -> dict[str, Any]:
    """The names that a cell of a lesson may use."""
    names = dict(vars(TOPICS[lesson]))
    names |= {"np": np, "torch": torch, "F": F, "math": math, "verdict": verdict}
    return names | {"functools": functools, "__name__": "a notebook"}


def cell(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a cell, whose source can be found as that of a kernel's cell can."""
    file = f"<cell {hash(code)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)
    return names


# (lesson, the verdict on `f`, the cell, words of the verdict)
ANSWERS = {
    "training: a run's state, pickled": (
        "training",
        "verdict(RESUME, interrupted(f))",
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
        "right: ",
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
        "right: ",
    ),
    "fsdp: a size from NumPy": (
        "fsdp",
        "verdict(best_size, f)",
        """
def f(layers, boundary, inside):
    sizes = np.arange(1, layers + 1)
    return sizes[np.argmin(np.ceil(layers / sizes) * boundary + sizes * inside)]""",
        "right: ",
    ),
    "model: the loss as a number": (
        "model",
        "verdict(CROSS_ENTROPY, lambda *given: cross_entropy_loss(*given).item())",
        "",
        ", of type float; expected tensor(",
    ),
    "model: the loss by one call of PyTorch's": (
        "model",
        "verdict(CROSS_ENTROPY, by_hand(lambda *given: F.cross_entropy(*given), F.cross_entropy))",
        "",
        "cross_entropy does all of it; write it out",
    ),
    "model: attention by one call of PyTorch's": (
        "model",
        "verdict(ATTENTION, by_hand(f, F.scaled_dot_product_attention))",
        """
def f(x, w_q, w_k, w_v, w_out, num_heads):
    batch, length, _ = x.shape
    head_dim = len(w_q) // num_heads
    q, k, v = (
        (x @ w.T).view(batch, length, -1, head_dim).transpose(1, 2) for w in (w_q, w_k, w_v)
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(-2) @ w_out.T""",
        "scaled_dot_product_attention does all of it; write it out",
    ),
    "training: PyTorch's own AdamW": (
        "training",
        "verdict(ADAMW_STEPS, without_optimizers(f))",
        """
def f(weight, gradients, lr, weight_decay):
    weight = torch.nn.Parameter(weight.clone())
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([weight], lr=lr, **options)
    for weight.grad in gradients:
        optimizer.step()
    return weight.detach()""",
        "AdamW does all of it; write the update out",
    ),
    "training: one backward for all batches of a step": (
        "training",
        "verdict(LOOP, rounded(f))",
        """
def f(model, batches, rates, accumulate, max_norm):
    return [sum(model.loss(*batch) for batch in batches[:2]).backward()]""",
        "call backward for each batch before the next one's loss",
    ),
    "training: a second run that begins anew": (
        "training",
        "verdict(RESUME, interrupted(f))",
        """
def f(make_run, before, after):
    make_run()
    run = make_run()
    run.train(before + after)
    return run.weights""",
        "are saved already, and it goes on for",
    ),
    "flash_attention: copies of all tiles": (
        "flash_attention",
        "verdict(ONLINE_SOFTMAX, in_little_room(f))",
        """
def f(tiles):
    kept = [tile.clone() for tile in tiles]
    m = torch.stack([tile.max() for tile in kept]).max()
    return torch.stack([m, sum((tile - m).exp().sum() for tile in kept)])""",
        "numbers are kept; there is room for a few of one tile",
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


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_another_kind_gets_its_own_verdict(name):
    lesson, expression, code, words = ANSWERS[name]
    if lesson not in TOPICS:
        pytest.skip("Triton is for Linux")
    text = verdict_in(lesson, expression, code)
    assert text.startswith("right: " if words == "right: " else "not yet")
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
