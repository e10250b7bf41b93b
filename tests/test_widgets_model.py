"""Figures with sliders: what they show, how fast, and what stays where nobody can move them."""

import base64
import html
import re
from functools import partial

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lib.notebook_cells import WIDGET_STATE, WIDGET_VIEW, static_widgets
from lib.plots import house_figure
from lib.widgets_model import (
    draw_pattern,
    draw_rotation,
    draw_scale,
    figure_slider,
    picture_of,
    rope_slider,
    scale_slider,
)
from tests.drawing_time import charts_per_move

TOKENS = ["the", "·cat", "·sat"]
CAUSAL = np.tril(np.ones((3, 3))) / np.arange(1, 4)[:, None]


def draw_line(figure: Figure, value: float) -> None:
    axes = figure.subplots()
    axes.plot([0, value])
    axes.set(xlabel="x", ylabel="y", title=f"to {value}")


def sliders():
    return {
        "rope": rope_slider(),
        "scale": scale_slider(),
    }


@pytest.fixture(scope="module")
def built():
    return sliders()


NAMES = ("rope", "scale")


@pytest.mark.parametrize("name", NAMES)
def test_each_position_shows_a_picture_of_its_own(built, name):
    slider, view, _ = built[name].children
    seen = set()
    for option in list(slider.options)[:3]:
        slider.value = option
        data = view.outputs[0]["data"]
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
        seen.add(data["image/png"])
    assert len(seen) == 3


def test_a_new_picture_takes_as_long_as_a_chart(built):
    slider = built["rope"].children[0]
    moves = [partial(setattr, slider, "value", option) for option in slider.options[5:12]]
    assert charts_per_move(moves) < 1.5


@pytest.mark.parametrize("name", NAMES)
def test_where_nobody_can_move_it_several_pictures_are_shown(built, name):
    from ipywidgets import Widget

    state = Widget.get_manager_state(widgets=None)["state"]
    view = {WIDGET_VIEW: {"model_id": built[name].model_id}, "text/plain": "VBox(…)"}
    cell = new_code_cell("slider", outputs=[new_output("display_data", view)])
    metadata = {"widgets": {WIDGET_STATE: {"state": state}}}
    outputs = static_widgets(new_notebook(cells=[cell], metadata=metadata)).cells[0].outputs
    pictures = [output for output in outputs if "image/png" in output.data]
    assert len(pictures) == 3
    assert all(output.metadata["image/png"]["width"] > 300 for output in pictures)
    assert not any(WIDGET_VIEW in output.data for output in outputs)
    # the same picture a second time, for a running notebook alone
    assert not any("text/html" in output.data for output in pictures)


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_still_say_where_the_slider_stands(name):
    slider, view, others = sliders()[name].children
    words = [output["data"]["text/plain"] for output in (*view.outputs, *others.outputs)]
    assert len(set(words)) == 3
    assert words[0].startswith(f"{slider.description} {slider.options[0]}. ")


def test_a_picture_in_a_running_notebook_says_what_it_shows():
    with house_figure() as (figure, axes):
        axes.plot([0, 1])
        axes.set(xlabel="step", ylabel="loss", title='"a" < "b"')
        output = picture_of(figure, "Run 3")
    image = re.fullmatch(
        r'<img alt="([^"]*)" width="700" height="400" .*>', output["data"]["text/html"]
    )
    words = 'Run 3. "a" < "b": loss against step.'
    assert html.unescape(image[1]) == output["metadata"]["image/png"]["alt"] == words


def test_a_picture_is_drawn_only_once():
    drawn = []

    def draw(figure, value):
        drawn.append(value)
        draw_line(figure, value)

    slider = figure_slider(draw, {"a": 1, "b": 2}, description="letter", still=["a"]).children[0]
    for name in "bab":
        slider.value = name
    assert drawn == [1, 2]


@pytest.mark.parametrize(("values", "still"), [({}, ()), ({"a": 1}, ("b",))])
def test_a_reading_that_is_not_there_is_named(values, still):
    with pytest.raises(ValueError, match="still has"):
        figure_slider(draw_line, values, description="letter", still=still)


def test_no_figure_stays_open(built):
    assert not plt.get_fignums()


def arrows(figure: Figure) -> list[np.ndarray]:
    """(key's tip, query's tip) of each pair."""
    return [np.array([text.xy for text in axes.texts]) for axes in figure.axes]


def test_rotation_keeps_the_angle_between_query_and_key():
    scores = []
    for position in (0, 7, 30):
        figure = Figure()
        draw_rotation(figure, position, distance=5, head_dim=8, theta=100.0)
        tips = arrows(figure)
        assert len(tips) == 4
        scores.append(sum(key @ query for key, query in tips))
    expected = sum(np.cos(5 * 100.0 ** (-pair / 4)) for pair in range(4))
    assert np.allclose(scores, expected)


def test_each_pair_turns_at_its_own_speed():
    before, after = Figure(), Figure()
    draw_rotation(before, 0, head_dim=8, theta=100.0)
    draw_rotation(after, 1, head_dim=8, theta=100.0)
    for pair, (old, new) in enumerate(zip(arrows(before), arrows(after))):
        turn = np.angle(complex(*new[0]) / complex(*old[0]))
        assert turn == pytest.approx(100.0 ** (-pair / 4))


def test_the_legend_of_the_rotation_is_clear_of_the_circles_and_their_titles():
    with house_figure(width=8.4, height=3.5) as (figure, _):
        figure.clear()
        draw_rotation(figure, 3)
        figure.canvas.draw()
        legend = figure.legends[0].get_window_extent()
        assert not any(legend.overlaps(axes.get_tightbbox()) for axes in figure.axes)


def test_the_scale_keeps_softmax_soft():
    figure = Figure()
    draw_scale(figure, 1024)
    without, scaled = ([bar.get_height() for bar in axes.patches] for axes in figure.axes)
    assert sum(without) == pytest.approx(1)
    assert sum(scaled) == pytest.approx(1)
    assert max(without) > 0.9
    assert max(scaled) < 0.5


def test_a_pattern_names_its_tokens_and_axes():
    axes = Figure().subplots()
    draw_pattern(axes, CAUSAL, TOKENS)
    assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
    assert np.allclose(axes.images[0].get_array(), CAUSAL)
    assert axes.get_xlabel()
    assert axes.get_ylabel()
