"""The attention of a model on any sentence: the right weights, a readable picture, at once."""

import base64
import io
import time
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from lib.config_training import ModelConfig
from lib.model import TransformerLM
from lib.notebook_cells import WIDGET_STATE, WIDGET_VIEW, static_widgets
from lib.story_model import load_story_model
from lib.widgets_attention import (
    CELL,
    MOST_TOKENS,
    attention_explorer,
    attention_patterns,
    pattern_picture,
    pattern_slider,
    pattern_words,
)
from tests.drawing_time import charts_per_move

SENTENCE = "One day, a little fox found a ball. The fox"


@pytest.fixture(scope="module")
def story():
    return load_story_model("cpu")[:2]


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


def test_rows_share_one_among_the_tokens_so_far(story):
    patterns = attention_patterns(story[0], story[1].encode(SENTENCE))
    assert np.allclose(patterns.sum(-1), 1, atol=1e-5)
    assert not np.triu(patterns, 1).any()


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


def test_a_picture_is_opaque_and_holds_the_longest_token():
    tokens = ["a", "·unbelievable"]
    picture = Image.open(io.BytesIO(pattern_picture(np.eye(2), tokens, "T")))
    assert picture.mode == "RGB"
    edges = np.asarray(picture)
    # nothing is cut off: all four edges are empty paper
    for edge in (edges[0], edges[-1], edges[:, 0], edges[:, -1]):
        assert (edge == edge[0]).all()


def test_words_name_the_token_looked_at_most():
    weights = np.array([[1, 0, 0], [0.3, 0.7, 0], [0.6, 0.3, 0.1]])
    words = pattern_words(weights, ["The", "·fox", "·ran"], "Layer 2, head 1")
    assert words == "Layer 2, head 1. Each token looks most: ·fox at ·fox (70%), ·ran at The (60%)."


def test_a_slider_goes_through_the_heads_and_says_where_each_looks():
    weights = np.tril(np.random.default_rng(0).random((3, 4, 4)))
    patterns = dict(zip(("one", "two", "three"), weights))
    tokens = ["the", "·cat", "·sat", "."]
    slider, view, still = pattern_slider(patterns, tokens).children
    seen, times = set(), []
    for name in ("two", "three", "one"):
        started = time.perf_counter()
        slider.value = name
        times.append(time.perf_counter() - started)
        (output,) = view.outputs
        seen.add(output["data"]["image/png"])
        assert output["data"]["text/plain"] == pattern_words(patterns[name], tokens, name)
    assert len(seen) == 3
    # they were drawn before
    assert min(times[:2]) < 0.1
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
    texts = ["The fox and the ball and the " * 6 + end for end in ("fox", "day", "dog", "a", "b")]
    changes = {box: texts, layers: [2, 3, 4, 3, 2], heads: [2, 3, 4, 3, 2]}
    for control, values in changes.items():
        moves = [partial(setattr, control, "value", value) for value in values]
        assert charts_per_move(moves) < 1, control.description


@pytest.mark.parametrize("text", ["", " ", "🐈 日本", "word " * 500])
def test_any_text_has_a_picture(explorer, text):
    explorer.children[0].value = text
    output = shown(explorer)
    size = Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"]))).size
    assert size == tuple(2 * output["metadata"]["image/png"][name] for name in ("width", "height"))
    assert size[0] < 2 * (MOST_TOKENS + 14) * CELL


def test_where_nobody_can_move_it_three_heads_are_shown(story):
    from ipywidgets import Widget
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    explorer = attention_explorer(*story, SENTENCE, layer=2, head=3)
    state = Widget.get_manager_state(widgets=None)["state"]
    view = {WIDGET_VIEW: {"model_id": explorer.model_id}, "text/plain": "VBox(…)"}
    cell = new_code_cell("explorer", outputs=[new_output("display_data", view)])
    notebook = new_notebook(cells=[cell], metadata={"widgets": {WIDGET_STATE: {"state": state}}})
    words, *pictures = static_widgets(notebook).cells[0].outputs
    assert words.data["text/plain"] == f"Text: {SENTENCE}  Layer: 2  Head: 3"
    titles = [picture.data["text/plain"].split(".")[0] for picture in pictures]
    assert titles == ["Layer 2, head 3", "Layer 1, head 1", "Layer 4, head 4"]
