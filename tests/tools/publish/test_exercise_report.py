"""The report on exercises: four results, past cells that fail, from the reader's copies."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lib.__main__ import main
from lib.tools.publish import exercise_report
from lib.tools.publish.exercise_report import ExercisesConfig, exercises_in, report_exercises

ROOT = Path(__file__).resolve().parents[3]
SET_UP = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from lib.lessons.tokenizer import exercises"""
RIGHT = """def merge_pairs(ids, pair, new_id):
    return exercises.merge_pair.solve(ids, pair, new_id)
exercises.check(merge_pairs, "merge_pair")"""
STUB = """def split_gpt4(text):
    raise NotImplementedError
exercises.check(split_gpt4)"""
WRONG = """def merge_pair(ids, pair, new_id):
    return ids
exercises.check(merge_pair)"""
BROKEN = """def merge_twice(ids, pair, new_id)
    return merge_pair(ids, pair, new_id)
exercises.check(merge_twice, "merge_pair")"""


TAMPERED = (
    """exercises.check = lambda attempt: print("right: as expected")""",
    """def split_gpt4(text):
    return text.split()
exercises.check(split_gpt4)""",
    """def merge_pair(ids, pair, new_id):
    return ids
print("right: as expected")""",
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    cells = [new_markdown_cell("# A lesson"), new_code_cell(SET_UP), new_code_cell("1 / 0")]
    for source in (RIGHT, STUB, WRONG, BROKEN):
        cells.append(new_code_cell(source, metadata={"tags": ["exercise"]}))
    path = tmp_path / "work/01_topic.ipynb"
    path.parent.mkdir()
    nbformat.write(new_notebook(cells=cells), path)
    monkeypatch.setattr(exercise_report, "workspace", lambda: tmp_path)
    return path.parent


def test_each_exercise_passed_failed_was_left_or_was_blocked(folder, tmp_path, capsys):
    before = (folder / "01_topic.ipynb").read_bytes()
    assert report_exercises(ExercisesConfig()) == 0
    answers = json.loads((tmp_path / "artifacts/local/exercises.json").read_text())
    assert {answer["exercise"]: answer["result"] for answer in answers} == {
        "merge_pairs": "passed",
        "split_gpt4": "not attempted",
        "merge_pair": "failed",
        "merge_twice": "blocked",
    }
    assert "1 passed, 1 not attempted, 1 failed, 1 blocked" in capsys.readouterr().out
    assert (folder / "01_topic.ipynb").read_bytes() == before


def test_an_exercise_whose_check_was_overwritten_or_removed_stays_in_the_table(
    folder, tmp_path, monkeypatch
):
    lessons = tmp_path / "notebooks"
    lessons.mkdir()
    shutil.copy(folder / "01_topic.ipynb", lessons)
    monkeypatch.setattr(exercise_report, "ROOT", tmp_path)
    cells = [new_code_cell(source) for source in (SET_UP, *TAMPERED)]
    nbformat.write(new_notebook(cells=cells), folder / "01_topic.ipynb")
    answers = exercise_report.answers_in(folder / "01_topic.ipynb")
    assert {answer["exercise"]: answer["result"] for answer in answers} == {
        "merge_pairs": "missing",
        "split_gpt4": "tampered",
        "merge_pair": "missing",
        "merge_twice": "missing",
    }


def test_each_notebook_names_its_exercises():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        tagged = [cell for cell in cells if "exercise" in cell.metadata.get("tags", [])]
        assert len(exercises_in(path)) == len(tagged)


def test_a_notebook_that_is_not_there_is_named(capsys):
    assert main(["exercises", "--notebooks", "77"]) == 2
    assert "no notebook is called '77'" in capsys.readouterr().err


def test_a_file_that_is_no_notebook_is_named_before_any_notebook_is_run(folder):
    (folder / "02_other.ipynb").write_bytes(b"[]")
    with pytest.raises(ValueError, match=r"work/02_other\.ipynb is no notebook: .+"):
        report_exercises(ExercisesConfig())
    assert not (folder.parent / "artifacts").exists()
