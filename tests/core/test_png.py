"""Pictures in a palette are the same to look at, and smaller."""

import io

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from lib.core.png import in_palette


def png(image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, "png", **options)
    return file.getvalue()


def chart() -> Image.Image:
    """Bars of a few colors with a soft edge, as RGBA."""
    colors = np.full((200, 300, 4), 255, np.uint8)
    for number in range(5):
        colors[50:, 60 * number : 60 * number + 30, :3] = 40 * number, 90, 200 - 30 * number
        colors[49, 60 * number : 60 * number + 30, :3] = 128 + 20 * number
    return Image.fromarray(colors)


def test_a_chart_keeps_its_pixels_texts_and_resolution_and_is_smaller():
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Description", "Five bars – with a dash")
    before = png(chart(), pnginfo=texts, dpi=(144, 144))
    after = in_palette(before)
    assert len(after) < len(before)
    found = Image.open(io.BytesIO(after))
    assert np.array_equal(np.asarray(found.convert("RGBA")), np.asarray(chart()))
    assert found.text["Description"] == "Five bars – with a dash"
    assert found.info["dpi"] == pytest.approx((144, 144), abs=0.1)
    assert in_palette(after) == after


def test_a_picture_with_transparent_pixels_or_that_gets_no_smaller_stays():
    clear = chart()
    clear.putpixel((0, 0), (0, 0, 0, 0))
    assert in_palette(png(clear)) == png(clear)
    dot = png(Image.new("L", (1, 1)))
    assert in_palette(dot) == dot
