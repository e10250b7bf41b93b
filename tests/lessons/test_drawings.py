"""The committed drawings: nothing overlaps or leaves its card, and all can be read aloud."""

import html
import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from lib.lessons.show import DRAWINGS, show_drawing

SVG = "{http://www.w3.org/2000/svg}"
# Of a letter of the body text, of a note and of a monospaced one, in pixels; wide ones.
LETTERS = {"note": 6.6, "head": 6.6, "shape": 7.6}
NAMES = sorted(path.stem for path in DRAWINGS.glob("*.svg"))


def boxes_of_texts(picture):
    """(text, left, right, middle height) of each upright text, by the width of its letters."""
    for text in picture.iter(f"{SVG}text"):
        if "transform" not in text.attrib:
            width = len(text.text) * LETTERS.get(text.get("class"), 7.2)
            share = {"middle": 0.5, "end": 1}.get(text.get("text-anchor"), 0)
            left = float(text.get("x")) - share * width
            yield text.text, left, left + width, float(text.get("y"))


@pytest.mark.parametrize("name", NAMES)
def test_words_stay_on_an_opaque_card_and_apart(name):
    picture = ElementTree.parse(DRAWINGS / f"{name}.svg").getroot()
    card = picture.find(f"{SVG}rect")
    assert card.get("fill") == "#FBFAF7"
    width, height = map(float, picture.get("viewBox").split()[2:])
    assert [float(card.get("width")), float(card.get("height"))] == [width, height]
    texts = list(boxes_of_texts(picture))
    assert len(texts) > 8
    for text, left, right, y in texts:
        assert 0 <= left < right <= width + 8, text
        assert 0 < y < height, text
    for a, b in itertools.combinations(texts, 2):
        is_beside = a[2] <= b[1] + 8 or b[2] <= a[1] + 8
        assert is_beside or abs(a[3] - b[3]) >= 12, (a[0], b[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_shown_as_an_image_with_its_words(name):
    shown = show_drawing(name).data
    # JupyterLab keeps the texts of tags that it takes out of a notebook it does not trust
    assert re.sub("<[^>]*>", "", shown) == ""
    (alt,) = re.findall(r'<img alt="([^"]{100,})"', shown)
    words = ElementTree.parse(DRAWINGS / f"{name}.svg").getroot().get("aria-label")
    assert html.unescape(alt) == words
