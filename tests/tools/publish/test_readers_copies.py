"""A reader's copies of the notebooks keep everything that the reader did, whatever is new."""

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_output

from lib.tools.publish.plan import find_notebooks
from lib.tools.publish.readers_copies import CopyConfig, copy_notebooks

ROOT = Path(__file__).resolve().parents[3]
PARAMETERS, PROSE = 2, 3


@pytest.fixture
def book(tmp_path, make_notebook) -> Path:
    """A workbook of two notebooks, whose copies were made."""
    for name in ("01_one", "02_two"):
        make_notebook(tmp_path / f"notebooks/{name}.ipynb", "steps = 3", "%md Text.")
    assert update_copies(tmp_path) == 0
    return tmp_path


def change(path: Path, index: int, **fields) -> bytes:
    """Change a cell of a notebook; return the file's new content."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[index].update(fields)
    nbformat.write(notebook, path)
    return path.read_bytes()


def update_copies(root: Path, **settings) -> int:
    return copy_notebooks(CopyConfig(**settings), root=root)


def contents(book: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((book / "work").glob("*.ipynb"))}


def test_copies_are_made_once_without_outputs_and_then_left_alone(book, capsys):
    ran = [new_output("stream", text="measured: 15.3")]
    change(book / "notebooks/01_one.ipynb", PARAMETERS, outputs=ran, execution_count=2)
    before = contents(book)
    assert update_copies(book) == 0
    # outputs alone are no new version
    assert contents(book) == before
    assert capsys.readouterr().out == ""
    (book / "work/01_one.ipynb").unlink()
    update_copies(book)
    assert "work/: 1 copied from notebooks/" in capsys.readouterr().out
    assert contents(book) == before
    assert b"15.3" not in before["01_one.ipynb"]


def test_a_class_gets_copies_without_solutions_in_a_folder_of_its_own(tmp_path, capsys):
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    before = (tmp_path / "notebooks/01_tokenizer.ipynb").read_text(encoding="utf-8")
    assert "<summary>Solution</summary>" in before
    assert update_copies(tmp_path, folder=Path("handout"), without_solutions=True) == 0
    made = sorted((tmp_path / "handout").glob("*.ipynb"))
    assert [path.name for path in made] == [path.name for path in find_notebooks((), tmp_path)]
    text = "".join(path.read_text(encoding="utf-8") for path in made)
    assert "<summary>Solution</summary>" not in text
    assert "<summary>Hint</summary>" in text
    assert "<summary>Answer" in text
    assert text.count("<details>") == text.count("</details>")
    assert not (tmp_path / "work").exists()
    assert f"handout/: {len(made)} copied from notebooks/" in capsys.readouterr().out
    with pytest.raises(ValueError, match="folder must be a folder for copies"):
        update_copies(tmp_path, folder=Path("notebooks"))


def test_a_copy_as_it_was_given_is_replaced_by_the_new_version(book, capsys):
    new = change(book / "notebooks/01_one.ipynb", PROSE, source="Better text.")
    update_copies(book)
    assert "01_one.ipynb: replaced by the new version" in capsys.readouterr().out
    assert contents(book)["01_one.ipynb"] == new
    assert list(contents(book)) == ["01_one.ipynb", "02_two.ipynb"]


@pytest.mark.parametrize(
    "answer", [{"source": "steps = 99"}, {"outputs": [new_output("stream", text="mine")]}]
)
def test_a_changed_copy_stays_and_new_versions_go_beside_it(book, capsys, answer):
    mine = change(book / "work/01_one.ipynb", PARAMETERS, **answer)
    for text in ("Better text.", "Best text."):
        new = change(book / "notebooks/01_one.ipynb", PROSE, source=text)
        update_copies(book)
        said = "work/01_one.ipynb: stays as you left it; the new version is 01_one.new.ipynb"
        assert said in capsys.readouterr().out
        assert contents(book)["01_one.ipynb"] == mine
        assert contents(book)["01_one.new.ipynb"] == new
    # which is no further notebook
    assert [path.stem for path in find_notebooks(["01"], book, "work")] == ["01_one"]
    update_copies(book)
    assert capsys.readouterr().out == ""
    # the reader takes it over: from then on it is as it was given
    os.replace(book / "work/01_one.new.ipynb", book / "work/01_one.ipynb")
    newest = change(book / "notebooks/01_one.ipynb", PROSE, source="Text.")
    update_copies(book)
    assert contents(book)["01_one.ipynb"] == newest
    assert "01_one.new.ipynb" not in contents(book)


def test_a_new_version_that_the_reader_changed_stays_too(book, capsys):
    change(book / "work/01_one.ipynb", PARAMETERS, source="steps = 99")
    change(book / "notebooks/01_one.ipynb", PROSE, source="Better text.")
    update_copies(book)
    change(book / "work/01_one.new.ipynb", PARAMETERS, source="steps = 98")
    change(book / "notebooks/01_one.ipynb", PROSE, source="Best text.")
    before = contents(book)
    capsys.readouterr()
    for _ in range(2):
        update_copies(book)
        assert "work/01_one.new.ipynb: has your changes, too; rename it" in capsys.readouterr().out
        assert contents(book) == before


@pytest.mark.parametrize("record", [None, "{"])
def test_without_a_record_every_difference_counts_as_the_readers(book, capsys, record):
    mine = change(book / "work/01_one.ipynb", PARAMETERS, source="steps = 99")
    path = book / "work/.origins.json"
    path.unlink() if record is None else path.write_text(record)
    update_copies(book)
    printed = capsys.readouterr().out
    assert "work/01_one.ipynb: stays as you left it" in printed
    assert "02_two" not in printed
    assert contents(book)["01_one.ipynb"] == mine


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_in_a_copys_place_stays_and_stops_no_later_copy(book, capsys, is_folder):
    copy = book / "work/01_one.ipynb"
    copy.unlink()
    (copy / "mine").mkdir(parents=True) if is_folder else copy.write_text("{")
    new = [
        change(book / f"notebooks/{name}.ipynb", PROSE, source="Better text.")
        for name in ("01_one", "02_two")
    ]
    update_copies(book)
    assert "work/01_one.ipynb: stays as you left it" in capsys.readouterr().out
    assert [(book / f"work/{name}.ipynb").read_bytes() for name in ("01_one.new", "02_two")] == new
    assert (copy / "mine").is_dir() if is_folder else copy.read_text() == "{"


def test_a_full_disk_leaves_no_part_of_a_copy(book):
    shutil.rmtree(book / "work")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            update_copies(book)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(book) == {}


def test_links_lead_from_the_copies_to_the_same_files():
    folder = ROOT / "notebooks"
    for path in folder.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        # `kernel[grid](x)` is no link
        prose = re.sub(r"(`+).+?\1", "", prose, flags=re.DOTALL)
        links = {link for link in re.findall(r"\]\(([^)#\s]+)", prose) if ":" not in link}
        assert {link for link in links if not (folder / link).exists()} == set(), path.name
        # beside it are the other copies and nothing else
        beside = {link for link in links if not link.startswith("../")}
        assert beside <= {other.name for other in folder.glob("*.ipynb")}, path.name


def test_make_lab_brings_the_copies_up_to_date_and_opens_the_first():
    command = ["make", "--dry-run", "lab"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    update, start = lines.index("-m lib notebooks copy"), lines.index("-m jupyterlab")
    assert update < start < lines.index("default_url=/lab/tree/work/00_start_here.ipynb")
