"""Notebooks import names that exist, and sections that nothing later needs come last."""

import ast
import importlib

import nbformat
import pytest

from lib.core.files import ROOT
from lib.core.hardware import peak
from lib.core.records import records
from lib.lessons.profiling.records import block_on_gpu
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


notebooks = pytest.mark.parametrize("path", find_notebooks((), ROOT), ids=lambda path: path.stem)


@notebooks
def test_each_name_that_a_notebook_imports_exists(path):
    cells = nbformat.read(path, as_version=4).cells
    found = [pair for c in cells if c.cell_type == "code" for pair in imported(c.source)]
    assert len(found) > 3
    for module, name in found:
        loaded = importlib.import_module(module)
        if name is not None and not hasattr(loaded, name):
            importlib.import_module(f"{module}.{name}")


@notebooks
def test_extra_sections_come_last_and_are_tagged(path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
    sections = [cell for cell in cells if cell.source.startswith(("# ", "## "))]
    tagged = ["extra" in cell.metadata.get("tags", ()) for cell in sections]
    assert tagged == sorted(tagged)
    assert tagged == [cell.source.lstrip("# ").startswith("Extra") for cell in sections]


def test_the_two_speeds_of_an_h200_are_those_that_the_page_tells_apart():
    said = "large matmul, 783 TFLOP/s. Notebook 08 took the 421"
    cells = nbformat.read(ROOT / "notebooks/10_fsdp.ipynb", as_version=4).cells
    assert said in " ".join(" ".join(cell.source for cell in cells).split())
    assert round(block_on_gpu()[0].flops_per_s / 1e12) == 783
    how = {"dtype": "bfloat16", "compile": True, "seq_len": 1024, "attention_kernel": "sdpa"}
    step = records("step_benchmark", model="large", mode="full_step", **how).iloc[-1]
    assert round(step["mfu"] * peak(step["device"]).bfloat16 / 1e12) == 421
