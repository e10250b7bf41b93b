"""The committed drawings can be read aloud, on a light and on a dark page."""

import html
import re
import xml.etree.ElementTree as ElementTree

import pytest

from lib.lessons.show import DRAWINGS, show_drawing

NAMES = sorted(path.stem for path in DRAWINGS.glob("*.svg"))


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_shown_as_an_image_on_a_card_with_its_words(name):
    shown = show_drawing(name).data
    # JupyterLab keeps the texts of tags that it takes out of a notebook it does not trust
    assert re.sub("<[^>]*>", "", shown) == ""
    (alt,) = re.findall(r'<img alt="([^"]{100,})"', shown)
    picture = ElementTree.parse(DRAWINGS / f"{name}.svg").getroot()
    assert html.unescape(alt) == picture.get("aria-label")
    # an opaque card below all of it
    card = picture.find("{http://www.w3.org/2000/svg}rect")
    size = [float(card.get(side)) for side in ("width", "height")]
    assert size == [float(length) for length in picture.get("viewBox").split()[2:]]
