"""The reader's copies of the notebooks, in `work/`: made once, and updated without losing answers.

`python -m lib notebooks copy`, which `make lab` runs first. The reader works
on these copies alone, so nothing in a reader's session needs git.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from lib.core.files import ROOT, make_folder, write_atomically
from lib.publish.run_notebooks import find_notebooks

NOTE = "**New version of the cell above**, which you have changed; yours stays until you delete it."


def update_copies(root: Path = ROOT) -> int:
    """Make or update the copy of each notebook in `work/`, and print what was done; return 0.

    A copy that the reader has not changed is replaced by a new version of its notebook. One that
    the reader has changed is merged with it, cell by cell, and kept in `work/.earlier/` as it was.
    """
    work = root / "work"
    record = work / ".origins.json"
    origins = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    made = 0
    make_folder(work)
    for source in find_notebooks((), root):
        copy, origin = work / source.name, origins.get(source.stem, {})
        is_new = not copy.exists()
        if not is_new and origin.get("notebook") == _sha256(source.read_bytes()):
            continue
        if is_new or origin.get("copy") == _sha256(copy.read_bytes()):
            shutil.copyfile(source, copy)
            untouched = _sha256(copy.read_bytes())
            made += is_new
            if not is_new:
                print(f"work/{source.name}: replaced by the new version; you had not changed it")
        else:
            # from now on the copy has something of the reader's
            untouched = None
            if not _merge_files(source, copy, origin.get("cells", {})):
                continue
        cells = nbformat.read(source, as_version=4).cells
        origins[source.stem] = {
            "notebook": _sha256(source.read_bytes()),
            "copy": untouched,
            "cells": {cell.id: _sha256(cell.source.encode()) for cell in cells},
        }
        write_atomically(record, json.dumps(origins, indent=1))
    if made:
        print(f"work/: {made} copied from notebooks/; what you do there is yours alone")
    return 0


def _merge_files(source: Path, copy: Path, base: Mapping[str, str]) -> bool:
    """Merge the new version at `source` into the reader's `copy`; return whether that worked."""
    new = nbformat.read(source, as_version=4)
    try:
        mine = nbformat.read(copy, as_version=4)
    except Exception as error:
        print(f"work/{copy.name}: is no notebook and stays as it is ({error}); delete it to get it")
        return False
    earlier = copy.parent / ".earlier" / f"{copy.stem}-{_sha256(copy.read_bytes())[:8]}.ipynb"
    make_folder(earlier.parent)
    shutil.copyfile(copy, earlier)
    merged = merge(mine.cells, new.cells, base)
    mine.cells = merged.cells
    write_atomically(copy, nbformat.writes(mine) + "\n")
    print(f"work/{copy.name}: merged with the new version; your cells kept: {merged.kept}")
    if merged.both:
        print(f"  {merged.both} of them changed there, too: the new version is below each")
    return True


class Merged(NamedTuple):
    """A reader's notebook with a new version of it."""

    cells: list[NotebookNode]

    kept: int
    """Cells that the reader has changed or added."""

    both: int
    """Of these, how many have changed in the new version, too; it is in a cell below."""


def merge(
    mine: Sequence[NotebookNode], new: Sequence[NotebookNode], base: Mapping[str, str]
) -> Merged:
    """Merge a reader's cells with a new version of the notebook, by the cells' ids.

    The order is that of the new version. A cell that the reader has not changed is updated, and
    keeps its outputs where its text is the same; one that the reader has changed, added or deleted
    stays changed, added or deleted.

    Args:
        base: id -> SHA-256 of the text, of the cells that the reader began with.
    """
    own = {cell.id: cell for cell in mine}
    is_mine = {cell.id for cell in mine if base.get(cell.id) != _sha256(cell.source.encode())}
    result, notes = [], {}
    for cell in new:
        before, has_changed = own.get(cell.id), base.get(cell.id) != _sha256(cell.source.encode())
        if before is None:
            # added to the notebook, or deleted by the reader
            result += [cell] if cell.id not in base else []
        elif before.source == cell.source:
            if cell.cell_type == before.cell_type == "code":
                cell.outputs, cell.execution_count = before.outputs, before.execution_count
            result.append(cell)
            is_mine.discard(cell.id)
        elif cell.id not in is_mine:
            result.append(cell)
        else:
            result.append(before)
            if has_changed:
                notes[cell.id] = note = _note(cell)
                # in place of an earlier one
                is_mine.discard(note.id)

    # the reader's own cells stay behind the cell that they followed
    anchor = None
    for cell in mine:
        places = {found.id: place for place, found in enumerate(result)}
        if cell.id in places:
            anchor = cell.id
        elif cell.id in is_mine:
            result.insert(places[anchor] + 1 if anchor else 0, cell)
            anchor = cell.id
    cells = [part for cell in result for part in (cell, notes.get(cell.id)) if part]
    return Merged(cells, len(is_mine), len(notes))


def _note(cell: NotebookNode) -> NotebookNode:
    """A Markdown cell that shows the new version of one that the reader has changed."""
    text = cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
    return new_markdown_cell(f"{NOTE}\n\n{text}", id=f"{cell.id}-new")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
