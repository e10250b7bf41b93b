"""Sections that nothing later needs come last, and say so."""

import nbformat
import pytest

from lib.core.files import ROOT


def is_extra(cell: nbformat.NotebookNode) -> bool:
    return "extra" in cell.metadata.get("tags", ())


NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SECTIONS = {
    path.stem: [
        cell
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "markdown" and cell.source.startswith(("# ", "## "))
    ]
    for path in NOTEBOOKS
}
EXTRA = [name for name, cells in SECTIONS.items() if any(map(is_extra, cells))]


@pytest.mark.parametrize("name", EXTRA)
def test_extra_sections_come_last_and_are_tagged(name):
    tagged = [*map(is_extra, SECTIONS[name])]
    assert tagged == sorted(tagged)
    named = [cell.source.lstrip("# ").startswith("Extra") for cell in SECTIONS[name]]
    assert named == tagged
