"""Ways through a report: contents, neighbors, other places to open a notebook, search.

The search index holds the text of every page by section. It is a script file, since a page that is
opened from a disk may load no other kind of file; `templates/report.js` reads it when it is asked.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lib.core.files import write_atomically
from lib.tools.publish.cells import REPOSITORY, TEMPLATES

SCRIPT = "report.js"
INDEX = "search.js"
# Where a section begins on a page.
HEADING = re.compile(r'<h([1-4])\b[^>]*?\bid="([^"]+)"[^>]*>(.*?)</h\1>', re.DOTALL)
UNSEEN = re.compile(r"<(style|script|svg|header|nav)\b.*?</\1>", re.DOTALL)
ENDS_WORD = re.compile(r"</?(?:p|li|td|th|div|pre|summary|br|tr)\b[^>]*>")
# Of pages without sections, as of source files, the beginning is found.
BEGINNING = 1000


def contents(headings: Sequence[tuple[int, str, str]]) -> str:
    """Return the contents of a page from its headings: level, id, text.

    They are its sections, each with its exercises. The list is there twice, beside the page and
    folded on top; `page.css` shows the one that fits.
    """
    items = ""
    for level, at, text in headings:
        link = f'<a href="#{at}">{text}</a>'
        if level == 2:
            items += f"<li>{link}</li>"
        elif level == 3 and items and re.match(r"(Exercise|Puzzle) \d", text):
            items += f'<li class="exercise">{link}</li>'
    if not items:
        return ""
    listed = f"<ol>{items}</ol>"
    return (
        f'<nav class="contents" aria-label="Contents">{listed}</nav>'
        '<details class="contents"><summary>Contents</summary>'
        f'<nav aria-label="Contents of this page">{listed}</nav></details>'
    )


def neighbors(name: str, titles: Mapping[str, str]) -> list[dict[str, str] | None]:
    """Return link and title of the pages before and after that called `name`."""
    pages = [{"href": f"{page}.html", "title": title} for page, title in titles.items()]
    if name not in titles:
        return [None, None]
    index = list(titles).index(name)
    return [pages[i] if 0 <= i < len(pages) else None for i in (index - 1, index + 1)]


def doors(name: str) -> dict[str, str]:
    """Return where else the notebook called `name` can be opened: place -> address."""
    path = f"{REPOSITORY.removeprefix('https://github.com/')}/blob/main/notebooks/{name}.ipynb"
    return {
        "Colab": f"https://colab.research.google.com/github/{path}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src=https://github.com/{path}",
        "Codespaces": f"https://codespaces.new/{REPOSITORY.removeprefix('https://github.com/')}",
        "this run's notebook file": f"{name}.ipynb",
    }


def write_search(report: Path) -> None:
    """Write the script of the pages in `report`, and the index that it searches."""
    shutil.copyfile(TEMPLATES / SCRIPT, report / SCRIPT)
    pages = [path for path in sorted(report.rglob("*.html")) if path.name != "index.html"]
    index = [
        [path.relative_to(report).as_posix(), title, at, heading, text]
        for path in pages
        for title, at, heading, text in sections_of(path.read_text(encoding="utf-8"))
    ]
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    write_atomically(report / INDEX, f"window.SECTIONS = {text};\n")


def sections_of(page: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield title, id, heading and text of each section of a page; one of a page without any."""
    title = html.unescape(re.search(r"<title>(.*?)</title>", page, re.DOTALL)[1])  # type: ignore[index]
    body = UNSEEN.sub(" ", page.partition("<body>")[2])
    headings = list(HEADING.finditer(body))
    if not headings:
        yield title, "", title, _text(body)[:BEGINNING]
    ends = [heading.start() for heading in headings[1:]] + [len(body)]
    for heading, end in zip(headings, ends):
        text = _text(heading[3]).removesuffix("#").strip()
        yield title, heading[2], text, _text(body[heading.end() : end])


def _text(markup: str) -> str:
    """Return the words of HTML, without its tags."""
    words = re.sub(r"<[^>]+>", "", ENDS_WORD.sub(" ", markup))
    return " ".join(html.unescape(words).split())
