"""The report as web pages: executed notebooks -> HTML that opens from a disk without any network.

Formulas become MathML, widgets the picture they last showed, so that a page needs no script; light
and dark follow the reader's system.
"""

from __future__ import annotations

import html
import os
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lib.files import write_atomically
from lib.notebook_cells import static_widgets
from lib.site_downloads import save_downloads
from lib.site_templates import PAGE_CSS, PAGE_TEMPLATE

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Papermill names the cell that failed so, and leads to it from a cell that it puts on top.
ERROR_ID = "papermill-error-cell"
# Browsers set a prime that is a superscript too small and too high: fonts have raised it already.
PRIMED = re.compile(r"<msup>(<m[in]>[^<]*</m[in]><mo>[′″‴]</mo>)</msup>")


def write_page(notebook: NotebookNode, path: Path, *, source_folder: Path) -> list[dict[str, str]]:
    """Write `notebook` as a web page to `path`, and its figures and tables beside it.

    Those come into the folder `<stem>_files`; returned is what `save_downloads` tells of them.

    Args:
        notebook: executed; `metadata.workbook` (see `lib.notebook`) gives the lines on top.
        source_folder: where the notebook stands, for its relative links and pictures.
    """
    from jinja2 import DictLoader

    exporter = _exporter_class()(
        extra_loaders=[DictLoader({"workbook.html.j2": PAGE_TEMPLATE})],
        template_file="workbook.html.j2",
        embed_images=True,
    )
    exporter.page_folder = path.parent
    exporter.source_folder = source_folder
    about = notebook.metadata.get("workbook", {})
    shown = static_widgets(notebook)
    # the page tells the error on top, and leads to the cell, itself
    shown.cells = [cell for cell in shown.cells if f'href="#{ERROR_ID}"' not in cell.source]
    exporter.environment.globals.update(
        page_css=PAGE_CSS,
        page_note=page_note(about),
        page_error=about.get("error"),
        error_id=ERROR_ID if any(f'id="{ERROR_ID}"' in cell.source for cell in shown.cells) else "",
    )
    downloads = save_downloads(shown, path.with_name(f"{path.stem}_files"))
    page, _ = exporter.from_notebook_node(
        shown,
        resources={"metadata": {"name": title_of(notebook), "path": str(source_folder)}},
    )
    write_atomically(path, page)
    return downloads


def _exporter_class() -> type:
    """nbconvert's HTML exporter with our Markdown; made late because nbconvert loads slowly."""
    from jinja2 import pass_context
    from nbconvert.exporters import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        page_folder: Path
        source_folder: Path

        def _html_embed_images(self, html: str) -> str:
            # The parser would close a <details> whose end stands in a later block.
            return super()._html_embed_images(html) if "<img" in html else html

        def inline_math(self, body: str) -> str:
            return mathml(body)

        def block_math(self, body: str) -> str:
            return mathml(body, display=True)

        def latex_environment(self, name: str, body: str) -> str:
            return mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display=True)

        def link(self, text: str, url: str, title: str | None = None) -> str:
            return super().link(text, page_link(url, self.source_folder, self.page_folder), title)

    class Exporter(HTMLExporter):
        page_folder: Path
        source_folder: Path

        @pass_context
        def markdown2html(self, context, source):
            renderer = Renderer(
                escape=False,
                attachments=context.get("cell", {}).get("attachments", {}),
                embed_images=True,
                path=str(self.source_folder),
                anchor_link_text="",
            )
            renderer.page_folder, renderer.source_folder = self.page_folder, self.source_folder
            return MarkdownWithMath(renderer=renderer).render(source)

    return Exporter


def mathml(tex: str, *, display: bool = False) -> str:
    """The formula `tex` as MathML; as its source, marked, where it cannot be converted."""
    import math_core

    try:
        formula = math_core.LatexToMathML().convert_with_local_state(tex, displaystyle=display)
        return PRIMED.sub(r"<mrow>\1</mrow>", formula)
    except math_core.LatexError:
        return f'<code title="no MathML for this formula">{html.escape(tex)}</code>'


def mathml_errors(markdown: str) -> list[tuple[str, str]]:
    """The formulas in a Markdown cell that `mathml` cannot convert, each with the reason."""
    import math_core
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    formulas: list[str] = []

    class Collector(IPythonRenderer):
        def _html_embed_images(self, html: str) -> str:
            # The parser would close a <details> whose end stands in a later block.
            return super()._html_embed_images(html) if "<img" in html else html

        def inline_math(self, body: str) -> str:
            formulas.append(body)
            return ""

        block_math = inline_math

        def latex_environment(self, name: str, body: str) -> str:
            return self.inline_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")

    MarkdownWithMath(renderer=Collector(escape=False)).render(markdown)
    errors = []
    for formula in formulas:
        try:
            math_core.LatexToMathML().convert_with_local_state(formula, displaystyle=True)
        except math_core.LatexError as error:
            reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[0]
            errors.append((formula, reason.removeprefix("Error: ")))
    return errors


def page_link(url: str, source_folder: Path, page_folder: Path) -> str:
    """A notebook's link as it must read on its page: other notebooks' pages, files of the tree."""
    parts = urlsplit(url)
    if parts.scheme or parts.netloc or not parts.path:
        return url
    if re.fullmatch(r"[^/]+\.ipynb", parts.path):
        return parts._replace(path=parts.path[: -len(".ipynb")] + ".html").geturl()
    path = os.path.relpath(source_folder / parts.path, page_folder)
    return parts._replace(path=Path(path).as_posix()).geturl()


def title_of(notebook: NotebookNode) -> str:
    """The text of the notebook's first heading, without Markdown's marks."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#+ (.+)$", cell.source, re.M)):
            return re.sub(r"[*_`$]", "", found[1]).strip()
    return ""


def page_note(about: dict[str, Any]) -> str:
    """Time, device, date and parameters of a run, in a line."""
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
    """An ISO date as people here read it, in their own time zone."""
    return f"{datetime.fromisoformat(text).astimezone():%d %B %Y, %H:%M}" if text else ""
