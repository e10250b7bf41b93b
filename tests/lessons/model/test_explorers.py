"""The figures of notebook 02: the right values, readable, and fast enough to follow a slider."""

import base64
import io
from functools import partial

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from lib.lessons.model.explorers import (
    CELL,
    MOST_TOKENS,
    attention_explorer,
    attention_patterns,
    draw_pattern,
    draw_rotation,
    draw_scale,
    pattern_picture,
    pattern_slider,
    pattern_words,
)
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from tests.lessons.drawing_time import charts_per_move

SENTENCE = "One day, a little fox found a ball. The fox"


@pytest.fixture
def explorer(story):
    return attention_explorer(*story, SENTENCE)


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


def test_cells_are_as_dark_as_their_weights():
    weights = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.1, 0.9]])
    picture = Image.open(io.BytesIO(pattern_picture(weights, ["a", "b", "c"], "A head")))
    gray = np.asarray(picture.convert("L"), dtype=int)
    # the one weight of 1 has the darkest shade for itself
    rows, columns = np.nonzero((np.asarray(picture) == (0x00, 0x30, 0x4D)).all(-1))
    middle = int(np.median(rows)), int(np.median(columns))
    step = 2 * CELL
    tones = gray[middle[0] : middle[0] + 3 * step : step, middle[1] : middle[1] + 3 * step : step]
    assert tones.shape == (3, 3)
    assert tones[0, 0] < tones[2, 2] < tones[1, 0] < tones[2, 1] < tones[0, 1]
    assert tones[1, 0] == tones[1, 1]
    assert tones[0, 1] == tones[0, 2] == tones[1, 2] == tones[2, 0]


def test_words_name_the_token_looked_at_most():
    weights = np.array([[1, 0, 0], [0.3, 0.7, 0], [0.6, 0.3, 0.1]])
    words = pattern_words(weights, ["The", "·fox", "·ran"], "Layer 2, head 1")
    assert words == "Layer 2, head 1. Each token looks most: ·fox at ·fox (70%), ·ran at The (60%)."


def test_a_slider_goes_through_the_heads_and_says_where_each_looks():
    weights = np.tril(np.random.default_rng(0).random((3, 4, 4)))
    patterns = dict(zip(("one", "two", "three"), weights))
    tokens = ["the", "·cat", "·sat", "."]
    slider, view, still = pattern_slider(patterns, tokens).children
    pictures = set()
    for name in patterns:
        slider.value = name
        (output,) = view.outputs
        pictures.add(output["data"]["image/png"])
        assert output["data"]["text/plain"] == pattern_words(patterns[name], tokens, name)
    assert len(pictures) == 3
    assert [output["data"]["text/plain"][:3] for output in still.outputs] == ["two", "thr"]


def shown(explorer) -> dict:
    (output,) = explorer.children[3].outputs
    return output


def test_each_control_changes_the_picture_and_its_words(explorer):
    box, layers, heads, *_ = explorer.children
    seen = [shown(explorer)["data"]["image/png"]]
    for control, value in ((heads, 3), (layers, 4), (box, "The fox found the ball.")):
        control.value = value
        output = shown(explorer)
        seen.append(output["data"]["image/png"])
        assert base64.b64decode(seen[-1]).startswith(b"\x89PNG")
        words = output["data"]["text/plain"]
        assert words.startswith(f"Layer {layers.value}, head {heads.value}.")
        assert output["metadata"]["image/png"]["alt"] == words
    assert len(set(seen)) == 4
    assert "·found" in shown(explorer)["data"]["text/plain"]


def test_each_change_takes_less_than_a_chart(explorer):
    box, layers, heads, *_ = explorer.children
    # as long as a text can be that is shown whole
    texts = ["The fox and the ball and the " * 6 + end for end in ("fox", "day", "dog")]
    changes = [*((box, text) for text in texts), (layers, 2), (layers, 3), (heads, 2), (heads, 3)]
    moves = [partial(setattr, control, "value", value) for control, value in changes]
    assert charts_per_move(moves) < 1


@pytest.mark.parametrize("text", ["", " ", "🐈 日本", "word " * 500])
def test_any_text_has_a_picture(explorer, text):
    explorer.children[0].value = text
    output = shown(explorer)
    size = Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"]))).size
    assert size == tuple(2 * output["metadata"]["image/png"][name] for name in ("width", "height"))
    assert size[0] < 2 * (MOST_TOKENS + 14) * CELL


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


def test_the_scale_keeps_softmax_soft():
    figure = Figure()
    draw_scale(figure, 1024)
    without, scaled = ([bar.get_height() for bar in axes.patches] for axes in figure.axes)
    assert sum(without) == pytest.approx(1)
    assert sum(scaled) == pytest.approx(1)
    assert max(without) > 0.9
    assert max(scaled) < 0.5


def test_a_pattern_names_its_tokens():
    axes, tokens, weights = Figure().subplots(), ["the", "·cat"], np.array([[1, 0], [0.3, 0.7]])
    draw_pattern(axes, weights, tokens)
    assert [label.get_text() for label in axes.get_xticklabels()] == tokens
    assert np.allclose(axes.images[0].get_array(), weights)
