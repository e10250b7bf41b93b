"""Small PNG files: charts have few colors, and a palette of them takes a third of the bytes."""

from __future__ import annotations

import io

MOST_COLORS = 32


def in_palette(png: bytes) -> bytes:
    """The same picture with a palette of at most 32 colors; `png` itself if that is no smaller.

    Texts in the file, such as its description, and its resolution stay. A picture with transparent
    pixels stays as it is.
    """
    from PIL import Image, PngImagePlugin

    image = Image.open(io.BytesIO(png))
    if image.mode == "P":
        return png
    if image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255):
        return png
    texts = PngImagePlugin.PngInfo()
    for name, text in getattr(image, "text", {}).items():
        texts.add_text(name, text)
    small, kept = io.BytesIO(), {name: image.info[name] for name in ("dpi",) if name in image.info}
    # no dithering, which would put dots into areas of one color
    coverage = Image.Quantize.MAXCOVERAGE  # rare colors, such as thin lines, keep their own
    # kmeans=1: each color of the palette is the mean of its pixels, so gray grid lines stay gray
    colors = image.convert("RGB").quantize(
        MOST_COLORS, coverage, kmeans=1, dither=Image.Dither.NONE
    )
    colors.save(small, "png", optimize=True, pnginfo=texts, **kept)
    return min(small.getvalue(), png, key=len)
