"""Executed notebooks as web pages that open from a disk, without a network.

A page has nbconvert's cells in `templates/page.html`: formulas are MathML, widgets show what they
last showed, and light and dark follow the reader's system. It reads well without its one script,
which adds search, copy buttons and the mark in the contents. Links stay in the report
(`lib.tools.publish.links`), so that it can be mailed.
"""

from __future__ import annotations

import base64
import html
import io
import mimetypes
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import math_core
from jinja2 import FileSystemLoader, pass_context
from nbconvert.exporters import HTMLExporter, TemplateExporter
from nbconvert.filters import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.filters.widgetsdatatypefilter import WidgetsDataTypeFilter
from nbformat import NotebookNode
from PIL import Image

from lib.core.files import write_atomically
from lib.tools.publish.cells import TEMPLATES, static_widgets
from lib.tools.publish.links import Links
from lib.tools.publish.navigation import contents, doors, neighbors

# Browsers set a prime that is a superscript too small and too high: fonts raise it already.
PRIMED = re.compile(r"<msup>(<m[in]>[^<]*</m[in]><mo>[′″‴]</mo>)</msup>")
# A formula in a line with more TeX than this may be wider than a phone.
LONG_FORMULA = 30
# Where the table of contents goes, which is known once the cells have been rendered.
CONTENTS_MARK = "<!-- contents -->"
# Highlighted words that `look.css` gives no color: half of a page's markup.
PLAIN_WORD = re.compile(r'<span class="(?:n\w*|o|p|w|b\w|err)">([^<]*)</span>')


def write_page(
    notebook: NotebookNode,
    path: Path,
    *,
    source_folder: Path,
    titles: Mapping[str, str],
) -> None:
    """Write the executed `notebook` as a web page to `path`.

    Args:
        notebook: its `metadata.workbook`, which `run_notebooks.keep` writes, gives the
            lines on top.
        source_folder: the notebook's folder in the workbook, for relative links and pictures.
        titles: name -> title of the report's pages in reading order; links to others are left out.
    """
    about = notebook.metadata.get("workbook", {})
    shown = static_widgets(notebook)
    before, after = neighbors(path.stem, titles)

    links = Links(source_folder, source_folder.parent, titles)
    exporter = _Exporter(
        links, extra_loaders=[FileSystemLoader(TEMPLATES)], template_file="page.html"
    )
    exporter.environment.globals.update(
        alt_text=alt_text,
        picture=_picture,
        up="",
        before=before,
        after=after,
        doors=doors(path.stem),
        extra=_extra(shown),
        note=page_note(about),
        error=about.get("error"),
        # as nbconvert calls it
        error_id=f"cell-id={about['cell']}" if about.get("cell") else "",
        contents_mark=CONTENTS_MARK,
    )
    metadata = {"name": title_of(notebook), "path": str(source_folder)}
    page, _ = exporter.from_notebook_node(shown, resources={"metadata": metadata})
    page = accessible(PLAIN_WORD.sub(r"\1", page))
    write_atomically(path, page.replace(CONTENTS_MARK, contents(exporter.headings), 1))


def accessible(page: str) -> str:
    """Return HTML whose code can be scrolled with keys, and whose headers of tables have text."""
    page = page.replace("<pre>", '<pre tabindex="0">')
    return re.sub(r"<th\b([^>]*)>\s*</th>", r"<td\1></td>", page)


def alt_text(output: NotebookNode) -> str:
    """Return what a picture shows: from its metadata, or the text that stands in for it."""
    text = output.data.get("text/plain", "")
    return output.metadata.get("image/png", {}).get("alt") or ("" if text.startswith("<") else text)


def _picture(output: NotebookNode) -> str:
    """Return a PNG of a notebook as the address of the same picture in a third of the bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
    return webp(image, lossless=True, quality=30, method=1)


def webp(image: Image.Image, **options: Any) -> str:
    """Return `image` as an address that holds it."""
    file = io.BytesIO()
    image.save(file, "WEBP", **options)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _extra(notebook: NotebookNode) -> str | None:
    """Return the id of the cell `# Extra`, after which nothing is needed later; None without it."""
    found = (cell for cell in notebook.cells if re.match(r"# Extra\b", cell.source))
    return next((cell.get("id") for cell in found if cell.cell_type == "markdown"), None)


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
    parameters = about["parameters"] and f"parameters: {about['parameters']}"
    device, date = about["provenance"]["device"], local_date(about["finished"])
    return " · ".join(filter(None, (f"{about['seconds']:.1f} s", device, date, parameters)))


def local_date(text: str) -> str:
    """Return an ISO date in words, in the local time zone."""
    return f"{datetime.fromisoformat(text).astimezone():%d %B %Y, %H:%M}" if text else ""


class Renderer(IPythonRenderer):
    """Markdown as HTML: formulas as MathML, links within the report, headings with anchors."""

    def __init__(self, links: Links | None = None, **options: Any) -> None:
        super().__init__(escape=False, anchor_link_text="#", embed_images=True, **options)
        self.links = links
        # level, id and text of each
        self.headings: list[tuple[int, str, str]] = []
        # formulas that cannot be converted, and why
        self.errors: list[tuple[str, str]] = []

    def formula(self, tex: str, *, display: bool) -> str:
        """Return a formula as MathML, or its source, marked, if it cannot be converted."""
        try:
            formula = mathml(tex, display=display)
        except math_core.LatexError as error:
            reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[0]
            self.errors.append((tex, reason.removeprefix("Error: ")))
            formula = f'<code title="no MathML for this formula">{html.escape(tex)}</code>'
        if display:
            return f'<div class="scroll formula" tabindex="0">{formula}</div>'
        is_long = len(tex) > LONG_FORMULA
        return f'<span class="scroll" tabindex="0">{formula}</span>' if is_long else formula

    def inline_math(self, body: str) -> str:
        return self.formula(body, display=False)

    def block_math(self, body: str) -> str:
        return self.formula(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return self.formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", display=True)

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        heading = super().heading(text, level, **attrs)
        if found := re.search(r'\bid="([^"]+)"', heading):
            self.headings.append((level, found[1], re.sub("<[^>]+>", "", text)))
        return heading

    def table(self, text: str) -> str:
        return f'<div class="scroll" tabindex="0"><table>\n{text}</table></div>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        target = self.links.resolve(url) if self.links else url
        if target is not None:
            return super().link(text, target, title)
        notebook = re.search(r"(\d\d)_\w+\.ipynb", url)
        again = f"make run NOTEBOOKS={notebook[1]} adds it" if notebook else ""
        return f'{text} <span title="{again}">(not in this report)</span>' if again else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        # a picture from elsewhere would ask the network
        return text if "://" in url else super().image(text, url, title)

    def _src_to_base64(self, src: str) -> str | None:
        # nbconvert's takes nothing from above the notebook's folder; the limit is the workbook
        path = (self.links.source / src).resolve() if self.links else Path(src)
        if not (self.links and path.is_file() and path.is_relative_to(self.links.root.resolve())):
            return None
        data = base64.b64encode(path.read_bytes()).decode()
        return f"data:{mimetypes.guess_type(path)[0]};base64,{data}"

    def _html_embed_images(self, html: str) -> str:
        # its parser would close a <details> that ends in a later block
        return super()._html_embed_images(html) if "<img" in html else html


class _Exporter(HTMLExporter):
    """nbconvert's HTML exporter with our Markdown."""

    def __init__(self, links: Links, **options: Any) -> None:
        super().__init__(embed_images=True, **options)
        self.links = links
        self.headings: list[tuple[int, str, str]] = []

    def default_filters(self) -> Iterator[tuple[str, Callable]]:
        yield from super().default_filters()
        yield "highlight_code", Highlight2HTML(pygments_lexer="ipython3", parent=self)
        # no script draws widgets: of one inside another one's output it shows the text
        yield "filter_data_type", WidgetsDataTypeFilter(notebook_metadata={}, parent=self)
        # highlighted code is safe as it is, and nbconvert's parser takes long for marked words
        yield "clean_html", lambda code: PLAIN_WORD.sub(r"\1", code)

    def from_notebook_node(
        self, nb: NotebookNode, resources: dict[str, Any] | None = None, **options: Any
    ) -> tuple[str, dict[str, Any]]:
        # HTMLExporter would parse the page once more, to give pictures the texts that ours have
        resources = self._init_resources(resources)
        return TemplateExporter.from_notebook_node(self, nb, resources, **options)

    @pass_context
    def markdown2html(self, context: Mapping[str, Any], source: str) -> str:
        renderer = Renderer(
            self.links,
            attachments=context.get("cell", {}).get("attachments", {}),
            path=str(self.links.source),
        )
        rendered = MarkdownWithMath(renderer=renderer).render(source)
        self.headings += renderer.headings
        return rendered


def mathml(tex: str, *, display: bool = False) -> str:
    """Return the formula `tex` as MathML; math_core.LatexError says why if that cannot be."""
    formula = math_core.LatexToMathML().convert_with_local_state(tex, displaystyle=display)
    return PRIMED.sub(r"<mrow>\1</mrow>", formula)


def mathml_errors(markdown: str) -> list[tuple[str, str]]:
    """Return the formulas in a Markdown cell that have no MathML, each with the reason."""
    renderer = Renderer()
    MarkdownWithMath(renderer=renderer).render(markdown)
    return renderer.errors
