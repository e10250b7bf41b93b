"""`explorer`: what it shows, how often it draws, and what stays where nobody can move it.

All explorers of the lessons: their controls change what they show; stills where none moves.
"""

import base64
import functools
import html
import re

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lib.core.figures import house_figure
from lib.ddp.wrappers import wrap
from lib.lessons.ddp.explorers import network_explorer, ring_stepper
from lib.lessons.ddp.stack import Layers
from lib.lessons.explorer import explorer, figure_output, markup, picture
from lib.lessons.flash_attention.explorers import softmax_stepper
from lib.lessons.model.explorers import attention_explorer, rope_slider
from lib.lessons.show import merge_stepper
from lib.lessons.zero1.explorers import memory_explorer
from lib.tools.publish.cells import WIDGET_VIEW
from tests.lessons.stored import stored_outputs

pytestmark = pytest.mark.usefixtures("quick_ranks")


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


# Those of the lessons

SCORES = np.array([0.5, -1.0, 2.0, 1.5, 30.0, 2.5, -40.0])
VALUES = np.random.default_rng(0).normal(size=(7, 3))
MEMORY = ("own sizes", 8, "bfloat16 parameters", "zero1", 4, 256, "off")


def buckets(elements: int):
    return functools.partial(wrap, "flashddp", bucket_cap_mb=4 * elements / 2**20)


# explorer -> how to make it from a model and its tokenizer, and how many settings a page shows
EXPLORERS = {
    "merges": (lambda model, tokenizer: merge_stepper("the little fox", tokenizer), 5),
    "rotation": (lambda *story: rope_slider(), 3),
    "attention": (lambda *story: attention_explorer(*story, "One day, a fox found"), 2),
    "softmax": (lambda *story: softmax_stepper(SCORES, VALUES, tile=3), 4),
    "ring": (lambda *story: ring_stepper(np.arange(9).reshape(3, 3)), 2),
    "network": (lambda *story: network_explorer(buckets, Layers((10,) * 4, 1.0, 2.0)), 3),
    "memory": (lambda *story: memory_explorer(start=MEMORY), 1),
}


def shown(box) -> str:
    """What the explorer shows now: its picture or its markup."""
    (output,) = box.children[-2].outputs
    return output["data"].get("image/png", output["data"]["text/html"])


@pytest.mark.parametrize("name", EXPLORERS)
def test_each_control_changes_what_is_shown_and_a_page_has_stills(name, story):
    make, count = EXPLORERS[name]
    box = make(*story)
    # the first says where the controls stand
    stills = stored_outputs(box)[1:]
    assert len(stills) == count
    for still in stills:
        words = still.data["text/plain"]
        if "image/png" in still.data:
            assert still.metadata["image/png"]["alt"] == words
        assert len(words) > 10
    # the last two are the output and its stills; one may be a label, which says what runs
    for control in reversed(box.children[:-2]):
        before = shown(box)
        if hasattr(control, "options"):
            control.index = (control.index + 1) % len(control.options)
        elif hasattr(control, "min"):
            control.value = control.min
        elif control.description:
            control.value = "The fox found the ball."
        else:
            continue
        assert shown(box) != before, control.description
