"""The report's front page: what each notebook's run was like, and the runs before."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.files import write_atomically
from lib.notebook import KEY_FIGURES
from lib.site import local_date, page_note, title_of
from lib.site_history import earlier_runs, run_of, with_live_links
from lib.site_templates import INDEX_TEMPLATE

if TYPE_CHECKING:
    from nbformat import NotebookNode

MARKS = {"done": "✓ done", "failed": "✗ failed", "skipped": "– not run"}


def write_index(report: Path, names: list[str]) -> Path:
    """Write `report/index.html` over the executed notebooks there; return its path.

    Earlier runs, in folders of their own, get such a page too, and the oldest of them are removed.

    Args:
        names: the notebooks to list, in order (`01_tokenizer`); those not there are left out.
    """
    newest = _pages_in(report, names, report)
    runs = []
    for folder in earlier_runs(report):
        if moved := _pages_in(folder, names, report):
            runs.append(_write_earlier_run(folder, moved, newest))
    _write_front_page(report, newest, {"up": None, "runs": runs})
    return report / "index.html"


def _write_earlier_run(folder: Path, moved: list[dict], newest: list[dict]) -> dict[str, str]:
    """Write the front page of an earlier run; return what that of the newest says of it.

    Args:
        moved: its pages that a later run has replaced, in `folder`.
        newest: the pages above; those that are of this run are listed too.
    """
    still = [_two_up(page) for page in newest if run_of(page["about"]) == folder.name]
    pages = sorted(moved + still, key=lambda page: page["number"])
    _write_front_page(folder, pages, {"up": "../../index.html", "runs": []})
    summary = _summary(pages)
    if still:
        summary += f" · run again since: {', '.join(page['number'] for page in moved)}"
    return {
        "href": f"{folder.parent.name}/{folder.name}/index.html",
        "date": local_date(max(page["about"].get("finished", "") for page in pages)),
        "summary": summary,
    }


def _pages_in(folder: Path, names: list[str], report: Path) -> list[dict[str, Any]]:
    """What the front page tells of each page in `folder`; the pages are linked with another."""
    import nbformat

    pages = []
    for name in names:
        if not (folder / f"{name}.ipynb").exists() or not (folder / f"{name}.html").exists():
            continue
        notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        about = notebook.metadata.get("workbook", {})
        status = about.get("status", "skipped")
        pages.append(
            {
                "number": name.split("_")[0],
                "title": re.sub(r"^\d+\W+", "", title_of(notebook)) or name,
                "href": f"{name}.html",
                "notebook": f"{name}.ipynb",
                "status": status,
                "label": MARKS[status],
                "detail": page_note(about),
                "error": about.get("error"),
                "figures": key_figures_of(notebook),
                "downloads": about.get("downloads", []),
                "about": about,
            }
        )
    for place, page in enumerate(pages):
        before = pages[place - 1] if place else None
        after = pages[place + 1] if place + 1 < len(pages) else None
        _link_neighbours(folder / page["href"], before, after, report)
    return pages


def _two_up(page: dict[str, Any]) -> dict[str, Any]:
    """What a front page two folders below tells of `page`."""
    links = {kind: f"../../{page[kind]}" for kind in ("href", "notebook")}
    files = [file | {"href": f"../../{file['href']}"} for file in page["downloads"]]
    return page | links | {"downloads": files}


def _link_neighbours(path: Path, before: dict | None, after: dict | None, report: Path) -> None:
    """Put links to the pages before and after into the top of the page at `path`."""
    links = []
    if before:
        links.append(f'<a href="{before["href"]}">← {html.escape(before["title"])}</a>')
    if after:
        links.append(f'<a href="{after["href"]}">{html.escape(after["title"])} →</a>')
    old = path.read_text(encoding="utf-8")
    span = f'<span class="pages">{" ".join(links)}</span>'
    new = re.sub(r'<span class="pages">.*?</span>', lambda _: span, old, count=1)
    new = with_live_links(new, path.parent, report)
    if new != old:
        write_atomically(path, new)


def _write_front_page(folder: Path, pages: list[dict[str, Any]], more: dict[str, Any]) -> None:
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(INDEX_TEMPLATE)
    facts = _facts([page["about"] for page in pages])
    page = template.render(pages=pages, summary=_summary(pages), facts=facts, **more)
    write_atomically(folder / "index.html", page)


def key_figures_of(notebook: NotebookNode) -> list[tuple[str, str]]:
    """What an executed notebook has told `lib.notebook.key_figures`."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    told = [output.get("data", {}).get(KEY_FIGURES, []) for output in outputs]
    return [(name, value) for pairs in told for name, value in pairs]


def _summary(pages: list[dict[str, Any]]) -> str:
    counts = {mark: sum(page["status"] == mark for page in pages) for mark in MARKS}
    noun = "notebook" if len(pages) == 1 else "notebooks"
    parts = [f"{len(pages)} {noun}"] + [
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
