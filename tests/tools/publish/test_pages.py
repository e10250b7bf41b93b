"""A notebook as a page: formulas, pictures, errors, links and search, with nothing to fetch."""

import base64
import io
import json
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from lib.tools.publish.cells import REPOSITORY, WIDGET_STATE, WIDGET_VIEW
from lib.tools.publish.navigation import write_search
from lib.tools.publish.pages import (
    mathml,
    mathml_errors,
    page_note,
    short_title,
    title_of,
    write_page,
)

TITLES = {"01_a": "First", "02_b": "The <second>", "03_c": "Third"}


@pytest.fixture
def book(tmp_path) -> Path:
    (tmp_path / "lib/room").mkdir(parents=True)
    (tmp_path / "lib/room/x.py").write_text("code\n")
    (tmp_path / "data.csv").write_text("a\n1\n")
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def page_of(book: Path, *cells, name="02_b", widgets=None, **about) -> BeautifulSoup:
    """The page of a notebook with these cells, Markdown as text, and models of widgets."""
    cells = [new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    metadata = {"workbook": about, "widgets": {WIDGET_STATE: {"state": widgets or {}}}}
    content = new_notebook(cells=cells, metadata=metadata)
    path = book / f"report/{name}.html"
    write_page(content, path, source_folder=book / "notebooks", titles=TITLES)
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def test_links_lead_to_pages_and_to_copies_of_files_within_the_report(book):
    links = {
        "03_c.ipynb#loss": "03_c.html#loss",
        "../lib/room/x.py#line=0": "workbook/lib/room/x.py.html#L-1",
        "../data.csv": "workbook/data.csv",
        "#top": "#top",
        "https://example.org/a.ipynb": "https://example.org/a.ipynb",
    }
    page = page_of(book, " ".join(f"[text]({url})" for url in links))
    assert [a["href"] for a in page.select(".jp-Cell a")] == list(links.values())


def test_links_out_of_the_report_become_plain_text(book):
    (book.parent / "secret.txt").write_text("x")
    for url in ("04_d.ipynb", "../../secret.txt", "../lib/none.py", "../lib"):
        page = page_of(book, f"See [the fourth]({url}) one.")
        note = " (not in this report)" if url == "04_d.ipynb" else ""
        assert f"See the fourth{note} one." in page.main.text
        assert not page.select(".jp-Cell a")


def test_a_widget_inside_the_output_of_another_is_shown_as_text(book):
    views = [{WIDGET_VIEW: {"model_id": name}, "text/plain": f"the {name}"} for name in "ab"]
    inner, outer = (new_output("display_data", view) for view in reversed(views))
    model = {"model_name": "OutputModel", "state": {"outputs": [inner]}}
    models = {"a": model, "b": {"model_name": "ButtonModel", "state": {}}}
    page = page_of(book, new_code_cell("a", outputs=[outer]), widgets=models)
    assert "the b" in page.main.text


@pytest.mark.parametrize(
    ("name", "hrefs"),
    [
        ("01_a", ["02_b.html"]),
        ("02_b", ["01_a.html", "03_c.html"]),
        ("03_c", ["02_b.html"]),
        ("09_z", []),
    ],
)
def test_pages_lead_to_the_ones_before_and_after(book, name, hrefs):
    page = page_of(book, "# Title", name=name)
    assert [a["href"] for a in page.select("header nav a")] == ["index.html", *hrefs]
    assert {a["href"] for a in page.select("nav.next a")} == {"index.html", *hrefs}
    if name == "01_a":
        assert page.select("header nav a")[1].text == "The <second> →"


def test_the_contents_list_sections_with_their_exercises_and_lead_to_them(book):
    cells = ("# Title", "## 1. The `loop`\n\n### Deeper", "### Exercise 1 (core): run it", "## End")
    page = page_of(book, *cells)
    links = page.select("nav.contents a")
    assert [link.text for link in links] == ["1. The loop", "Exercise 1 (core): run it", "End"]
    kinds = [page.find(id=link["href"].removeprefix("#")).name for link in links]
    assert kinds == ["h2", "h3", "h2"]
    assert [a["href"] for a in page.select("details.contents a")] == [a["href"] for a in links]
    assert not page_of(book, "# Title").select(".contents")


def test_what_follows_the_heading_extra_is_folded_and_nothing_else(book):
    page = page_of(book, "# Title", "## Needed", "# Extra\n\nMore.", "## Extra 1. Beyond", "last")
    (fold,) = page.select("details.extra")
    assert [heading.name for heading in fold.select("h1, h2")] == ["h1", "h2"]
    assert "last" in fold.text
    assert "Needed" not in fold.text
    assert page.select("main > nav.next")
    assert not page_of(book, "# Title", "Extra").select("details.extra")


def test_a_page_has_doors_to_where_its_notebook_opens(book):
    doors = {a.text: a["href"] for a in page_of(book, "# Title").select("main > p.soft a")}
    path = REPOSITORY.removeprefix("https://github.com/") + "/blob/main/notebooks/02_b.ipynb"
    assert doors["Colab"] == f"https://colab.research.google.com/github/{path}"
    assert doors["Kaggle"].endswith(f"https://github.com/{path}")
    assert doors["this run's notebook file"] == "02_b.ipynb"
    assert len(doors) == 4


def test_the_search_index_has_every_section_of_every_page_as_text(book):
    report = book / "report"
    page_of(book, "# The *title*", "Intro &amp; more", "## Deep\n\n$x^2$ <b>word</b>", "# End")
    (report / "workbook").mkdir()
    text = "<title>x.py</title><body><header>no</header>" + "<pre>a &lt; b</pre>" * 999 + "</body>"
    (report / "workbook/x.py.html").write_text(text)
    write_search(report)
    assert (report / "report.js").is_file()
    found = (report / "search.js").read_text(encoding="utf-8")
    index = json.loads(found.removeprefix("window.SECTIONS = ").removesuffix(";\n"))
    sections = [section for section in index if section[0] == "02_b.html"]
    assert [at for _, _, at, _, _ in sections] == ["The-title", "Deep", "End"]
    assert [heading for _, _, _, heading, _ in sections] == ["The title", "Deep", "End"]
    assert sections[0][4] == "Intro & more"
    assert sections[1][4] == "x2 word"
    (source,) = [section for section in index if section[0] == "workbook/x.py.html"]
    assert source[4].startswith("a < b a < b")
    assert len(source[4]) <= 1000


def test_an_error_is_shown_on_top_once_and_leads_to_its_cell(book):
    failed = new_code_cell("{}['a']", id="failed")
    page = page_of(book, "text", failed, error="In [3]: <KeyError>", cell="failed")
    (top,) = page.select(".report-error")
    assert top.text.strip() == "In [3]: <KeyError>"
    assert page.find(id=top.a["href"].removeprefix("#"))
    # outside of all cells it leads nowhere
    (top,) = page_of(book, "# One", error="DeadKernelError: <kernel>").select(".report-error")
    assert top.text.strip() == "DeadKernelError: <kernel>"
    assert not top.select("a")


def test_a_picture_is_smaller_on_the_page_and_the_same_in_every_pixel(book):
    drawn = Image.effect_noise((40, 30), 60).convert("RGBA")
    png = io.BytesIO()
    drawn.resize((400, 300), Image.Resampling.NEAREST).save(png, "PNG", compress_level=0)
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": "noise"}
    output = new_output("display_data", data, metadata={"image/png": {"width": 200}})
    image = page_of(book, new_code_cell("plot()", outputs=[output])).img
    kind, shown = image["src"].split(";base64,")
    assert (kind, image["width"]) == ("data:image/webp", "200")
    assert len(shown) < len(data["image/png"]) / 3
    pixels = Image.open(io.BytesIO(base64.b64decode(shown))).convert("RGBA")
    assert pixels.tobytes() == Image.open(png).tobytes()


def test_a_picture_file_of_the_workbook_is_in_the_page_and_no_other(book):
    for path in (book / "lib/map.svg", book.parent / "secret.svg"):
        path.write_text("<svg/>")
    page = page_of(book, "![map](../lib/map.svg) ![other](../../secret.svg)")
    inside, outside = (image["src"] for image in page.select("img"))
    assert inside == "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()
    assert outside == "../../secret.svg"


def test_pictures_have_a_text_from_their_metadata_or_beside_them(book):
    png = io.BytesIO()
    Image.new("RGB", (1, 1)).save(png, "PNG")

    def picture(text, **metadata):
        data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": text}
        return new_output("display_data", data, metadata={"image/png": metadata})

    outputs = [picture("a loss"), picture("<Figure size 7>", alt='"a" & b')]
    page = page_of(book, new_code_cell("plot()", outputs=outputs))
    assert [image.get("alt") for image in page.find_all("img")] == ["a loss", '"a" & b']


def test_pages_hold_everything_but_the_report_s_one_script(book):
    fold = "<details>\n<summary>Hint</summary>\n\nHidden $x^2$.\n\n</details>"
    formulas = "$$\\frac{a}{b}$$\n\n\\begin{align}a &= b\\end{align}"
    latex = new_output("display_data", {"text/latex": "$a + b$"})
    page = page_of(book, fold, formulas, new_code_cell("1", outputs=[latex]))
    (script,) = page.select("script, link, iframe")
    assert script["src"] == "report.js"
    # without it nothing is shown that would not work
    assert page.search.has_attr("hidden")
    assert len(page.select("math")) == 4
    assert page.details.math
    styles = "".join(style.string for style in page.select("style"))
    assert "prefers-color-scheme: dark" in styles
    assert "url(http" not in styles
    assert "@import" not in styles


def test_what_may_be_wider_than_a_phone_scrolls_and_can_be_reached_with_keys(book):
    table = "| a | |\n|---|---|\n| 1 | 2 |"
    long = "a + b + c + d + e + f + g + h + i + j"
    page = page_of(book, "$$x^2$$", table, f"So ${long}$ and $y$.", "```python\nx = 1\n```")
    assert len(page.select("div.scroll[tabindex='0'] > math")) == 1
    assert len(page.select("span.scroll[tabindex='0'] > math")) == 1
    assert len(page.select("math")) == 3
    assert page.select_one(".scroll[tabindex='0'] > table")
    assert page.select_one("pre[tabindex='0']")
    boxes = new_output("display_data", {"text/html": "<b>wide</b>"})
    page_with_boxes = page_of(book, new_code_cell("show()", outputs=[boxes]))
    assert page_with_boxes.select_one(".scroll[tabindex='0'] > b")
    # a header without text is none
    assert [cell.text for cell in page.select("th")] == ["a"]


def test_a_prime_is_beside_its_letter():
    beside = "<mrow><mi>m</mi><mo>′</mo></mrow>"
    assert mathml("m'") == f"<math>{beside}</math>"
    power = mathml("e^{m - m'}")
    assert beside in power
    assert power.count("<msup>") == 1
    assert mathml("m^2") == "<math><msup><mi>m</mi><mn>2</mn></msup></math>"


def test_a_formula_without_mathml_is_shown_as_source_and_found_by_lint(book):
    page = page_of(book, r"Good $a_1$, bad $\nothing{a}$.")
    assert (len(page.select("math")), page.main.code.text) == (1, r"\nothing{a}")
    ((formula, reason),) = mathml_errors(r"Good $a_1$, bad $\nothing{a}$, a price of 5\$.")
    assert formula == r"\nothing{a}"
    assert "nothing" in reason


def test_a_title_is_the_first_heading_without_marks():
    cells = [new_code_cell("# no"), new_markdown_cell("text\n\n## 04 · `lib` *and* $x$\n# Later")]
    content = new_notebook(cells=cells)
    assert title_of(content) == "04 · lib and x"
    assert short_title(content, "04_x") == "lib and x"
    assert (title_of(new_notebook()), short_title(new_notebook(), "04_x")) == ("", "04_x")


def test_the_note_of_a_run_has_time_device_date_and_parameters():
    about = {"status": "done", "seconds": 1.26, "finished": "2026-11-22T07:15:13+00:00"}
    about |= {"provenance": {"device": "NVIDIA T4"}, "parameters": "kaggle"}
    first, *others = page_note(about).split(" · ")
    assert (first, others[0], others[-1]) == ("1.3 s", "NVIDIA T4", "parameters: kaggle")
    assert "November 2026" in others[1]
    assert page_note({}) == ""
