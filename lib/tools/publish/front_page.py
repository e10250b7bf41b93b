"""The report's front page: what each notebook builds, a picture of it, and how its run went.

A report is a folder that links only within itself: executed notebooks, their pages, `index.html`,
and copies of the files they link to.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from nbformat import NotebookNode
from PIL import Image

from lib.core.files import ROOT, write_atomically
from lib.lessons.notebook import KEY_FIGURES
from lib.tools.publish.cells import read_notebook
from lib.tools.publish.documents import write_documents
from lib.tools.publish.links import FILES, copy_into_report
from lib.tools.publish.navigation import write_search
from lib.tools.publish.pages import TEMPLATES, alt_text, local_date, page_note, short_title, webp

REPORT = "a report"
# Links of the front page beside the notebooks.
GUIDES = {"readme": "README.md.html", "results": "artifacts/README.md.html"}
MAP = "artifacts/map.svg"
# Pixels, twice the size shown.
THUMBNAIL = (416, 640)
LABELS = {"done": "✓ done", "failed": "✗ failed"}


def write_front_page(report: Path, names: Sequence[str], *, root: Path = ROOT) -> Path:
    """Write `index.html` over the executed notebooks in `report`; return its path.

    The documents of the workbook at `root` that pages link to are written, too, and the search.

    Args:
        names: the notebooks to list, in order (`01_tokenizer`).
    """
    write_documents(report, root, names, also=GUIDES.values())
    pages = [_page(report, name) for name in names]
    guides = {name: f"{FILES}/{path}" for name, path in GUIDES.items()}
    guides = {name: path for name, path in guides.items() if (report / path).is_file()}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    template = environment.get_template("front_page.html")
    shown = template.render(
        up="",
        pages=pages,
        guides=guides,
        map=copy_into_report(root / MAP, root, report) if (root / MAP).is_file() else None,
        summary=_summary(pages),
        facts=_facts(pages),
    )
    write_search(report)
    write_atomically(report / "index.html", shown)
    return report / "index.html"


def _page(report: Path, name: str) -> dict[str, Any]:
    """Return what the front page shows of a notebook."""
    notebook = read_notebook(report / f"{name}.ipynb")
    about = notebook.metadata["workbook"]
    status = about["status"]
    return {
        "name": name,
        "number": name.split("_")[0],
        "title": short_title(notebook, name),
        "promise": _told(notebook, "You will"),
        "takes": _told(notebook, "It takes"),
        "thumbnail": _thumbnail(notebook),
        "status": status,
        # reports of earlier releases also have notebooks that were skipped
        "label": LABELS.get(status, status),
        "note": page_note(about),
        "error": about.get("error"),
        "figures": key_figures_of(notebook),
        "records": about.get("records", []),
        "about": about,
    }


def _told(notebook: NotebookNode, beginning: str) -> str:
    """Return the first point of the notebook's opening that begins so, without Markdown's marks."""
    opening = notebook.cells[0].source if notebook.cells else ""
    found = re.search(rf"^- \*\*{beginning}.*?(?=\n- |\n\n|\Z)", opening, re.M | re.DOTALL)
    return " ".join(re.sub(r"[*`]", "", found[0].removeprefix("- ")).split()) if found else ""


def _thumbnail(notebook: NotebookNode) -> dict[str, str] | None:
    """Return address and text of the notebook's first figure, made small; None without one."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    for output in outputs:
        if png := output.get("data", {}).get("image/png"):
            image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
            image.thumbnail(THUMBNAIL)
            return {"src": webp(image, quality=70), "alt": alt_text(output) or "a figure"}
    return None


def key_figures_of(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Return what an executed notebook passed to `lib.lessons.notebook.key_figures`."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output.get("data", {}).get(KEY_FIGURES, []) for output in outputs]
    return [(name, value) for pairs in shown for name, value in pairs]


def _summary(pages: Sequence[dict[str, Any]]) -> str:
    parts = [f"{len(pages)} notebook{'s' * (len(pages) != 1)}"]
    for status, label in LABELS.items():
        if count := sum(page["status"] == status for page in pages):
            parts.append(f"{count} {label.split(' ', 1)[1]}")
    return " · ".join(parts)


def _facts(pages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return date, machine, versions and commit of the newest page, for the foot."""
    made = [page["about"] for page in pages if page["about"].get("provenance")]
    if not made:
        return []
    newest = max(made, key=lambda about: about["finished"])
    provenance = newest["provenance"]
    versions = " · ".join(f"{name} {v}" for name, v in provenance["versions"].items() if v)
    commit = provenance["commit"] or "not in a git checkout"
    commit += " with uncommitted changes" if provenance["dirty"] else ""
    return [
        ("Last tried", local_date(newest["finished"])),
        ("Device", provenance["device"]),
        ("Processor", f"{provenance['cpu']}, {provenance['cores']} cores"),
        ("Versions", versions),
        ("System", provenance["platform"]),
        ("Commit", commit),
    ]
