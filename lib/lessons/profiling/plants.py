"""The model of notebook 02 with something planted in it that slows it down, for notebook 04.

A plant is an edit of the source of `plain_model.py`; the model computes the same numbers with it.
Notebook 04 asks what B and C are: reading on here spoils that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from lib.lessons.profiling import plain_model


class Cause(NamedTuple):
    """Something that slows a model down."""

    what: str
    signs: str
    """The signs in its trace."""


CAUSES = {
    "one-hot": Cause(
        "the embedding is a matmul with a one-hot matrix",
        "the embedding would have `aten::one_hot`, and a matmul",
    ),
    "heads": Cause(
        "a Python loop takes the heads one by one",
        "attention would have several times as many matmuls and softmaxes, each shorter",
    ),
    "mask": Cause(
        "the causal mask is made number by number, in Python",
        "attention would take longer without any operator of its own running",
    ),
    "float64": Cause(
        "the scores are float64",
        "attention would copy more, in `aten::copy_`, and as many calls would take longer",
    ),
    "twice": Cause(
        "the blocks run twice, for checkpoints that nobody needs",
        "every operator of a block would have twice the calls, half of them inside backward",
    ),
    "item": Cause(
        "each layer reads a number of its result on the host, for a log",
        "`aten::item` would be among the operators, once a layer",
    ),
}

# Plant -> (old, new), … texts.
PLANTS = {
    "A": (
        'weights["token_embeddings.weight"][tokens]',
        "F.one_hot(tokens, config.vocab_size).float() @ weights['token_embeddings.weight']",
    ),
    "B": (
        "torch.ones(length, length, dtype=torch.bool, device=x.device).tril()",
        "torch.tensor([[j <= i for j in range(length)] for i in range(length)], device=x.device)",
    ),
    "C": (
        "q @ k.transpose(-2, -1)",
        "q.double() @ k.double().transpose(-2, -1)",
        "softmax(-1)",
        "softmax(-1).to(v.dtype)",
    ),
}


def planted(name: str) -> Callable[..., Any]:
    """`loss_of` of the model with the plant A, B or C.

    Raises:
        ValueError: there is no such plant, or one of its texts is not in the model, once.
    """
    if name not in PLANTS:
        raise ValueError(f"name must be one of {', '.join(PLANTS)}, got {name!r}")
    source = inspect.getsource(plain_model)
    for old, new in zip(PLANTS[name][::2], PLANTS[name][1::2], strict=True):
        if source.count(old) != 1:
            raise ValueError(f"{old!r} must occur once in plain_model.py")
        source = source.replace(old, new)
    namespace: dict[str, Any] = {"__name__": plain_model.__name__}
    exec(source, namespace)
    return namespace["loss_of"]
