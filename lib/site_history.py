"""Earlier runs of the notebooks: their pages move aside when a new run puts its own in place."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from lib.files import make_folder, write_atomically

# Runs that are kept beside the newest pages; older ones are removed.
KEPT_RUNS = 5
FOLDER = "previous"
NOTEBOOK_PAGE = re.compile(
    r'(?<=<a )(?:href|data-page)="(?:\.\./\.\./)?(\d\d_\w+\.html)((?:#[^"]*)?)"'
)
PAGE_LINK = re.compile(r'(?<= href=")(?!\w+:|#|/)[^"#]+')


def set_aside(report: Path, name: str, run: str) -> None:
    """Move what is in `report` of the notebook `name` into the folder of the `run` that made it.

    Links of its page still lead to the same files, and to pages of the same run.
    """
    target = report / FOLDER / run
    make_folder(target)
    for path in (report / f"{name}.html", report / f"{name}.ipynb", report / f"{name}_files"):
        moved = target / path.name
        if path.suffix == ".html" and path.exists():
            write_atomically(moved, two_deeper(path.read_text(encoding="utf-8")))
            path.unlink()
        elif path.exists():
            shutil.rmtree(moved, ignore_errors=True)
            path.replace(moved)


def two_deeper(page: str) -> str:
    """The HTML of a page whose folder is now two levels below the one it was in."""
    # pages and downloads, whose links lead nowhere up, move along
    return PAGE_LINK.sub(lambda link: "../../" + link[0] if link[0][:3] == "../" else link[0], page)


def with_live_links(page: str, folder: Path, report: Path) -> str:
    """The HTML of a page in `folder`, whose links to other pages lead to those that there are.

    To the one in `folder`, else to the newest; a link to neither keeps its words, and its address
    as `data-page`, so that it can become one again.
    """

    def live(link: re.Match) -> str:
        name, place = link.groups()
        if (folder / name).exists():
            return f'href="{name}{place}"'
        if (report / name).exists():
            return f'href="../../{name}{place}"'
        return f'data-page="{name}{place}"'

    return NOTEBOOK_PAGE.sub(live, page)


def earlier_runs(report: Path) -> list[Path]:
    """The folders of earlier runs, the newest first; those beyond `KEPT_RUNS` are removed."""
    folders = sorted((p for p in (report / FOLDER).glob("*") if p.is_dir()), reverse=True)
    for old in folders[KEPT_RUNS:]:
        shutil.rmtree(old)
    return folders[:KEPT_RUNS]


def run_of(about: dict[str, Any]) -> str:
    """The name of the run that made a page, from its notebook's `metadata.workbook`."""
    started = about.get("run") or about.get("finished") or "unknown"
    return re.sub(r"[^\dA-Za-z-]+", "", started.split("+")[0].replace(":", "-"))
