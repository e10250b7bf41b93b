"""The explorers of notebooks 00 and 02: attention weights, their words, and rotation."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lib.lessons.model.explorers import (
    MOST_TOKENS,
    attention_explorer,
    attention_patterns,
    draw_rotation,
    pattern_words,
)
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True}, {"positions": "none"}, {"norm": "post"}, {"norm": "none"}]
)
def test_patterns_are_those_that_the_model_mixes_values_with(options):
    """Weights times values is what the model's own attention gives, for each variant of it."""
    shape = {"vocab_size": 50, "context_length": 16, "d_model": 32, "num_layers": 2}
    config = ModelConfig(**shape, num_heads=4, d_ff=32, **options)
    model = TransformerLM(config, generator=torch.Generator().manual_seed(0))
    ids, mixed, values = [3, 1, 4, 1, 5, 9], [], []

    def watch(module, arguments):
        heads = module.qkv_proj(arguments[0]).unflatten(-1, (3, 4, -1))
        values.append(heads[..., 2, :, :].transpose(1, 2)[0])

    def result(module, arguments):
        mixed.append(arguments[0].unflatten(-1, (4, -1)).transpose(1, 2)[0])

    for layer in model.layers:
        layer.attn.register_forward_pre_hook(watch)
        layer.attn.output_proj.register_forward_pre_hook(result)
    patterns = torch.from_numpy(attention_patterns(model, ids))
    assert patterns.shape == (2, 4, 6, 6)
    for weights, value, expected in zip(patterns, values, mixed):
        torch.testing.assert_close(weights @ value, expected, rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was(story):
    model, tokenizer = story
    attention_patterns(model, tokenizer.encode("a"))
    assert not any(layer.attn._forward_pre_hooks for layer in model.layers)
    with pytest.raises(IndexError):
        attention_patterns(model, [10**6])
    assert not any(layer.attn._forward_pre_hooks for layer in model.layers)


def test_words_name_the_token_looked_at_most():
    weights = np.array([[1, 0, 0], [0.3, 0.7, 0], [0.6, 0.3, 0.1]])
    words = pattern_words(weights, ["The", "·fox", "·ran"], "Layer 2, head 1")
    assert words == "Layer 2, head 1. Each token looks most: ·fox at ·fox (70%), ·ran at The (60%)."


@pytest.mark.parametrize("text", ["", " ", "🐈 日本", "word " * 500])
def test_any_text_has_a_picture(story, text):
    box = attention_explorer(*story, text)
    (output,) = box.children[3].outputs
    assert output["data"]["text/plain"].startswith("Layer 1, head 1. Each token looks most:")
    assert len(output["data"]["text/plain"].split("%")) <= MOST_TOKENS


def arrows(figure: Figure) -> list[np.ndarray]:
    """(key's tip, query's tip) of each pair."""
    return [np.array([text.xy for text in axes.texts]) for axes in figure.axes]


def test_rotation_keeps_the_angle_and_turns_each_pair_at_its_own_speed():
    first, second = Figure(), Figure()
    draw_rotation(first, 7)
    draw_rotation(second, 8)
    expected = sum(np.cos(5 * 100.0 ** (-pair / 4)) for pair in range(4))
    for figure in (first, second):
        assert sum(key @ query for key, query in arrows(figure)) == pytest.approx(expected)
    for pair, (old, new) in enumerate(zip(arrows(first), arrows(second), strict=True)):
        assert np.angle(complex(*new[0]) / complex(*old[0])) == pytest.approx(100 ** (-pair / 4))
