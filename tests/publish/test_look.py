"""The look of the pages: colors readable in light and dark, and what scrolls, by keyboard too."""

import re

import pytest

from lib.core.files import ROOT
from lib.publish.pages import TEMPLATES

CSS = (TEMPLATES / "look.css").read_text(encoding="utf-8")
COLORS = dict(zip(("light", "dark"), re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)))
# What is written, and on which of the two backgrounds.
TEXT = ["ink", "soft", "link", "done", "failed", "skipped"]
TEXT += ["keyword", "string", "number", "comment"]


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2.2, from a color like #123 or #112233."""
    digits = color.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", COLORS)
def test_text_stands_out_from_both_backgrounds(scheme):
    colors = dict(re.findall(r"--([a-z]+): (#\w+)", COLORS[scheme]))
    for name in TEXT:
        for behind in ("page", "card"):
            lights = sorted(luminance(colors[which]) for which in (name, behind))
            contrast = (lights[1] + 0.05) / (lights[0] + 0.05)
            assert contrast >= 4.5, f"{name} on {behind}: {contrast:.2f}"


@pytest.mark.parametrize("name", ["look.css", "page.css", "front_page.css", "document.html"])
def test_text_has_no_other_colors(name):
    css = (TEMPLATES / name).read_text(encoding="utf-8")
    used = set(re.findall(r"[^-]color: ([^;]+);", css))
    assert used <= {"inherit", *(f"var(--{text})" for text in TEXT)}


def test_what_scrolls_sideways_can_be_reached_by_keyboard():
    paths = [*(ROOT / "lib").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    elements = re.findall(r"<div [^>]*overflow-x[^>]*>", text)
    assert elements
    assert [element for element in elements if "tabindex" not in element] == []
