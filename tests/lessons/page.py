"""Run a lesson's whole page with answers to its exercises."""

import re
from collections.abc import Callable, Mapping, Sequence

import matplotlib

FIRST_CELL = "# Find the workbook"


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
