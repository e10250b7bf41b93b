"""The drawings of notebook 02: nothing overlaps or leaves its card, and all can be read aloud."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from lib.lessons.model.figures import (
    heads_svg,
    sharing_svg,
    show_differences,
    show_training,
    transformer_svg,
)

SVG = "{http://www.w3.org/2000/svg}"
# Of a letter of the body text and of a monospaced one, in pixels; wide ones.
LETTER, MONO = 7.2, 7.6


def boxes_of_texts(picture):
    """(text, left, right, middle height) of each text, by the width of its letters."""
    for text in picture.iter(f"{SVG}text"):
        width = len(text.text) * (MONO if text.get("class") == "shape" else LETTER)
        share = {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        left = float(text.get("x")) - share * width
        yield text.text, left, left + width, float(text.get("y"))


@pytest.mark.parametrize("draw", [transformer_svg, heads_svg, sharing_svg])
def test_words_stay_on_the_card_and_apart(draw):
    picture = ElementTree.fromstring(draw())
    width, height = map(float, picture.get("viewBox").split()[2:])
    texts = list(boxes_of_texts(picture))
    assert len(texts) > 8
    for text, left, right, y in texts:
        assert 0 <= left < right <= width + 8, text
        assert 0 < y < height, text
    for (a, left, right, y), (b, other_left, other_right, other_y) in itertools.combinations(
        texts, 2
    ):
        is_beside = right <= other_left + 8 or other_right <= left + 8
        assert is_beside or abs(y - other_y) >= 12, (a, b)


@pytest.mark.parametrize("draw", [transformer_svg, heads_svg, sharing_svg])
def test_a_card_is_opaque_and_has_words(draw):
    picture = ElementTree.fromstring(draw())
    assert len(picture.get("aria-label")) > 100
    card = picture.find(f"{SVG}rect")
    assert card.get("fill") == "#FBFAF7"
    assert card.get("width") == picture.get("viewBox").split()[2]


def test_shared_heads_have_as_many_lines_as_queries():
    assert len(re.findall("<line", sharing_svg())) == 3 * 4
    assert sharing_svg().count(">kv<") == 4 + 2 + 1


def test_differences_have_a_dot_for_each_seed(drawn):
    show_differences(
        [{"variant": "a", "costs": [0.1, 0.2, 0.3]}, {"variant": "b", "costs": [-1, 1, 0]}]
    )
    (axes,) = drawn[0].axes
    dots = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert dots == [[0.1, 0.2, 0.3], [-1, 1, 0]]
    # one whose sign depends on the seed has another color
    colors = {bar.get_facecolor() for bar in axes.patches}
    assert len(colors) == 2


def test_a_training_is_shown_as_a_mean_of_steps(drawn):
    show_training({"run": [float(i) for i in range(40)]}, {"bigram": 3.0})
    curve, level = drawn[0].axes[0].lines
    ends = curve.get_xydata()[[0, -1]].flatten()
    assert ends.tolist() == pytest.approx([20, 9.5, 40, 29.5])
    assert set(level.get_ydata()) == {3.0}
