"""The workbook's documents and sources in a report: as pages, with links that stay inside it."""

from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from lib.tools.publish.documents import write_documents


@pytest.fixture
def book(tmp_path) -> Path:
    """A workbook, and a report with one page that links to its README."""
    for folder in ("lib/room", "artifacts", "report"):
        (tmp_path / folder).mkdir(parents=True)
    links = "[results](artifacts/r.md#top) [code](lib/room/x.py) [first](notebooks/01_a.ipynb)"
    others = "[second](notebooks/02_b.ipynb) [out](../secret.txt) ![a map](artifacts/map.svg) ![badge](https://x.y)"
    (tmp_path / "README.md").write_text(f"# Book\n\n{links} {others}")
    (tmp_path / "artifacts/r.md").write_text("---\nsecret: 1\n---\n# Top\n\n[back](../README.md)")
    (tmp_path / "artifacts/map.svg").write_text("<svg/>")
    (tmp_path / "artifacts/unlinked.md").write_text("never")
    (tmp_path / "lib/room/x.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "report/01_a.html").write_text('<a href="workbook/README.md.html">read</a>')
    write_documents(tmp_path / "report", tmp_path, ["01_a"])
    return tmp_path


def soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def test_what_pages_link_to_is_there_and_nothing_else(book):
    files = {path.relative_to(book / "report").as_posix() for path in book.glob("report/**/*.*")}
    names = {"README.md.html", "artifacts/r.md.html", "lib/room/x.py.html"}
    assert files == {"01_a.html", *(f"workbook/{name}" for name in names)}


def test_links_stay_in_the_report_from_any_depth(book):
    folder = book / "report/workbook"
    readme, results = soup(folder / "README.md.html"), soup(folder / "artifacts/r.md.html")
    assert [a["href"] for a in readme.main.p.select("a")] == [
        "../workbook/artifacts/r.md.html#top",
        "../workbook/lib/room/x.py.html",
        "../01_a.html",
    ]
    # pictures from elsewhere would ask the network
    assert [image["src"] for image in readme.select("img")] == [
        "data:image/svg+xml;base64,PHN2Zy8+"
    ]
    assert "badge" in readme.main.text
    assert "second (not in this report) out" in readme.main.text
    assert results.main.p.a["href"] == "../../workbook/README.md.html"
    assert results.header.a["href"] == "../../index.html"
    assert results.find(id="top")
    assert "secret" not in results.main.text


def test_a_source_file_has_numbered_lines_to_link_to(book):
    page = soup(book / "report/workbook/lib/room/x.py.html")
    assert page.h1.text == "lib/room/x.py"
    assert page.find(id="L-2")
    assert "b = 2" in page.pre.text
