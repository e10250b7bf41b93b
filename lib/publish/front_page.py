"""The report's front page: the state, time and key figures of each notebook, and earlier runs.

A report is a folder that links only within itself: executed notebooks, their pages, `index.html`,
and copies of the files they link to. Before a run changes it, `keep_earlier_run` copies it whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from nbformat import NotebookNode

from lib.core.files import ROOT, claim_folder, is_claimed, write_atomically
from lib.lessons.notebook import KEY_FIGURES
from lib.publish.cells import read_notebook
from lib.publish.documents import write_documents
from lib.publish.links import FILES
from lib.publish.pages import TEMPLATES, local_date, page_note, short_title

REPORT = "a report"
EARLIER = "previous"
ABSENT = "not there"
# Earlier runs beyond these are removed, oldest first.
KEPT_RUNS = 5
# Links of the front page beside the notebooks.
GUIDES = {"readme": "README.md.html", "results": "artifacts/README.md.html"}
LABELS = {"done": "✓ done", "failed": "✗ failed", "skipped": "– not run"}


def write_front_page(
    report: Path, names: Sequence[str], *, root: Path = ROOT, newest: str | None = None
) -> Path:
    """Write `index.html` over the executed notebooks in `report`; return its path.

    Args:
        names: the notebooks to list, in order (`01_tokenizer`); those not there are left out.
        root: the workbook, whose documents that the pages link to are written, too.
        newest: for an earlier run, whose documents stay, the link to the newest one.
    """
    found = published(report, names)
    if newest is None:
        write_documents(report, root, found, also=GUIDES.values())
    pages = [_page(report, name) for name in found]
    guides = {name: f"{FILES}/{path}" for name, path in GUIDES.items()}
    shown = {
        "guides": {name: path for name, path in guides.items() if (report / path).is_file()},
        "summary": _summary(pages),
        "facts": _facts(pages),
        "earlier": _earlier_runs(report),
    }
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    template = environment.get_template("front_page.html")
    write_atomically(report / "index.html", template.render(pages=pages, newest=newest, **shown))
    return report / "index.html"


def published(report: Path, names: Iterable[str]) -> list[str]:
    """Return those of the notebooks `names` that are in `report`, page and notebook undamaged."""
    return [name for name in names if not _missing_or_damaged(report, name)]


def damaged(report: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the notebooks in `report` that something happened to, and what that is."""
    found = {name: _missing_or_damaged(report, name) for name in names}
    return {name: what for name, what in found.items() if what and what != ABSENT}


def _missing_or_damaged(report: Path, name: str) -> str:
    """Return what keeps the notebook `name` from being shown; empty for one that can be."""
    pair = [report / f"{name}{suffix}" for suffix in (".html", ".ipynb")]
    is_there = [path.is_file() for path in pair]
    if not all(is_there):
        return f"only {pair[is_there.index(True)].name} is there" if any(is_there) else ABSENT
    try:
        _page(report, name)
    # a file that anything may have been done to
    except Exception as error:
        return f"{error!r:.200}"
    return ""


def _page(report: Path, name: str) -> dict[str, Any]:
    """Return what the front page shows of a notebook."""
    notebook = read_notebook(report / f"{name}.ipynb")
    about = notebook.metadata.get("workbook", {})
    status = about.get("status", "skipped")
    return {
        "name": name,
        "number": name.split("_")[0],
        "title": short_title(notebook, name),
        "status": status,
        "label": LABELS[status],
        "note": page_note(about),
        "error": about.get("error"),
        "figures": key_figures_of(notebook),
        "records": about.get("records", []),
        "about": about,
    }


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
    """Return machine, versions and commit of the newest page, for the foot."""
    made = [page["about"] for page in pages if page["about"].get("provenance")]
    if not made:
        return []
    provenance = max(made, key=lambda about: about["finished"])["provenance"]
    versions = " · ".join(f"{name} {v}" for name, v in provenance["versions"].items() if v)
    commit = provenance["commit"] or "not in a git checkout"
    commit += " with uncommitted changes" if provenance["dirty"] else ""
    return [
        ("Device", provenance["device"]),
        ("Processor", f"{provenance['cpu']}, {provenance['cores']} cores"),
        ("Versions", versions),
        ("System", provenance["platform"]),
        ("Commit", commit),
    ]


def keep_earlier_run(report: Path, names: Sequence[str]) -> None:
    """Copy the report to `previous/DATE`, and remove the oldest of those beyond `KEPT_RUNS`.

    DATE is when its newest notebook finished; a report that is there already stays. In `previous/`,
    folders that this program did not make stay, too.
    """
    finished = [
        read_notebook(report / f"{name}.ipynb").metadata.get("workbook", {})
        for name in published(report, names)
    ]
    if not finished:
        return
    newest = max(about.get("finished", "") for about in finished)
    # without the time zone, which is UTC, and without colons, which Windows refuses in names
    target = report / EARLIER / (newest.split("+")[0].replace(":", "-") or "unknown")
    # which is written last
    if not (target / "index.html").exists():
        claim_folder(target, REPORT, setting="report")
        others = shutil.ignore_patterns(EARLIER, ".*", "index.html")
        shutil.copytree(report, target, ignore=others, dirs_exist_ok=True)
        write_front_page(target, names, newest="../../index.html")
    for old in _earlier_folders(report)[KEPT_RUNS:]:
        shutil.rmtree(old)


def _earlier_runs(report: Path) -> list[dict[str, str]]:
    """Return link and date of each earlier run, newest first."""
    runs = []
    for folder in _earlier_folders(report):
        day, _, time = folder.name.partition("T")
        date = local_date(f"{day}T{time.replace('-', ':')}+00:00")
        runs.append({"href": f"{EARLIER}/{folder.name}/index.html", "date": date})
    return runs


def _earlier_folders(report: Path) -> list[Path]:
    """Return the reports that `keep_earlier_run` made, newest first."""
    dated = (report / EARLIER).glob("????-??-??T??-??-??")
    return sorted((path for path in dated if is_claimed(path, REPORT)), reverse=True)
