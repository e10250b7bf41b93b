"""A committed notebook as a page: its words, code and outputs, and all of it run with answers."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib
import nbformat

from lib.core.files import ROOT

FIRST_CELL = "# Find the workbook"


class Page(NamedTuple):
    cells: list
    prose: str
    """The Markdown cells on one line."""
    source: str
    """The code cells."""
    outputs: str
    """The printed texts."""

    def said(self, pattern: str) -> tuple[str, ...]:
        """The groups of a pattern that the prose has."""
        return found(pattern, self.prose)


def found(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that a text has."""
    match = re.search(pattern, text)
    assert match, pattern
    return match.groups()


def read_page(name: str) -> Page:
    cells = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4).cells
    texts = [c.source.replace("\n> ", "\n") for c in cells if c.cell_type == "markdown"]
    source = "\n".join(c.source for c in cells if c.cell_type == "code")
    outputs = "\n".join(out.get("text", "") for c in cells for out in c.get("outputs", ()))
    return Page(cells, " ".join("\n".join(texts).split()), source, outputs)


def run_page(
    cells: Sequence, answers: Mapping[str, Callable], monkeypatch, *, without: Sequence[str] = ()
) -> None:
    """Run the code cells at small sizes, an answer in place of each exercise's stub.

    Args:
        without: beginnings of cells that are left out.
    """
    monkeypatch.setenv("WORKBOOK_SMALL", "1")
    matplotlib.use("agg")
    page = {"__name__": "page", "answers": answers}
    for cell in cells:
        source, tags = cell.source, cell.metadata.get("tags", ())
        if "exercise" in tags:
            name = re.match(r"def (\w+)", source)[1]
            source = f"{name} = exercises.take(answers[{name!r}], {name!r})"
        if cell.cell_type == "code" and not source.startswith((FIRST_CELL, *without)):
            exec(source, page)
