"""The front page over executed notebooks: their state, times, errors, key figures and records."""

import base64
import io
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from lib.lessons.notebook import KEY_FIGURES
from lib.tools.publish import front_page
from lib.tools.publish.cells import read_notebook
from lib.tools.publish.execute import execute
from lib.tools.publish.front_page import key_figures_of

NAMES = ["01_good", "02_bad"]
PROVENANCE = {
    "device": "CPU of a laptop",
    "cpu": "M9",
    "cores": 4,
    "versions": {"torch": "2.13", "triton": None},
    "platform": "Linux",
    "commit": "abc",
    "dirty": True,
}


def put(report: Path, name: str, *, day=1, figures=(), outputs=(), **about) -> None:
    """Put an executed notebook and its page into the report."""
    shown = new_output("display_data", {KEY_FIGURES: [list(pair) for pair in figures]})
    title = f"# {name[:2]} · About `{name[3:]}`\n\n- **You will build** a\n  `thing`.\n"
    opening = new_markdown_cell(f"{title}- **It takes** an hour.\n- **It needs** nothing.")
    cells = [opening, new_code_cell("", outputs=[shown, *outputs])]
    finished = f"2026-01-{day:02}T10:00:00+00:00"
    about = {"status": "done", "seconds": 2.0, "finished": finished, "error": None} | about
    about |= {"provenance": PROVENANCE, "parameters": ""}
    report.mkdir(exist_ok=True)
    metadata = {"workbook": about}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), report / f"{name}.ipynb")
    (report / f"{name}.html").write_text(f"<title>{name}</title><body>page of day {day}</body>")


def write_front_page(report: Path, names) -> Path:
    """The front page of a report in a workbook without documents, or with those beside it."""
    return front_page.write_front_page(report, names, root=report.parent)


def soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@pytest.fixture
def report(tmp_path) -> Path:
    """A report with a notebook that is done and one that failed."""
    report = tmp_path / "report"
    figures = [("tokens/s", "12,346"), ("kernel", "<sdpa>")]
    (report / "workbook").mkdir(parents=True)
    (report / "workbook/r.csv").write_text("a\n1\n")
    put(report, "01_good", figures=figures, records=["workbook/r.csv"])
    put(report, "02_bad", status="failed", error="In [3]: ZeroDivisionError: <division>")
    return report


def test_the_front_page_shows_state_time_error_key_figures_and_records(report):
    page = soup(write_front_page(report, NAMES))
    good, bad = page.select("ol.pages > li")
    assert page.select_one(".summary").text == "2 notebooks · 1 done · 1 failed"
    assert good.select_one(".title a")["href"] == "01_good.html"
    assert good.select_one(".title").text.split() == ["01", "About", "good"]
    assert [p.text for p in good.select("p")[:2]] == [
        "You will build a thing.",
        "It takes an hour.",
    ]
    assert [e.select_one(".status").text for e in (good, bad)] == ["✓ done", "✗ failed"]
    assert good.details.p.text.startswith("2.0 s · CPU of a laptop · 01 January 2026")
    shown = {dt.text: dt.find_next("dd").text for dt in good.select("dt")}
    assert shown == {"tokens/s": "12,346", "kernel": "<sdpa>"}
    assert bad.pre.text == "In [3]: ZeroDivisionError: <division>"
    (link,) = good.select("details a[download]")
    assert (link["href"], link.text) == ("workbook/r.csv", "r.csv")
    facts = page.select("dl.facts dd")
    assert facts[0].text.startswith("01 January 2026")
    assert [fact.text for fact in facts[1:]] == [
        "CPU of a laptop",
        "M9, 4 cores",
        "torch 2.13",
        "Linux",
        "abc with uncommitted changes",
    ]
    assert not page.select("h2")


def test_the_front_page_says_what_this_is_and_leads_to_readme_and_results(report):
    (report.parent / "artifacts").mkdir()
    (report.parent / "artifacts/README.md").write_text("# Results")
    (report.parent / "README.md").write_text("# Book\n\n## Results\n\n[all](artifacts/README.md)")
    page = soup(write_front_page(report, NAMES))
    assert "language model" in page.h1.text
    assert "notebooks of a workbook" in page.p.text
    for link in page.select("main > p a"):
        path, _, at = link["href"].partition("#")
        assert not at or soup(report / path).find(id=at)
        assert (report / path).is_file()
    assert len(page.select("main > p a")) == 3


def test_the_front_page_shows_the_path_and_the_first_figure_of_each_notebook(report):
    png = io.BytesIO()
    Image.new("RGB", (900, 500), "red").save(png, "PNG")
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": "a red field"}
    put(report, "01_good", outputs=[new_output("display_data", data)])
    (report.parent / "artifacts").mkdir()
    (report.parent / "artifacts/map.svg").write_text("<svg/>")
    page = soup(write_front_page(report, NAMES))
    assert (report / page.select_one("img.map")["src"]).read_text() == "<svg/>"
    (thumbnail,) = page.select("img.thumbnail")
    assert thumbnail["alt"] == "a red field"
    small = Image.open(io.BytesIO(base64.b64decode(thumbnail["src"].split(",")[1])))
    assert small.size == (416, 231)


def test_key_figures_are_shown_and_kept_in_their_order(make_notebook, tmp_path):
    cell = (
        "from lib.lessons.notebook import key_figures\n"
        "key_figures(tokens_per_s=12345.6, bits_per_byte=0.25312, device='x')"
    )
    first = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[3])!r})"
    path = make_notebook(tmp_path / "01_x.ipynb", "", cell, first=first)
    nbformat.write(execute(read_notebook(path), tmp_path), path)
    executed = read_notebook(path)
    expected = [("tokens/s", "12,346"), ("bits per byte", "0.253"), ("device", "x")]
    assert key_figures_of(executed) == expected
    assert executed.cells[3].outputs[0].data["text/plain"] == (
        "Key figures. tokens/s: 12,346 · bits per byte: 0.253 · device: x"
    )
