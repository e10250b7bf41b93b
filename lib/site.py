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
from lib.site_templates import INDEX_TEMPLATE, PAGE_CSS, PAGE_TEMPLATE

if TYPE_CHECKING:
    from nbformat import NotebookNode

MARKS = {"done": "✓ done", "failed": "✗ failed", "skipped": "– not run"}


def write_page(notebook: NotebookNode, path: Path, *, source_folder: Path) -> None:
    """Write `notebook` as a web page to `path`.

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
    exporter.environment.globals.update(
        page_css=PAGE_CSS, page_note=_detail(about), page_error=about.get("error")
    )
    page, _ = exporter.from_notebook_node(
        static_widgets(notebook),
        resources={"metadata": {"name": title_of(notebook), "path": str(source_folder)}},
    )
    write_atomically(path, page)


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
        return math_core.LatexToMathML().convert_with_local_state(tex, displaystyle=display)
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


def write_index(folder: Path, names: list[str]) -> Path:
    """Write `folder/index.html` over the executed notebooks there; return its path.

    Args:
        names: the notebooks to list, in order (`01_tokenizer`); those not there are left out.
    """
    import nbformat
    from jinja2 import Environment

    pages, abouts = [], []
    for name in names:
        path = folder / f"{name}.ipynb"
        if not path.exists():
            continue
        notebook = nbformat.read(path, as_version=4)
        about = notebook.metadata.get("workbook", {})
        abouts.append(about)
        pages.append(
            {
                "number": name.split("_")[0],
                "title": re.sub(r"^\d+\W+", "", title_of(notebook)) or name,
                "href": f"{name}.html",
                "notebook": f"{name}.ipynb",
                "status": about.get("status", "skipped"),
                "label": MARKS[about.get("status", "skipped")],
                "detail": _detail(about),
                "error": about.get("error"),
            }
        )
    template = Environment(autoescape=True).from_string(INDEX_TEMPLATE)
    page = template.render(pages=pages, summary=_summary(abouts), facts=_facts(abouts))
    write_atomically(folder / "index.html", page)
    return folder / "index.html"


def title_of(notebook: NotebookNode) -> str:
    """The text of the notebook's first heading, without Markdown's marks."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#+ (.+)$", cell.source, re.M)):
            return re.sub(r"[*_`$]", "", found[1]).strip()
    return ""


def _detail(about: dict[str, Any]) -> str:
    if "finished" not in about:
        return ""
    finished = datetime.fromisoformat(about["finished"]).astimezone()
    parts = [f"{finished:%d %B %Y, %H:%M}"]
    if about["status"] != "skipped":
        parts.insert(0, f"{about['seconds']:.1f} s")
    if about.get("parameters"):
        parts.append(f"parameters: {about['parameters']}")
    return " · ".join(parts)


def _summary(abouts: list[dict[str, Any]]) -> str:
    counts = {mark: sum(about.get("status") == mark for about in abouts) for mark in MARKS}
    noun = "notebook" if len(abouts) == 1 else "notebooks"
    parts = [f"{len(abouts)} {noun}"] + [
        f"{count} {MARKS[mark].split(' ', 1)[1]}" for mark, count in counts.items() if count
    ]
    return " · ".join(parts)


def _facts(abouts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What made the newest page: machine, versions and commit, for the index's foot."""
    abouts = [about for about in abouts if about.get("provenance")]
    if not abouts:
        return []
    made = max(abouts, key=lambda about: about["finished"])["provenance"]
    versions = " · ".join(f"{name} {v}" for name, v in made["versions"].items() if v)
    commit = made["commit"] or "not in a git checkout"
    commit += " with uncommitted changes" if made["dirty"] else ""
    return [
        ("Device", made["device"]),
        ("Processor", f"{made['cpu']}, {made['cores']} cores"),
        ("Versions", versions),
        ("System", made["platform"]),
        ("Commit", commit),
    ]
