"""The exercise of notebook 00: find the attention head that looks at the previous token."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from lib.lessons.exercise import Exercise, check


def _draw_weights(generator: random.Random, size: int) -> tuple:
    """Attention weights as of a causal model; in some heads, many tokens look at one place."""
    layers, heads = generator.randint(1, 4), generator.randint(1, 4)
    tokens = generator.randint(3, 4 + size)
    numbers = np.random.default_rng(generator.getrandbits(32))
    scores = 2 * numbers.standard_normal((layers, heads, tokens, tokens))
    queries = np.arange(tokens)
    for layer, head in np.ndindex(layers, heads):
        keys = np.maximum(queries - generator.randint(0, 2), 0)
        scores[layer, head, queries, keys] += generator.uniform(0, 4)
    weights = np.exp(scores) * np.tri(tokens)
    return (weights / weights.sum(-1, keepdims=True),)


def previous_token_head(weights: np.ndarray) -> tuple[int, int]:
    queries = np.arange(1, weights.shape[2])
    means = weights[:, :, queries, queries - 1].mean(axis=-1)
    layer, head = np.unravel_index(means.argmax(), means.shape)
    return int(layer), int(head)


PREVIOUS_TOKEN_HEAD = Exercise(
    previous_token_head,
    _draw_weights,
    {
        "queries and keys are swapped: `weights[layer, head, q, k]` is what token q gives to k": (
            "queries, queries - 1]",
            "queries - 1, queries]",
        ),
        "each token's weight on itself is averaged": ("queries, queries - 1]", "queries, queries]"),
        "the weights on the first token are averaged": (
            "queries, queries - 1]",
            "queries, 0 * queries]",
        ),
        "the largest weight on a previous token decides; take the mean over the tokens": (
            ".mean(",
            ".max(",
        ),
        "the head with the lowest mean is returned": ("argmax", "argmin"),
        "layer and head are returned in the wrong order": (
            "int(layer), int(head)",
            "int(head), int(layer)",
        ),
        "this is the number of the head among all; `np.unravel_index` makes a pair of it": (
            "layer, head = np.unravel_index(means.argmax(), means.shape)\n"
            "    return int(layer), int(head)",
            "return int(means.argmax())",
        ),
        "layers and heads are counted from 1; count from 0": (
            "int(layer), int(head)",
            "int(layer) + 1, int(head) + 1",
        ),
        "heads are averaged over the layers; each layer has heads of its own": (
            "means.argmax()",
            "(means * 0 + means.mean(axis=0)).argmax()",
        ),
    },
    tier="core",
)


def check_previous_token_head(attempt: Callable) -> Callable:
    """Check `previous_token_head(weights)` -> (layer, head), both from 0; return it if it is right,
    or else the solution."""
    return check(PREVIOUS_TOKEN_HEAD, attempt)
