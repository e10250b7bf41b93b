"""The reader's copies of the notebooks, in `work/`: made once; what the reader changed is kept.

`python -m lib notebooks copy`, which `make lab` runs first. The reader works on these copies alone,
so nothing in a reader's session needs git. They have no outputs: those would give away what the
reader is asked to guess.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import nbformat

from lib.core.files import ROOT, make_folder, write_atomically
from lib.core.settings import check, settings
from lib.tools.publish.cells import read_notebook
from lib.tools.publish.plan import NEW, find_notebooks

RECORD = ".origins.json"
SOLUTION = re.compile(r"<details>\s*<summary>Solution</summary>.*?</details>\n*", re.DOTALL)


@settings
class CopyConfig:
    """Where the copies go, and what they have."""

    folder: Path = Path("work")
    """Folder in the workbook for the copies."""

    without_solutions: bool = False
    """Leave out the folded solutions, as for a class; hints stay."""


def copy_notebooks(config: CopyConfig, *, root: Path = ROOT) -> int:
    """Make or update the copy of each notebook in `work/`, and print what was done; return 0.

    A copy as it was given is replaced by a new version of its notebook. One with anything of the
    reader's stays, and the new version is put beside it: `01_tokenizer.new.ipynb`.
    """
    work = root / config.folder
    own = {root / name for name in ("notebooks", "lib", "tests", "")}
    check(config, "folder", work not in own, "a folder for copies, such as work")
    make_folder(work)
    given = _read_record(work / RECORD)
    made = 0
    for source in find_notebooks((), root):
        copy, beside = work / source.name, work / f"{source.stem}{NEW}.ipynb"
        fresh = _fresh(source, config.without_solutions)
        # versions as the workbook made them, which may be replaced
        ours = {given.get(source.stem), _sha256(fresh)}
        # also a link that leads nowhere: only then is there nothing to lose
        if not copy.exists():
            target, made = copy, made + 1
        elif given.get(source.stem) == _sha256(fresh):
            continue
        elif _is_one_of(copy, ours):
            target = copy
            if copy.read_bytes() != fresh:
                said = "replaced by the new version; you had not changed it"
                print(f"{work.name}/{copy.name}: {said}")
        elif beside.exists() and not _is_one_of(beside, ours):
            name = f"{work.name}/{beside.name}"
            print(f"{name}: has your changes, too; rename it to get the newest version")
            continue
        else:
            target = beside
            said = f"stays as you left it; the new version is {beside.name}"
            print(f"{work.name}/{copy.name}: {said}")
        write_atomically(target, fresh)
        given[source.stem] = _sha256(fresh)
        write_atomically(work / RECORD, json.dumps(given, indent=1))
    if made:
        print(f"{config.folder}/: {made} copied from notebooks/; what you do there is yours alone")
    return 0


def _read_record(path: Path) -> dict[str, str]:
    """Return notebook -> SHA-256 of the version last given; if none is known, copies stay."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


def _fresh(path: Path, without_solutions: bool) -> bytes:
    """Return the notebook at `path` as it is before anything has run."""
    notebook = read_notebook(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        elif without_solutions:
            cell.source = SOLUTION.sub("", cell.source).rstrip("\n")
    return nbformat.writes(notebook).encode() + b"\n"


def _is_one_of(path: Path, versions: set[str | None]) -> bool:
    """Whether `path` is a file with one of the contents whose SHA-256 are given."""
    return path.is_file() and _sha256(path.read_bytes()) in versions


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
