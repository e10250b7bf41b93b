"""The first cell finds the workbook wherever a notebook runs; stored cells are clean and static."""

import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lib.lessons import notebook
from lib.tools.publish.cells import (
    FIRST_CELL,
    REPOSITORY,
    WIDGET_STATE,
    WIDGET_VIEW,
    clean,
    read_notebook,
    static_widgets,
)
from lib.tools.publish.execute import execute

ROOT = Path(__file__).resolve().parents[3]

# Leaves behind which `lib` it got, where results would go, and whether figures are set up.
PROBE = """\
import os, subprocess, sys
from pathlib import Path
import matplotlib as mpl
from lib.core.files import ROOT
from lib.lessons.notebook import workspace
elsewhere = "import os, sys; os.chdir('/'); sys.path[:] = {{}}; import lib; print(lib.__file__)"
child = subprocess.run([sys.executable, "-c", elsewhere.format(sys.path)], capture_output=True)
found = [ROOT, os.getcwd(), workspace(), mpl.rcParams["figure.facecolor"], child.stdout.decode()]
Path({marker!r}).write_text("\\n".join(map(str, found)))
"""


@pytest.fixture
def book(tmp_path) -> Path:
    """A copy of the workbook without notebooks, which a test may write to."""
    for folder in ("core", "lessons"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "lib" / folder, tmp_path / "book/lib" / folder, ignore=ignored)
    shutil.copy(ROOT / "lib/__init__.py", tmp_path / "book/lib")
    (tmp_path / "book/notebooks").mkdir()
    (tmp_path / "book/work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "book"


@pytest.mark.parametrize("folder", ["notebooks", "work", "."])
def test_the_first_cell_finds_lib_and_sets_up_figures(folder, book, tmp_path, make_notebook):
    """In the notebook's folder, as JupyterLab and nbval run it, and in the workbook's."""
    marker = tmp_path / "marker.txt"
    path = make_notebook(book / "notebooks/01_probe.ipynb", "", PROBE.format(marker=str(marker)))
    content = nbformat.read(path, as_version=4)
    NotebookClient(content, resources={"metadata": {"path": str(book / folder)}}).execute()
    root, working_folder, workspace, color, child = marker.read_text().splitlines()
    assert Path(root) == Path(workspace) == book
    assert Path(working_folder) == book / folder
    assert color == "#FBFAF7"
    # also in processes started in another folder
    assert Path(child).resolve() == book / "lib/__init__.py"


def run_alone(folder: Path, monkeypatch, git: str, image: str = "Batch") -> tuple[str, str]:
    """Run the first cell in `folder`, where no workbook is, with this as `git`, and import lib.

    `image` is what Kaggle sets in its environment.

    The folder above has a `lib` without code, as on Kaggle. Returns what the first cell showed,
    and where `lib` is.
    """
    (folder / "bin").mkdir()
    (folder / "bin/git").write_text(f"#!/bin/sh\n{git}\n")
    (folder / "bin/git").chmod(0o755)
    (folder / "lib/other").mkdir(parents=True)
    (folder / "working").mkdir()
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", image)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    where = "try:\n    import lib.lessons\n    print(lib.__file__)\nexcept ImportError as error:\n"
    cells = [new_code_cell(FIRST_CELL), new_code_cell(where + "    print(error)")]
    resources = {"metadata": {"path": str(folder / "working")}}
    client = NotebookClient(new_notebook(cells=cells), resources=resources, allow_errors=True)
    client.execute()
    shown, found = ("".join(map(_text, cell.outputs)) for cell in client.nb.cells)
    return shown, found.strip()


def _text(output: dict) -> str:
    return output.get("text") or output.evalue


def test_alone_without_a_network_the_first_cell_shows_what_failed(tmp_path, monkeypatch):
    shown, found = run_alone(tmp_path, monkeypatch, "echo no network for $*; exit 128")
    assert f"no network for clone --depth 1 {REPOSITORY}" in shown
    assert "No module named 'lib.lessons'" in shown
    assert "No module named" in found


@pytest.mark.parametrize(
    ("state", "shown"),
    [(None, "the text"), ({}, "the text"), ({"_options_labels": ["x", "y"], "index": 1}, "y")],
)
def test_a_widget_without_saved_state_is_shown_as_its_text(state, shown):
    output = new_output("display_data", {WIDGET_VIEW: {"model_id": "a"}, "text/plain": "the text"})
    models = {} if state is None else {"a": {"model_name": "DropdownModel", "state": state}}
    metadata = {"widgets": {WIDGET_STATE: {"state": models}}}
    notebook = new_notebook(cells=[new_code_cell(outputs=[output])], metadata=metadata)
    (found,) = static_widgets(notebook).cells[0].outputs
    assert found.data["text/plain"] == shown
    assert WIDGET_VIEW not in found.data


def test_opened_from_another_folder_a_notebook_stops_and_fetches_no_second_workbook(
    tmp_path, monkeypatch
):
    shown, found = run_alone(tmp_path, monkeypatch, "echo fetched", image="")
    assert "fetched" not in shown
    assert "This notebook is not in its workbook: open it there, as make lab does." in shown
    assert "No module named 'lib.lessons'" in shown
    assert "No module named" in found


def test_files_that_cells_write_are_named_without_the_way_to_their_folder(tmp_path):
    import_path = f"__import__('sys').path.insert(0, {str(ROOT)!r})\n"
    write = f"%%writefile {tmp_path}/rank.py\nx = 1"
    append = f"%%writefile -a {tmp_path}/rank.py\ny = 2"
    sources = (import_path + "%load_ext lib.lessons.notebook", write, append)
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    NotebookClient(notebook).execute()
    assert [_text(cell.outputs[0]) for cell in notebook.cells[1:]] == ["Writing rank.py\n"] * 2
    assert (tmp_path / "rank.py").read_text() == "x = 1\ny = 2\n"


def test_alone_with_a_network_the_first_cell_fetches_the_workbook_once(tmp_path, monkeypatch):
    clone = f'mkdir training-workbook && cp -r "{ROOT}/lib" training-workbook/lib'
    shown, lib = run_alone(tmp_path, monkeypatch, clone)
    fetched = tmp_path / "working/training-workbook/lib/__init__.py"
    assert (shown, Path(lib)) == ("", fetched)
    # a second time, `mkdir` would complain
    again = new_notebook(cells=[new_code_cell(FIRST_CELL)])
    NotebookClient(again, resources={"metadata": {"path": str(tmp_path / "working")}}).execute()
    assert again.cells[0].outputs == []


def test_the_first_cell_is_that_of_every_notebook_and_folded():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        first = next(cell for cell in cells if cell.cell_type == "code")
        assert (first.source, first.metadata.tags) == (FIRST_CELL, ["folded"])


def test_the_workbook_has_one_address():
    for name, times in {"pyproject.toml": 1, "README.md": 3}.items():
        addresses = re.findall(
            r"[\w-]+/training-workbook", (ROOT / name).read_text(encoding="utf-8")
        )
        assert addresses == times * [REPOSITORY.removeprefix("https://github.com/")]


def test_a_read_only_workbook_writes_to_the_working_folder(book, monkeypatch):
    monkeypatch.chdir(book.with_name("elsewhere"))
    assert notebook.workspace(book) == book
    monkeypatch.setattr(os, "access", lambda path, mode: path != book)
    assert notebook.workspace(book) == book.with_name("elsewhere")


def test_output_widgets_do_not_talk_back_to_the_kernel(tmp_path, make_notebook):
    """The kernel sees no outputs; a run whose client sends them can wait for ever."""
    cells = [
        "import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    print('inside')\nout",
        "print(len(out.outputs))",
    ]
    path = make_notebook(tmp_path / "01_x.ipynb", "steps = 3", *cells, first="1")
    executed = static_widgets(execute(read_notebook(path), tmp_path))
    assert executed.cells[3].outputs[0].text == "inside\n"
    assert executed.cells[4].outputs[0].text == "0\n"


def test_clean_joins_streams_and_keeps_the_last_state_of_a_line():
    pieces = ["10%\r", "50%\r", "100%\n", "do", "ne\n", "a\r\nb\n"]
    streams = [new_output("stream", name="stderr", text=text) for text in pieces]
    cell = new_code_cell("train()", outputs=[*streams, new_output("stream", text="end")])
    cell.metadata.update({"tags": ["nbval-skip"], "execution": {"shell": "now"}})
    cleaned = clean(new_notebook(cells=[cell], metadata={"papermill": {}, "widgets": {}}))
    joined = ["100%\ndone\na\r\nb\n", "end"]
    assert [output.text for output in cleaned.cells[0].outputs] == joined
    shown = static_widgets(new_notebook(cells=[cell]))
    assert [output.text for output in shown.cells[0].outputs] == joined
    # in a copy
    assert len(cell.outputs) == len(pieces) + 1
    assert cleaned.cells[0].metadata == {"tags": ["nbval-skip"]}
    assert set(cleaned.metadata) == {"kernelspec", "language_info"}
