"""Attention weights over many stories: of the stories they are said to be of, one row per token."""

import numpy as np

from lib.data.stories import generate_stories
from lib.lessons.model.explorers import attention_patterns
from lib.lessons.start.exercises import previous_token_head
from lib.lessons.start.heads import patterns_on_stories


def test_the_weights_are_those_of_stories_from_their_beginning(story):
    model, tokenizer = story
    ids, weights = patterns_on_stories(model, tokenizer, stories=3, tokens=24)
    assert ids.shape == (3, 24)
    held_out = "".join(generate_stories(9_000, split="validation")).split("<|endoftext|>\n")
    for tokens, of_story in zip(ids, weights):
        np.testing.assert_array_equal(of_story, attention_patterns(model, tokens))
        assert any(one.startswith(tokenizer.decode(tokens.tolist())) for one in held_out)


def test_the_head_that_is_planted_is_found():
    numbers = np.random.default_rng(0)
    for layer, head in np.ndindex(2, 3):
        weights = numbers.dirichlet(np.ones(9), size=(2, 3, 9))
        weights[layer, head] = 0.4 * np.eye(9, k=-1) + 0.6 * np.eye(9)
        assert previous_token_head.solve(weights) == (layer, head)
