"""The reader's copies of the notebooks, in `work/`: made once, and updated without losing answers.

`python -m lib notebooks copy`, which `make lab` runs first. The reader works
on these copies alone, so nothing in a reader's session needs git. They have no outputs: those would
give away what the reader is asked to guess.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from lib.core.files import ROOT, make_folder, write_atomically
from lib.core.terminal import one_line
from lib.publish.run_notebooks import find_notebooks

NOTE = "**New version of the cell above**, which you have changed; yours stays until you delete it."


def update_copies(root: Path = ROOT) -> int:
    """Make or update the copy of each notebook in `work/`, and print what was done; return 0.

    A copy that the reader has not changed is replaced by a new version of its notebook. One that
    the reader has changed is merged with it, cell by cell, and kept in `work/.earlier/` as it was.
    """
    work = root / "work"
    make_folder(work)
    origins = _read_origins(work / ".origins.json")
    made = 0
    for source in find_notebooks((), root):
        copy, content = work / source.name, source.read_bytes()
        origin, is_new = origins.get(source.stem, {}), not copy.exists()
        if not is_new and not copy.is_file():
            print(f"work/{copy.name}: is no file and stays as it is; remove it to get a fresh one")
            continue
        if not is_new and origin.get("notebook") == _sha256(content):
            continue
        try:
            fresh = nbformat.writes(_without_outputs(content)).encode() + b"\n"
            new = with_ids(_without_outputs(content).cells, (), {})
        except ValueError as error:
            print(f"notebooks/{source.name}: is no notebook and is not copied ({error})")
            continue
        known = {cell.id: _key(cell) for cell in new}
        before = None if is_new else copy.read_bytes()
        if before in (None, fresh) or origin.get("copy") == _sha256(before):
            write_atomically(copy, fresh)
            untouched = _sha256(fresh)
            made += is_new
            if before not in (None, fresh):
                print(f"work/{source.name}: replaced by the new version; you had not changed it")
        else:
            # from now on the copy has something of the reader's
            untouched = None
            try:
                known |= _merge_into(copy, before, new, origin.get("cells", {}))
            except ValueError as error:
                reason = f"is no notebook and stays as it is ({error})"
                print(f"work/{copy.name}: {reason}; delete it to get a fresh one")
                continue
            except NotADirectoryError as error:
                print(f"work/{copy.name}: stays as it is, since {one_line(error)}")
                continue
        origins[source.stem] = {"notebook": _sha256(content), "copy": untouched, "cells": known}
        write_atomically(work / ".origins.json", json.dumps(origins, indent=1))
    if made:
        print(f"work/: {made} copied from notebooks/; what you do there is yours alone")
    return 0


def _read_origins(record: Path) -> dict[str, Any]:
    """Read from which notebook each copy came; nothing is known if the record is damaged."""
    if not record.exists():
        return {}
    try:
        origins = json.loads(record.read_bytes())
        for origin in origins.values():
            texts = [*origin["cells"].values(), origin["notebook"], origin.get("copy") or ""]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError
        return origins
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
        pass
    print(f"work/{record.name} is damaged: where a copy differs from its notebook, yours stays")
    return {}


def _parse(content: bytes) -> NotebookNode:
    """Read a notebook.

    Raises:
        ValueError: it is none, or has cells of an unknown form.
    """
    try:
        notebook = nbformat.reads(content.decode("utf-8"), as_version=4)
        for cell in notebook.cells:
            # some programs leave these out
            if cell.cell_type == "code":
                cell.setdefault("outputs", [])
                cell.setdefault("execution_count", None)
            _key(cell)
    # nbformat raises whatever comes up
    except Exception as error:
        raise ValueError(f"{error!r:.100}") from error
    return notebook


def _without_outputs(content: bytes) -> NotebookNode:
    """Read a notebook as it is before anything has run.

    Raises:
        ValueError: it is no notebook.
    """
    notebook = _parse(content)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def _merge_into(
    copy: Path, content: bytes, new: Sequence[NotebookNode], base: Mapping[str, str]
) -> dict[str, str]:
    """Merge the cells `new` into the reader's `copy`, which holds `content`.

    Returns:
        id -> key of the notes in it, for the record.
    """
    mine = _parse(content)
    write_atomically(copy.parent / f".earlier/{copy.stem}-{_sha256(content)[:8]}.ipynb", content)
    merged = merge(with_ids(mine.cells, new, base), new, base)
    # version 4.5 is the first with ids
    mine.cells, mine.nbformat_minor = merged.cells, max(5, mine.nbformat_minor)
    write_atomically(copy, nbformat.writes(mine) + "\n")
    print(f"work/{copy.name}: merged with the new version; your cells kept: {merged.kept}")
    if merged.both:
        print(f"  {merged.both} of them changed there, too: the new version is below each")
    return merged.notes


class Merged(NamedTuple):
    """A reader's notebook with a new version of it."""

    cells: list[NotebookNode]

    kept: int
    """Cells that the reader has changed or added."""

    both: int
    """The number of these that the new version changes, too; its text is in a cell below."""

    notes: dict[str, str]
    """id -> key of the cells with a new version, as `base` has them in the next merge."""


def with_ids(
    mine: Sequence[NotebookNode], new: Sequence[NotebookNode], base: Mapping[str, str]
) -> list[NotebookNode]:
    """Give the reader's cells ids where an editor saved them without.

    Colab keeps the id in the metadata. Otherwise a cell with the text of a known one gets its id.
    """
    by_key = {_key(cell): cell.id for cell in new} | {key: name for name, key in base.items()}
    used: set[str] = set()
    for cell in mine:
        in_metadata = cell.metadata.get("id")
        names = [cell.get("id"), in_metadata if in_metadata in by_key.values() else None]
        names += [by_key.get(_key(cell)), _new_id()]
        cell.id = next(name for name in names if name and name not in used)
        used.add(cell.id)
    return list(mine)


def merge(
    mine: Sequence[NotebookNode], new: Sequence[NotebookNode], base: Mapping[str, str]
) -> Merged:
    """Merge a reader's cells with a new version of the notebook, by the cells' ids.

    The order is that of the new version. A cell that the reader has not changed is updated, and
    keeps its outputs where its text is the same; one that the reader has changed, added or deleted
    stays changed, added or deleted.

    Args:
        base: id -> key of the cells that the reader began with, and of notes from earlier merges.
    """
    _free_changed_notes(mine, new, base)
    own = {cell.id: cell for cell in mine}
    is_mine = {cell.id for cell in mine if not _is_as(cell, base)}
    result, notes = [], {}
    for cell in new:
        before = own.get(cell.id)
        if before is None:
            # added to the notebook, or deleted by the reader, who may want the version in the note
            result += [cell] if cell.id not in base or _note_id(cell) in own else []
        elif _key(before) == _key(cell):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = before.outputs, before.execution_count
            result.append(cell)
            is_mine.discard(cell.id)
        elif cell.id not in is_mine:
            result.append(cell)
        else:
            result.append(before)
            # an earlier note is left out below, as a cell that is neither new nor the reader's
            if not _is_as(cell, base) or _note_id(cell) in own:
                notes[cell.id] = _note(cell)

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
    keys = {note.id: _key(note) for note in notes.values()}
    return Merged(cells, len(is_mine), len(notes), keys)


def _free_changed_notes(
    mine: Sequence[NotebookNode], new: Sequence[NotebookNode], base: Mapping[str, str]
) -> None:
    """Give a note that the reader has written into an id of its own; it is the reader's now."""
    note_ids = {_note_id(cell) for cell in new}
    for cell in mine:
        if cell.id in note_ids and not _is_as(cell, base):
            cell.id = _new_id()


def _note(cell: NotebookNode) -> NotebookNode:
    """A Markdown cell that shows the new version of one that the reader has changed."""
    text = cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
    return new_markdown_cell(f"{NOTE}\n\n{text}", id=_note_id(cell))


def _note_id(cell: NotebookNode) -> str:
    return f"{cell.id}-new"


def _key(cell: NotebookNode) -> str:
    """Return what tells whether a cell was changed: its kind, and the SHA-256 of its text."""
    return f"{cell.cell_type} {_sha256(cell.source.encode())}"


def _is_as(cell: NotebookNode, base: Mapping[str, str]) -> bool:
    """Whether a cell is as recorded in `base`; older records lack its kind."""
    return base.get(cell.id) in (_key(cell), _sha256(cell.source.encode()))


def _new_id() -> str:
    return uuid.uuid4().hex[:8]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
