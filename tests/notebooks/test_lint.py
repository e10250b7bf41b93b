"""The check of the notebooks' state complains about each fault, by notebook and cell."""

import importlib.util
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_output

ROOT = Path(__file__).resolve().parents[2]
STEPS = "steps: int = 3  # how many there are"
# of no machine's own disk
PROSE = "%md Text, $x^2$, https://example.org/home/x, ../work/x, /kaggle/input/x."


@pytest.fixture(scope="module")
def lint():
    spec = importlib.util.spec_from_file_location("lint", ROOT / ".ci/lint_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def good(tmp_path, make_notebook) -> Path:
    """A notebook as it is committed: run once, from top to bottom."""
    path = make_notebook(tmp_path / "01_topic.ipynb", STEPS, PROSE, "steps + 1")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, start=1):
        cell.execution_count = count
    value = new_output("execute_result", {"text/plain": "4"}, execution_count=len(code))
    code[-1].outputs = [value]
    nbformat.write(notebook, path)
    return path


def test_a_good_notebook_passes(lint, good, capsys):
    assert lint.main(good.parent) == 0
    assert capsys.readouterr().out == ""


def output(kind, *data, **fields):
    """Replace the last cell's output."""

    def spoil(notebook):
        notebook.cells[4].outputs = [new_output(kind, *data, **fields)]

    return spoil


def cell(index, **fields):
    """Set fields of a cell."""

    def spoil(notebook):
        notebook.cells[index].update(nbformat.from_dict(fields))

    return spoil


VIEW = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
NOT_FOR_PAPERMILL = [
    "steps = 3  # without a type",
    "# above it\nsteps: int = 3",
    "steps: int | None = 3  # in a form that papermill does not read",
]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (cell(4, execution_count=7), "cell 5: execution count is 7, not 3; run: make notebooks"),
        (cell(4, outputs=[]), "cell 5: has no output but makes one"),
        (
            cell(4, source="show_table(rows)\nassert rows"),
            "cell 5: what show_table returns is lost before the cell's end; call it last",
        ),
        (
            output("error", ename="KeyError", evalue="'a'", traceback=[]),
            "cell 5: ends in KeyError: 'a'",
        ),
        (output("display_data", VIEW), "cell 5: holds a live widget"),
        (
            output("stream", text="saved to /home/ada/book/data/x.npy"),
            "cell 5: output has a path of one machine, '/home/ada'",
        ),
        (cell(4, source="open('C:\\\\data')"), "cell 5: source has a path of one machine"),
        (cell(0, source="Some text"), "cell 1: is not a Markdown cell that starts with the title"),
        (
            cell(1, source="import sys"),
            "the first code cell is not FIRST_CELL",
        ),
        (cell(2, metadata={}), "no cell tagged `parameters`"),
        *(
            (cell(2, source=source), "parameter steps needs a type and a comment on its line")
            for source in NOT_FOR_PAPERMILL
        ),
        (cell(4, metadata={"tags": ["parameters"]}), "cells [3, 5] tagged `parameters`"),
        (
            cell(4, metadata={"tags": ["nbval-ignore-outputs"]}),
            "cell 5: tag 'nbval-ignore-outputs' means nothing here",
        ),
        (
            cell(4, metadata={"execution": {}}),
            "cell 5: metadata ['execution'] is not clean; run: make format",
        ),
        (
            lambda notebook: notebook.metadata.update(papermill={}),
            "metadata is not clean (['papermill']); run: make format",
        ),
        (lambda notebook: notebook.cells.append(new_markdown_cell(" ")), "cell 6: is empty"),
        (
            cell(3, source="![a plot](https://example.org/plot.png)"),
            "cell 4: loads something from the network",
        ),
        (
            cell(3, source="$$\\frac{a}{$$"),
            "cell 4: formula '\\\\frac{a}{' cannot be shown",
        ),
    ],
)
def test_each_fault_is_named(lint, good, capsys, spoil, complaint):
    notebook = nbformat.read(good, as_version=4)
    spoil(notebook)
    nbformat.write(notebook, good)
    assert lint.main(good.parent) == 1
    complaints = capsys.readouterr().out.splitlines()
    assert [line for line in complaints if line.startswith(f"01_topic.ipynb: {complaint}")]


def test_an_unnumbered_notebook_is_named(lint, good, capsys):
    good.rename(good.with_name("Untitled.ipynb"))
    assert lint.main(good.parent) == 1
    assert "Untitled.ipynb: is not named like 01_topic.ipynb" in capsys.readouterr().out


def test_every_committed_result_is_in_the_list_of_artifacts():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "artifacts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a git checkout")
    listed = set(re.findall(r"`([\w.*/]+)`", (ROOT / "artifacts/README.md").read_text()))
    names = {line.split("/", 1)[1] for line in done.stdout.splitlines()} - {"README.md"}
    assert len(names) > 10
    for name in names:
        folder, stem = f"{name.split('/')[0]}/", f"{name.split('.')[0]}.*"
        assert listed & {name, folder, stem}, name
