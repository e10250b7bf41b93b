"""Every file of notebooks/parameters: names that the notebooks have, and values of their types."""

from typing import Any

import nbformat
import pytest

from lib.core.files import ROOT
from lib.tools.publish.plan import find_notebooks, plan

FILES = sorted(path.stem for path in (ROOT / "notebooks/parameters").glob("*.yaml"))
NOTEBOOKS = find_notebooks((), ROOT)


def defaults(notebook) -> dict[str, Any]:
    """What the notebook's cell tagged `parameters` sets."""
    cells = nbformat.read(notebook, as_version=4).cells
    values: dict[str, Any] = {}
    for cell in cells:
        if "parameters" in cell.metadata.get("tags", ()):
            exec(cell.source, values)
    return values


def fits(value, default) -> bool:
    """Whether `value` may stand where `default` does."""
    if isinstance(default, list | tuple):
        return isinstance(value, list) and all(any(fits(v, d) for d in default) for v in value)
    if isinstance(default, float):
        return type(value) in (int, float)
    return default is None or type(value) is type(default)


@pytest.mark.parametrize("name", FILES)
def test_a_file_sets_what_its_notebooks_have(name):
    for job in plan(NOTEBOOKS, name, ROOT):
        found = defaults(job.source)
        wrong = {key: v for key, v in job.parameters.items() if not fits(v, found[key])}
        assert not wrong, f"{job.name}: {wrong}"
