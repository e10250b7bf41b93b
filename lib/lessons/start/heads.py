"""Attention weights of the story model on many held-out stories, to measure what a head does."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from lib.data.stories import generate_stories
from lib.lessons.model.explorers import attention_patterns
from lib.tokenizer.pretokenize import SEPARATOR

if TYPE_CHECKING:
    from lib.model.transformer import TransformerLM
    from lib.tokenizer.bpe import Tokenizer

# Half as many again as a story of the generator has, on average.
BYTES_PER_STORY = 1_500


def patterns_on_stories(
    model: TransformerLM, tokenizer: Tokenizer, *, stories: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The attention of each head on the beginnings of held-out stories.

    Args:
        stories: how many; those with fewer than `tokens` tokens are left out.
        tokens: of each story, at most `context_length` of the model.

    Returns:
        ids (stories, tokens), and weights (stories, layers, heads, queries, keys).
    """
    text = "".join(generate_stories(stories * BYTES_PER_STORY, split="validation"))
    encoded = (tokenizer.encode(story.strip()) for story in text.split(SEPARATOR))
    ids = list(islice((story[:tokens] for story in encoded if len(story) >= tokens), stories))
    return np.array(ids), np.stack([attention_patterns(model, story) for story in ids])
