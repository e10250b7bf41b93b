"""The look of the pages: colors readable in light and dark, and what scrolls, by keyboard too."""

import re

import pytest

from lib.core.files import ROOT
from lib.tools.publish.pages import TEMPLATES
from tests.core.contrast import contrast

CSS = (TEMPLATES / "look.css").read_text(encoding="utf-8")
COLORS = dict(zip(("light", "dark"), re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)))
# What is written, and on which of the two backgrounds.
TEXT = ["ink", "soft", "link", "done", "failed", "skipped"]
TEXT += ["keyword", "string", "number", "comment"]


@pytest.mark.parametrize("scheme", COLORS)
def test_text_stands_out_from_both_backgrounds(scheme):
    colors = dict(re.findall(r"--([a-z]+): (#\w+)", COLORS[scheme]))
    for name in TEXT:
        for behind in ("page", "card"):
            assert contrast(colors[name], colors[behind]) >= 4.5, f"{name} on {behind}"


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
