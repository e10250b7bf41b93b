"""What notebooks import from the workbook is there."""

import ast
import importlib

import nbformat
import pytest

from lib.core.files import ROOT
from lib.tools.publish.plan import find_notebooks


def imported(source: str):
    """Yield (module, name) of each import from `lib` in a cell; name None for a whole module."""
    # cell magics are no Python, and the set-up cell is checked by the linter
    source = source.replace("\\\n", "")
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    for node in ast.walk(ast.parse("\n".join(lines) or "pass")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lib":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from ((name, None) for name in names if name.split(".")[0] == "lib")


@pytest.mark.parametrize("path", find_notebooks((), ROOT), ids=lambda path: path.stem)
def test_each_name_that_a_notebook_imports_exists(path):
    cells = nbformat.read(path, as_version=4).cells
    found = [pair for c in cells if c.cell_type == "code" for pair in imported(c.source)]
    assert len(found) > 3
    for module, name in found:
        loaded = importlib.import_module(module)
        if name is not None and not hasattr(loaded, name):
            importlib.import_module(f"{module}.{name}")
