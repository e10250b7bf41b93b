"""Every explorer of the lessons: its controls change what it shows; stills where none moves."""

import functools

import numpy as np
import pytest

from lib.ddp.wrappers import wrap
from lib.lessons.ddp.explorers import network_explorer, ring_stepper
from lib.lessons.ddp.stack import Layers
from lib.lessons.flash_attention.explorers import softmax_stepper
from lib.lessons.model.explorers import attention_explorer, rope_slider
from lib.lessons.show import merge_stepper
from lib.lessons.zero1.explorers import memory_explorer
from tests.lessons.stored import stored_outputs

pytestmark = pytest.mark.usefixtures("quick_ranks")
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
    pictures = stored_outputs(box)[1:]
    assert len(pictures) == count
    for picture in pictures:
        words = picture.data["text/plain"]
        if "image/png" in picture.data:
            assert picture.metadata["image/png"]["alt"] == words
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
