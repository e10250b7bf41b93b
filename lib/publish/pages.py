"""Executed notebooks as web pages that open from a disk, without a network and without scripts.

A page is nbconvert's, changed by `templates/page.html`: formulas are MathML, widgets show what they
last showed, and light and dark follow the reader's system. Links lead to other pages of the report,
and to copies of the workbook's files in its folder `workbook/`, so that a report can be moved.
"""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import math_core
from jinja2 import FileSystemLoader, pass_context
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

from lib.core.files import write_atomically
from lib.publish.cells import static_widgets

TEMPLATES = Path(__file__).resolve().parent / "templates"
# Papermill marks a failed cell with this id, and adds a cell on top that links to it.
ERROR_ID = "papermill-error-cell"
# Browsers set a prime that is a superscript too small and too high: fonts raise it already.
PRIMED = re.compile(r"<msup>(<m[in]>[^<]*</m[in]><mo>[′″‴]</mo>)</msup>")


def write_page(
    notebook: NotebookNode,
    path: Path,
    *,
    source_folder: Path,
    titles: Mapping[str, str],
) -> None:
    """Write the executed `notebook` as a web page to `path`.

    Args:
        notebook: its `metadata.workbook` (see `lib.publish.run_notebooks`) gives the lines on top.
        source_folder: the notebook's folder in the workbook, for relative links and pictures.
        titles: name -> title of the report's pages in reading order; links to others are left out.
    """
    about = notebook.metadata.get("workbook", {})
    shown = static_widgets(notebook)
    # the page shows the error on top itself
    shown.cells = [cell for cell in shown.cells if f'href="#{ERROR_ID}"' not in cell.source]
    has_failed_cell = any(f'id="{ERROR_ID}"' in cell.source for cell in shown.cells)
    before, after = _neighbors(path.stem, titles)

    links = _Links(source_folder, path.parent, titles)
    exporter = _Exporter(
        links, extra_loaders=[FileSystemLoader(TEMPLATES)], template_file="page.html"
    )
    exporter.environment.globals.update(
        alt_text=_alt_text,
        before=before,
        after=after,
        note=page_note(about),
        error=about.get("error"),
        error_id=ERROR_ID if has_failed_cell else "",
    )
    metadata = {"name": title_of(notebook), "path": str(source_folder)}
    page, _ = exporter.from_notebook_node(shown, resources={"metadata": metadata})
    write_atomically(path, page)


def _neighbors(name: str, titles: Mapping[str, str]) -> list[dict[str, str] | None]:
    """Return link and title of the pages before and after that called `name`."""
    pages = [{"href": f"{page}.html", "title": title} for page, title in titles.items()]
    if name not in titles:
        return [None, None]
    index = list(titles).index(name)
    return [pages[i] if 0 <= i < len(pages) else None for i in (index - 1, index + 1)]


def _alt_text(output: NotebookNode) -> str:
    """Return what a picture shows: from its metadata, or the text that stands in for it."""
    text = output.data.get("text/plain", "")
    return output.metadata.get("image/png", {}).get("alt") or ("" if text.startswith("<") else text)


def title_of(notebook: NotebookNode) -> str:
    """Return the text of the notebook's first heading, without Markdown's marks."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#+ (.+)$", cell.source, re.M)):
            return re.sub(r"[*_`$]", "", found[1]).strip()
    return ""


def short_title(notebook: NotebookNode, name: str) -> str:
    """Return the notebook's title without its number; `name` if it has none."""
    return re.sub(r"^\d+\W+", "", title_of(notebook)) or name


def page_note(about: Mapping[str, Any]) -> str:
    """Return time, device, date and parameters of a run in a line."""
    if "finished" not in about:
        return ""
    parts = [local_date(about["finished"])]
    if about["status"] != "skipped":
        device = about.get("provenance", {}).get("device")
        parts = [f"{about['seconds']:.1f} s", *([device] if device else []), *parts]
    if about.get("parameters"):
        parts.append(f"parameters: {about['parameters']}")
    return " · ".join(parts)


def local_date(text: str) -> str:
    """Return an ISO date in words, in the local time zone."""
    return f"{datetime.fromisoformat(text).astimezone():%d %B %Y, %H:%M}" if text else ""


@dataclass(frozen=True)
class _Links:
    """Turns a notebook's links into those of its page."""

    source_folder: Path
    """The notebook's folder, directly in that of the workbook."""

    report: Path
    pages: Collection[str]

    def resolve(self, url: str) -> str | None:
        """Return where `url` leads on the page; None to a notebook without a page."""
        parts = urlsplit(url)
        if parts.scheme or parts.netloc or not parts.path:
            return url
        if found := re.fullmatch(r"([^/]+)\.ipynb", parts.path):
            page = parts._replace(path=f"{found[1]}.html").geturl()
            return page if found[1] in self.pages else None
        source = (self.source_folder / parts.path).resolve()
        root = self.source_folder.resolve().parent
        if not source.is_file() or not source.is_relative_to(root):
            return url
        return parts._replace(path=copy_into_report(source, root, self.report)).geturl()


def copy_into_report(source: Path, root: Path, report: Path) -> str:
    """Copy a file of the workbook at `root` into `report`; return its path there."""
    path = f"workbook/{source.relative_to(root).as_posix()}"
    (report / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, report / path)
    return path


class _Renderer(IPythonRenderer):
    """Markdown as HTML; `formula` decides what becomes of formulas."""

    links: _Links | None = None

    def formula(self, tex: str, *, display: bool) -> str:
        return mathml(tex, display=display)

    def inline_math(self, body: str) -> str:
        return self.formula(body, display=False)

    def block_math(self, body: str) -> str:
        return self.formula(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return self.formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", display=True)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        target = self.links.resolve(url) if self.links else url
        return text if target is None else super().link(text, target, title)

    def _html_embed_images(self, html: str) -> str:
        # its parser would close a <details> that ends in a later block
        return super()._html_embed_images(html) if "<img" in html else html


class _Exporter(HTMLExporter):
    """nbconvert's HTML exporter with our Markdown."""

    def __init__(self, links: _Links, **options: Any) -> None:
        super().__init__(embed_images=True, **options)
        self.links = links

    @pass_context
    def markdown2html(self, context: Mapping[str, Any], source: str) -> str:
        renderer = _Renderer(
            escape=False,
            attachments=context.get("cell", {}).get("attachments", {}),
            embed_images=True,
            path=str(self.links.source_folder),
            anchor_link_text="",
        )
        renderer.links = self.links
        return MarkdownWithMath(renderer=renderer).render(source)


def mathml(tex: str, *, display: bool = False) -> str:
    """Return the formula `tex` as MathML, or its source, marked, if it cannot be converted."""
    try:
        formula = math_core.LatexToMathML().convert_with_local_state(tex, displaystyle=display)
        return PRIMED.sub(r"<mrow>\1</mrow>", formula)
    except math_core.LatexError:
        return f'<code title="no MathML for this formula">{html.escape(tex)}</code>'


def mathml_errors(markdown: str) -> list[tuple[str, str]]:
    """Return the formulas in a Markdown cell that `mathml` cannot convert, each with the reason."""
    errors = []

    class Checker(_Renderer):
        def formula(self, tex: str, *, display: bool) -> str:
            try:
                math_core.LatexToMathML().convert_with_local_state(tex, displaystyle=display)
            except math_core.LatexError as error:
                reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[0]
                errors.append((tex, reason.removeprefix("Error: ")))
            return ""

    MarkdownWithMath(renderer=Checker(escape=False)).render(markdown)
    return errors
