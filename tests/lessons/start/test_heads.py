"""Attention weights over many stories: of the stories they are said to be of, one row per token."""

import numpy as np
import pytest

from lib.data.stories import generate_stories
from lib.lessons.model.explorers import attention_patterns
from lib.lessons.start.exercises import previous_token_head
from lib.lessons.start.heads import patterns_on_stories

STORIES, TOKENS = 30, 96


@pytest.fixture(scope="module")
def found(story):
    return patterns_on_stories(*story, stories=STORIES, tokens=TOKENS)


def test_weights_are_those_of_each_story(story, found):
    model, _ = story
    ids, weights = found
    assert ids.shape == (STORIES, TOKENS)
    for number in (0, STORIES - 1):
        np.testing.assert_array_equal(weights[number], attention_patterns(model, ids[number]))


def test_the_stories_are_held_out_and_begin_at_their_beginning(story, found):
    _, tokenizer = story
    held_out = "".join(generate_stories(300_000, split="validation"))
    for ids in found[0]:
        text = tokenizer.decode(ids.tolist())
        assert text == text.lstrip()
        start = held_out.index(text)
        assert start == 0 or held_out[:start].endswith("<|endoftext|>\n")


def test_the_head_that_is_planted_is_found():
    numbers = np.random.default_rng(0)
    for layer, head in np.ndindex(2, 3):
        weights = numbers.dirichlet(np.ones(9), size=(2, 3, 9))
        weights[layer, head] = 0.4 * np.eye(9, k=-1) + 0.6 * np.eye(9)
        assert previous_token_head.solve(weights) == (layer, head)


def test_the_article_head_of_the_lesson_looks_at_articles_and_its_neighbors_do_not(story, found):
    """Layer 3, head 2 leads behind an article, as the notebook says, and not elsewhere."""
    _, tokenizer = story
    ids, weights = found
    articles = [i for i, t in tokenizer.vocab.items() if t.strip().lower() in (b"the", b"a", b"an")]
    looks = np.moveaxis(weights.diagonal(-1, axis1=-2, axis2=-1), -1, 1)
    is_article = np.isin(ids, articles)[:, :-1]
    behind, elsewhere = looks[is_article].mean(0), looks[~is_article].mean(0)
    assert np.unravel_index(behind.argmax(), behind.shape) == (2, 1)
    assert behind.max() > 0.7 > 0.4 > elsewhere.max()
    assert elsewhere.argmax() != behind.argmax()
