"""The exercise of notebook 00: find the attention head that looks at the previous token."""

from __future__ import annotations

import random

import numpy as np

from lib.lessons.exercise import check_of, exercise

# returns the answer if it is right, or else the solution
take = check_of(__name__, returns=True)


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


@exercise("core", _draw_weights)
def previous_token_head(weights: np.ndarray) -> tuple[int, int]:
    queries = np.arange(1, weights.shape[2])
    means = weights[:, :, queries, queries - 1].mean(axis=-1)
    layer, head = np.unravel_index(means.argmax(), means.shape)
    return int(layer), int(head)


previous_token_head.mistakes = """
queries, queries - 1] => queries - 1, queries]
    | queries and keys are swapped: `weights[layer, head, q, k]` is what token q gives to k
queries, queries - 1] => queries, queries] | each token's weight on itself is averaged
int(layer), int(head) => int(head), int(layer)
    | layer and head are returned in the wrong order
return int(layer), int(head) => return int(means.argmax())
    | this is the number of the head among all; `np.unravel_index` makes a pair of it
mean(axis=-1) => max(axis=-1) | the largest weight of a head counts; take the mean of all
means = weights[:, :, queries, queries - 1].mean(axis=-1) =>
    means = (weights[:, :, 1:].argmax(axis=-1) == queries - 1).mean(axis=-1)
    | it is counted how often the token before gets the most; average its weight
"""
