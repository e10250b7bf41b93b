"""The workbook's documents and source files as pages of a report, as far as its pages link to them.

README.md becomes `workbook/README.md.html`, a source file a page with numbered lines; records are
copied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from nbconvert.filters.markdown_mistune import MarkdownWithMath
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from lib.core.files import write_atomically
from lib.tools.publish.links import FILES, PAGES, TARGET, Links, copy_into_report
from lib.tools.publish.pages import TEMPLATES, Renderer, accessible


def write_documents(
    report: Path, root: Path, pages: Collection[str], *, also: Iterable[str] = ()
) -> None:
    """Write each file of the workbook that a page of the report links to, and what that links to.

    Args:
        root: the workbook's folder.
        pages: names of the notebooks that have pages.
        also: further pages to write if the workbook has their sources, such as `README.md.html`.
    """
    waiting = {target for page in report.glob("*.html") for target in targets(page)}
    waiting.update(also)
    done: set[str] = set()
    while waiting - done:
        name = (waiting - done).pop()
        done.add(name)
        source = root / name.removesuffix(".html")
        if source.suffix in PAGES and source.is_file():
            page = report / FILES / name
            _write_document(source, page, root, pages)
            waiting |= targets(page)
        elif source.is_file():
            copy_into_report(source, root, report)


def targets(page: Path) -> set[str]:
    """Return the paths in `workbook/` that a page links to."""
    return set(TARGET.findall(page.read_text(encoding="utf-8")))


def _write_document(source: Path, page: Path, root: Path, pages: Collection[str]) -> None:
    """Write `source`, Markdown or code, as a page."""
    up = "../" * len(source.relative_to(root).parts)
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        links = Links(source.parent, root, pages, up)
        # a model card begins with settings for its site
        text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
        body = MarkdownWithMath(renderer=_Renderer(links)).render(text)
    else:
        body = highlight(
            text,
            get_lexer_for_filename(source.name),
            HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True),
        )
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    template = environment.get_template("document.html")
    name = source.relative_to(root).as_posix()
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, template.render(name=name, body=accessible(body), up=up))


class _Renderer(Renderer):
    """Markdown with anchors in lower case, as GitHub makes them of headings."""

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        heading = super().heading(text, level, **attrs)
        return re.sub(r'(id="|href="#)([^"]+)', lambda found: found[1] + found[2].lower(), heading)
