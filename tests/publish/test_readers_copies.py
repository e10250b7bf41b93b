"""A reader's copies of the notebooks keep every answer when the notebooks change."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from lib.publish.readers_copies import NOTE, merge, update_copies

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS, EXERCISE, PROSE = 2, 3, 4


@pytest.fixture
def book(tmp_path, make_notebook) -> Path:
    """A workbook of two notebooks, whose copies were made."""
    for name in ("01_one", "02_two"):
        path = tmp_path / f"notebooks/{name}.ipynb"
        make_notebook(path, "steps = 3", "def f():\n    raise NotImplementedError", "%md Text.")
        change(path, lambda cells: [cells[i].update(id=f"c{i}") for i in range(len(cells))])
    assert update_copies(tmp_path) == 0
    return tmp_path


def change(path: Path, edit) -> None:
    notebook = nbformat.read(path, as_version=4)
    edit(notebook.cells)
    nbformat.write(notebook, path)


def set_source(index: int, text: str):
    return lambda cells: cells[index].update(source=text)


def answer(cells) -> None:
    """What a reader leaves: an answer, its output, and a cell of its own below."""
    cells[EXERCISE].source = "def f():\n    return 42"
    cells[EXERCISE].outputs = [new_output("stream", text="right")]
    cells.insert(EXERCISE + 1, new_code_cell("f()", id="mine", execution_count=7))


def cells_of(book: Path, name: str = "01_one"):
    path = book / f"work/{name}.ipynb"
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    assert len({*ids}) == len(ids)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook.cells


def test_copies_are_made_once_and_then_left_alone(book, capsys):
    names = sorted(path.name for path in (book / "notebooks").glob("*.ipynb"))
    assert sorted(path.name for path in (book / "work").glob("*.ipynb")) == names
    change(book / "work/01_one.ipynb", answer)
    before = [path.read_bytes() for path in sorted((book / "work").rglob("*.*"))]
    update_copies(book)
    assert [path.read_bytes() for path in sorted((book / "work").rglob("*.*"))] == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("is_changed", [False, True])
def test_copies_have_no_outputs_that_give_answers_away(book, is_changed):
    if is_changed:
        change(book / "work/01_one.ipynb", answer)

    def run(cells):
        set_source(PARAMETERS, "steps = 5")(cells)
        measured = [new_output("stream", text="measured: 15.3")]
        cells[PARAMETERS].update(outputs=measured, execution_count=2)

    change(book / "notebooks/01_one.ipynb", run)
    update_copies(book)
    copied = cells_of(book)[PARAMETERS]
    assert (copied.source, copied.outputs, copied.execution_count) == ("steps = 5", [], None)


def test_a_copy_that_was_not_changed_is_replaced(book, capsys):
    change(book / "notebooks/01_one.ipynb", set_source(PROSE, "Better text."))
    update_copies(book)
    assert "01_one.ipynb: replaced by the new version" in capsys.readouterr().out
    new, copy = (book / folder / "01_one.ipynb" for folder in ("notebooks", "work"))
    assert new.read_bytes() == copy.read_bytes()


def test_answers_outputs_and_own_cells_stay_while_the_rest_is_updated(book, capsys):
    change(book / "work/01_one.ipynb", answer)
    before = (book / "work/01_one.ipynb").read_bytes()

    def revise(cells):
        set_source(PROSE, "Better text.")(cells)
        cells.insert(PARAMETERS + 1, new_code_cell("added = 1", id="added"))

    # twice: after a merge the copy still counts as the reader's
    for text in ("steps = 5", "steps = 6"):
        change(book / "notebooks/01_one.ipynb", set_source(PARAMETERS, text))
        if text == "steps = 5":
            change(book / "notebooks/01_one.ipynb", revise)
        update_copies(book)
        printed = capsys.readouterr().out
        assert "work/01_one.ipynb: merged with the new version; your cells kept: 2" in printed
        assert "02_two" not in printed
    cells = cells_of(book)
    assert [cell.id for cell in cells] == ["c0", "c1", "c2", "added", "c3", "mine", "c4"]
    assert cells[PARAMETERS].source == "steps = 6"
    assert cells[4].source == "def f():\n    return 42"
    assert cells[4].outputs[0].text == "right"
    assert cells[5].execution_count == 7
    assert cells[-1].source == "Better text."
    earlier = sorted((book / "work/.earlier").iterdir())
    assert before in [path.read_bytes() for path in earlier]


def test_a_cell_changed_on_both_sides_stays_the_readers_with_the_new_one_below(book, capsys):
    change(book / "work/01_one.ipynb", set_source(PARAMETERS, "steps = 99"))
    for text in ("steps = 5", "steps = 6"):
        change(book / "notebooks/01_one.ipynb", set_source(PARAMETERS, text))
        update_copies(book)
        assert "1 of them changed there, too" in capsys.readouterr().out
    cells = cells_of(book)
    assert [cell.id for cell in cells] == ["c0", "c1", "c2", "c2-new", "c3", "c4"]
    assert cells[PARAMETERS].source == "steps = 99"
    assert cells[PARAMETERS + 1].source == f"{NOTE}\n\n```python\nsteps = 6\n```"


def test_a_new_version_stays_below_until_the_reader_adopts_it(book):
    change(book / "work/01_one.ipynb", set_source(PARAMETERS, "steps = 99"))
    change(book / "notebooks/01_one.ipynb", set_source(PARAMETERS, "steps = 5"))
    for text, note in (("Other text.", ["c2-new"]), ("More text.", [])):
        update_copies(book)
        change(book / "notebooks/01_one.ipynb", set_source(PROSE, text))
        update_copies(book)
        assert [cell.id for cell in cells_of(book)] == ["c0", "c1", "c2", *note, "c3", "c4"]
        change(book / "work/01_one.ipynb", set_source(PARAMETERS, "steps = 5"))


def test_who_deletes_a_cell_and_leaves_its_new_version_gets_that_as_a_cell(book):
    change(book / "work/01_one.ipynb", set_source(PARAMETERS, "steps = 99"))
    change(book / "notebooks/01_one.ipynb", set_source(PARAMETERS, "steps = 5"))
    update_copies(book)
    change(book / "work/01_one.ipynb", lambda cells: cells.pop(PARAMETERS))
    change(book / "notebooks/01_one.ipynb", set_source(PROSE, "Other text."))
    update_copies(book)
    cells = cells_of(book)
    assert [cell.id for cell in cells] == ["c0", "c1", "c2", "c3", "c4"]
    assert cells[PARAMETERS].source == "steps = 5"


def test_what_the_reader_wrote_into_a_new_version_stays(book, capsys):
    change(book / "work/01_one.ipynb", set_source(PARAMETERS, "steps = 99"))
    for number in (5, 6, 7):
        change(book / "notebooks/01_one.ipynb", set_source(PARAMETERS, f"steps = {number}"))
        update_copies(book)
        note = cells_of(book)[PARAMETERS + 1].source
        assert f"steps = {number}" in note
        thought = set_source(PARAMETERS + 1, f"{note} Why {number}?")
        change(book / "work/01_one.ipynb", thought)
    assert "your cells kept: 3" in capsys.readouterr().out
    sources = "".join(cell.source for cell in cells_of(book))
    assert "steps = 5" in sources
    assert re.findall(r"Why \d", sources) == ["Why 7", "Why 6", "Why 5"]


@pytest.mark.parametrize("has_new_text", [False, True])
def test_a_cell_that_the_reader_turned_into_another_kind_stays_so(book, has_new_text):
    def into_prose(cells):
        cells[EXERCISE] = new_markdown_cell(cells[EXERCISE].source, id="c3")

    change(book / "work/01_one.ipynb", into_prose)
    text = "def g(): ..." if has_new_text else "def f():\n    raise NotImplementedError"
    change(book / "notebooks/01_one.ipynb", set_source(EXERCISE, text))
    change(book / "notebooks/01_one.ipynb", set_source(PROSE, "Better text."))
    update_copies(book)
    cells = cells_of(book)
    assert cells[EXERCISE].cell_type == "markdown"
    assert [cell.id for cell in cells[4:]] == ["c3-new"] * has_new_text + ["c4"]


@pytest.mark.parametrize("keeps_id", [False, True])
def test_a_copy_that_an_editor_saved_without_ids_is_merged_as_well(book, capsys, keeps_id):
    path = book / "work/01_one.ipynb"
    change(path, answer)
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        name = cell.pop("id")
        # as Colab does
        cell["metadata"] |= {"id": name} if keeps_id else {}
        if not keeps_id:
            for field in ("outputs", "execution_count"):
                cell.pop(field, None)
    path.write_text(json.dumps(notebook | {"nbformat_minor": 0}))
    for name in ("01_one", "02_two"):
        change(book / f"notebooks/{name}.ipynb", set_source(PROSE, "Better text."))
    update_copies(book)
    sources = [cell.source for cell in cells_of(book)]
    assert sources[PARAMETERS:] == ["steps = 3", "def f():\n    return 42", "f()", "Better text."]
    printed = capsys.readouterr().out
    assert "your cells kept: 2" in printed
    assert "02_two.ipynb: replaced by the new version" in printed


def test_what_the_reader_deleted_stays_deleted_and_what_the_workbook_dropped_goes(book):
    change(book / "work/01_one.ipynb", lambda cells: cells.pop(PROSE))
    change(book / "notebooks/01_one.ipynb", lambda cells: cells.pop(EXERCISE))
    update_copies(book)
    assert [cell.id for cell in cells_of(book)] == ["c0", "c1", "c2"]


def test_an_answer_to_an_exercise_that_the_workbook_dropped_stays(book):
    change(book / "work/01_one.ipynb", answer)
    change(book / "notebooks/01_one.ipynb", lambda cells: cells.pop(EXERCISE))
    update_copies(book)
    assert [cell.id for cell in cells_of(book)] == ["c0", "c1", "c2", "c3", "mine", "c4"]


def test_a_copy_whose_outputs_alone_differ_keeps_them_where_the_code_is_the_same(book):
    ran = [new_output("stream", text="mine")]
    change(book / "work/01_one.ipynb", lambda cells: cells[PARAMETERS].update(outputs=ran))

    def refresh(cells):
        cells[PARAMETERS].update(outputs=[new_output("stream", text="theirs")])
        cells[PARAMETERS].metadata.tags.append("folded")
        set_source(EXERCISE, "def g(): ...")(cells)

    change(book / "notebooks/01_one.ipynb", refresh)
    update_copies(book)
    cells = cells_of(book)
    assert cells[PARAMETERS].outputs[0].text == "mine"
    assert cells[PARAMETERS].metadata.tags == ["parameters", "folded"]
    assert cells[EXERCISE].source == "def g(): ..."


@pytest.mark.parametrize(
    "record",
    [
        *(None, "{", "[]", '{"01_one": 1}', '{"01_one": {"cells": []}}', "[" * 100_000),
        '{"01_one": {"notebook": "", "cells": {"c0": ["a", "list"]}}}',
        '{"01_one": {"notebook": {}, "cells": {}}}',
        '{"01_one": {"notebook": "", "copy": [1], "cells": {}}}',
    ],
)
def test_without_a_whole_record_every_difference_counts_as_the_readers(book, capsys, record):
    change(book / "work/01_one.ipynb", answer)
    path = book / "work/.origins.json"
    path.unlink() if record is None else path.write_text(record)
    capsys.readouterr()
    update_copies(book)
    printed = capsys.readouterr().out
    assert ("work/.origins.json is damaged" in printed) is (record is not None)
    assert "work/01_one.ipynb: merged with the new version; your cells kept: 2" in printed
    assert "02_two" not in printed
    cells = cells_of(book)
    assert cells[EXERCISE].source == "def f():\n    return 42"
    assert "raise NotImplementedError" in cells[EXERCISE + 1].source


def test_a_file_that_is_no_notebook_is_named_and_stays(book, capsys):
    (book / "work/01_one.ipynb").write_text("{")
    change(book / "notebooks/01_one.ipynb", set_source(PROSE, "Better text."))
    update_copies(book)
    assert "work/01_one.ipynb: is no notebook and stays as it is" in capsys.readouterr().out
    assert (book / "work/01_one.ipynb").read_text() == "{"


@pytest.mark.parametrize("what", ["a folder", "a pipe", "a lost link", "a file for .earlier"])
def test_what_is_in_a_copys_place_is_named_and_stops_no_later_copy(book, capsys, what):
    copy = book / "work/01_one.ipynb"
    change(copy, answer)
    if what == "a file for .earlier":
        (book / "work/.earlier").write_text("mine")
    else:
        copy.unlink()
    if what == "a folder":
        (copy / "mine").mkdir(parents=True)
    elif what == "a pipe":
        os.mkfifo(copy)
    elif what == "a lost link":
        copy.symlink_to(book / "lost")
    for name in ("01_one", "02_two"):
        change(book / f"notebooks/{name}.ipynb", set_source(PROSE, "Better text."))
    capsys.readouterr()
    assert update_copies(book) == 0
    printed = capsys.readouterr().out
    assert cells_of(book, "02_two")[PROSE].source == "Better text."
    if what == "a lost link":
        assert cells_of(book)[PROSE].source == "Better text."
    else:
        assert "work/01_one.ipynb:" in printed
        assert "stays as it is" in printed
        assert not copy.is_file() or cells_of(book)[EXERCISE].source.endswith("42")


def test_what_is_in_a_copys_place_is_named_though_its_notebook_is_the_same(book, capsys):
    copy = book / "work/01_one.ipynb"
    copy.unlink()
    copy.mkdir()
    capsys.readouterr()
    assert update_copies(book) == 0
    assert "work/01_one.ipynb: is no file and stays as it is" in capsys.readouterr().out


CONFLICT = '<<<<<<< HEAD\n{"cells": []}\n=======\n{"cells": [1]}\n>>>>>>> main\n'


@pytest.mark.parametrize("content", [CONFLICT, "[]", '{"cells": [{}], "nbformat": 4}'])
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_new_version_that_is_no_notebook_is_named_and_not_copied(
    book, capsys, content, is_changed
):
    if is_changed:
        change(book / "work/01_one.ipynb", answer)
    before = (book / "work/01_one.ipynb").read_bytes()
    (book / "notebooks/01_one.ipynb").write_text(content)
    change(book / "notebooks/02_two.ipynb", set_source(PROSE, "Better text."))
    update_copies(book)
    assert (book / "work/01_one.ipynb").read_bytes() == before
    printed = capsys.readouterr().out
    assert "notebooks/01_one.ipynb: is no notebook" in printed
    assert "02_two.ipynb: replaced by the new version" in printed


def test_a_full_disk_leaves_no_part_of_a_copy(book):
    shutil.rmtree(book / "work")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            update_copies(book)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((book / "work").glob("*.ipynb")) == []
    update_copies(book)
    assert cells_of(book)[PARAMETERS].source == "steps = 3"


def test_a_deleted_copy_is_made_again(book, capsys):
    (book / "work/02_two.ipynb").unlink()
    update_copies(book)
    assert "work/: 1 copied from notebooks/" in capsys.readouterr().out
    assert cells_of(book, "02_two")[PARAMETERS].source == "steps = 3"
    shutil.rmtree(book / "work")
    update_copies(book)
    assert json.loads((book / "work/.origins.json").read_text()).keys() == {"01_one", "02_two"}


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


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_lab_brings_the_copies_up_to_date_and_opens_the_first():
    command = ["make", "--dry-run", "lab"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    update, start = lines.index("-m lib notebooks copy"), lines.index("-m jupyterlab")
    assert update < start < lines.index("default_url=/lab/tree/work/00_start_here.ipynb")


def test_own_cells_stay_in_their_order_also_at_the_top():
    def cell(name, source=""):
        return new_code_cell(source, id=name)

    mine = [cell("top"), cell("a"), cell("x"), cell("y"), cell("gone"), cell("z"), cell("b")]
    base = dict.fromkeys(("a", "gone", "b"), hashlib.sha256(b"").hexdigest())
    merged = merge(mine, [cell("b"), cell("a", "new")], base)
    assert [found.id for found in merged.cells] == ["top", "b", "a", "x", "y", "z"]
    assert (merged.kept, merged.both) == (4, 0)
