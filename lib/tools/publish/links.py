"""Where links lead in a report: to its pages, and to the workbook's files in its `workbook/`.

A report can be moved or mailed, so nothing links out of its folder. Pages only name their targets;
`lib.tools.publish.documents` writes what is named.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

FILES = "workbook"
# Files that become pages; others are copied.
PAGES = (".md", ".py", ".cu", ".cuh")
# Links to those files in a page.
TARGET = re.compile(rf'href="(?:\.\./)*{FILES}/([^"#?]+)')


@dataclass(frozen=True)
class Links:
    """Turns the relative links of a notebook or document into those of its page."""

    source: Path
    """The notebook's or document's folder."""

    root: Path
    """The workbook's folder."""

    pages: Collection[str]
    """Names of the notebooks that have pages."""

    up: str = ""
    """From the page's folder to that of the report: empty or `../` a few times."""

    def resolve(self, url: str) -> str | None:
        """Return where `url` leads on the page; None if it would lead out of the report."""
        parts = urlsplit(url)
        if parts.scheme or parts.netloc or not parts.path:
            return url
        source, root = (self.source / parts.path).resolve(), self.root.resolve()
        if source.suffix == ".ipynb" and source.parent.name == "notebooks":
            page = parts._replace(path=f"{self.up}{source.stem}.html").geturl()
            return page if source.stem in self.pages else None
        if source.is_dir():
            source /= "README.md"
        if not source.is_file() or not source.is_relative_to(root):
            return None
        path = f"{self.up}{FILES}/{source.relative_to(root).as_posix()}"
        if source.suffix in PAGES:
            path += ".html"
        # JupyterLab counts lines from 0, the page of a source file from 1
        line = re.fullmatch(r"line=(\d+)", parts.fragment)
        fragment = f"L-{int(line[1]) + 1}" if line else parts.fragment
        return parts._replace(path=path, fragment=fragment).geturl()


def copy_into_report(source: Path, root: Path, report: Path) -> str:
    """Copy a file of the workbook at `root` into `report`; return its path there."""
    path = f"{FILES}/{source.relative_to(root).as_posix()}"
    (report / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, report / path)
    return path
