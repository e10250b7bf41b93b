"""The check of the notebooks' state complains about each fault, by notebook and cell."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_output

from lib.notebook import FIRST_CELL

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def lint():
    spec = importlib.util.spec_from_file_location("lint", ROOT / ".ci/lint_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def good(tmp_path, make_notebook) -> Path:
    """A notebook as it is committed: run once, from top to bottom."""
    path = make_notebook(tmp_path / "01_topic.ipynb", "steps = 3", "%md Text, $x^2$.", "steps + 1")
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


def wrong_count(notebook):
    notebook.cells[4].execution_count = 7


def not_run(notebook):
    notebook.cells[4].execution_count = None


def no_output(notebook):
    notebook.cells[4].outputs = []


def error_output(notebook):
    notebook.cells[4].outputs = [new_output("error", ename="KeyError", evalue="'a'", traceback=[])]


def live_widget(notebook):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    notebook.cells[4].outputs = [new_output("display_data", view)]


def path_in_output(notebook):
    notebook.cells[4].outputs = [new_output("stream", text="saved to /home/ada/book/data/x.npy")]


def path_in_html(notebook):
    table = {"text/html": "<td>/Users/ada/book</td>"}
    notebook.cells[4].outputs = [new_output("display_data", table)]


def path_in_source(notebook):
    notebook.cells[4].source = "open('C:\\\\data\\\\x.txt')"


def no_title(notebook):
    notebook.cells[0].source = "Some text"


def other_first_cell(notebook):
    notebook.cells[1].source = "import sys"


def no_parameters(notebook):
    notebook.cells[2].metadata = nbformat.from_dict({})


def two_parameters(notebook):
    notebook.cells[4].metadata = nbformat.from_dict({"tags": ["parameters"]})


def unknown_tag(notebook):
    notebook.cells[4].metadata = nbformat.from_dict({"tags": ["nbval-ignore-outputs"]})


def cell_metadata(notebook):
    notebook.cells[4].metadata["execution"] = {"iopub.status.busy": "now"}


def notebook_metadata(notebook):
    notebook.metadata["papermill"] = {}


def kernel(notebook):
    notebook.metadata["kernelspec"]["name"] = "my-env"


def empty_cell(notebook):
    notebook.cells.append(new_markdown_cell(" "))


def remote_picture(notebook):
    notebook.cells[3].source = "![a plot](https://example.org/plot.png)"


def bad_formula(notebook):
    notebook.cells[3].source = "$$\\frac{a}{$$"


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (wrong_count, "cell 5: execution count is 7, not 3; run: make notebooks"),
        (not_run, "cell 5: execution count is none"),
        (no_output, "cell 5: has no output but makes one"),
        (error_output, "cell 5: ends in KeyError: 'a'"),
        (live_widget, "cell 5: holds a live widget"),
        (path_in_output, "cell 5: output has a path of one machine, '/home/ada'"),
        (path_in_html, "cell 5: output has a path of one machine, '/Users/ada'"),
        (path_in_source, "cell 5: source has a path of one machine"),
        (no_title, "cell 1: is not a Markdown cell that starts with the title"),
        (other_first_cell, "the first code cell is not lib.notebook.FIRST_CELL"),
        (no_parameters, "no cell tagged `parameters`"),
        (two_parameters, "cells [3, 5] tagged `parameters`"),
        (unknown_tag, "cell 5: tag 'nbval-ignore-outputs' means nothing here"),
        (cell_metadata, "cell 5: metadata ['execution'] is left over; run: make format"),
        (notebook_metadata, "metadata is not clean (['papermill']); run: make format"),
        (kernel, "metadata is not clean (kernelspec or language_info)"),
        (empty_cell, "cell 6: is empty"),
        (remote_picture, "cell 4: loads something from the network"),
        (bad_formula, "cell 4: formula '\\\\frac{a}{' cannot be shown"),
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


@pytest.mark.parametrize(
    ("source", "shows"),
    [
        ("print(1)", True),
        ("x = 1\nx", True),
        ("x = 1\nx;", False),
        ("axes.plot(x)", False),
        ("def f():\n    print(1)", False),
        ("import lib", False),
    ],
)
def test_what_must_have_an_output(lint, source, shows):
    assert lint._shows_something(source) is shows


def test_addresses_and_relative_paths_are_no_machine_paths(lint):
    for text in ("https://example.org/home/x", "data/tmp/x", "../work/x", "/kaggle/input/x", "a/b"):
        assert list(lint._check_paths("source", text)) == []


def test_the_first_cell_is_as_ruff_formats_it(tmp_path):
    code = tmp_path / "first_cell.py"
    code.write_text(FIRST_CELL + "\n")
    settings = ["--config", ROOT / "pyproject.toml"]
    command = [sys.executable, "-m", "ruff", "format", "--diff", *settings, code]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_every_committed_result_stands_in_the_list_of_artifacts():
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
