"""`explorer`: what it shows, how often it draws, and what stays where nobody can move it."""

import base64
import html
import re

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lib.core.figures import house_figure
from lib.lessons.explorer import explorer, figure_output, markup, picture
from lib.tools.publish.cells import WIDGET_VIEW
from tests.lessons.stored import stored_outputs


def draw_line(figure: Figure, **values) -> None:
    axes = figure.subplots()
    axes.plot([0, *map(float, values.values())])
    axes.set(xlabel="x", ylabel="y", title="a line")


def test_each_move_shows_another_picture():
    open_before = plt.get_fignums()
    box = explorer(picture(draw_line), width=[1, 2, 3], height={"low": 1, "high": 9})
    width, height, view, _ = box.children
    seen = {view.outputs[0]["data"]["image/png"]}
    for control, value in ((width, 2), (width, 3), (height, 9)):
        control.value = value
        seen.add(view.outputs[0]["data"]["image/png"])
    assert len(seen) == 4
    assert all(base64.b64decode(png).startswith(b"\x89PNG") for png in seen)
    assert plt.get_fignums() == open_before


def test_a_lone_slider_follows_the_hand_and_several_wait_until_let_go():
    alone = explorer(lambda a: markup("", str(a)), a=range(3))
    several = explorer(lambda a, b: markup("", ""), a=range(3), b=range(3))
    assert alone.children[0].continuous_update
    assert not several.children[0].continuous_update


def test_a_setting_is_drawn_once():
    drawn = []

    def draw(figure: Figure, letter: str) -> None:
        drawn.append(letter)
        draw_line(figure, size=1)

    slider = explorer(picture(draw), letter=["a", "b"], still=[("a",)]).children[0]
    for name in "bab":
        slider.value = name
    assert drawn == ["a", "b"]


def test_where_nobody_can_move_it_the_stills_follow_the_first_setting():
    box = explorer(picture(draw_line), start={"end": 2}, end=[1, 2, 3], still=[(2,), (3,)])
    said, *pictures = stored_outputs(box)
    assert said["data"]["text/plain"] == "end: 2"
    words = [output["data"]["text/plain"] for output in pictures]
    assert words == ["end 2. a line: y against x.", "end 3. a line: y against x."]
    assert all(output.metadata["image/png"]["width"] == 700 for output in pictures)
    # the picture is not stored a second time as HTML, which only a running notebook needs
    assert not any({WIDGET_VIEW, "text/html"} & output.data.keys() for output in pictures)


def test_alternative_text_is_escaped():
    with house_figure() as (figure, axes):
        axes.plot([0, 1])
        output = figure_output(figure, '"a" < "b"')
    image = re.fullmatch(
        r'<img alt="([^"]*)" width="700" height="400" .*>', output["data"]["text/html"]
    )
    assert html.unescape(image[1]) == output["metadata"]["image/png"]["alt"] == '"a" < "b"'


def test_a_control_without_options_is_refused_by_name():
    with pytest.raises(ValueError, match="letter must have at least one option"):
        explorer(picture(draw_line), letter=[])
