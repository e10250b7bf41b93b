"""Students' notebooks are graded in copies: limits, tampering, missing work, one table for all."""

import csv
import dataclasses
import os
import socket

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lib.__main__ import main
from lib.core.files import ROOT
from lib.tools.publish import submissions
from lib.tools.publish.exercise_report import ExercisesConfig
from lib.tools.publish.submissions import find_submissions, grade_submissions, offline

FIRST = """import os, shutil, socket, sys, time
sys.path.insert(0, "..")
from lib.lessons.exercise import check, exercise
from lib.lessons.inputs import ints
@exercise("core", {"n": ints(1, 9)})
def double(n):
    return 2 * n
double.mistakes = ""
@exercise("warm-up", {"n": ints(1, 9)})
def half(n):
    return n / 2
half.mistakes = ""
def check_double(attempt): check(solutions[0], attempt)
def check_half(attempt): check(solutions[1], attempt)
solutions = double, half"""
DOUBLE = "def double(n):\n    return {}\ncheck_double(double)"
HALF = "def half(n):\n    return {}\ncheck_half(half)"
RIGHT = (DOUBLE.format("n + n"), HALF.format("n / 2"))
STUB = "def half(n):\n    raise NotImplementedError\ncheck_half(half)"
ENDLESS = "while True: time.sleep(1)"
REMOVES = "os.chdir('..'); shutil.rmtree('work'); shutil.rmtree('notebooks/parameters', True)"
REWRITES = "open('../lib/lessons/exercise.py', 'w').write('')"
CALLS = "try: socket.create_connection(('127.0.0.1', {}), 3); half = print\nexcept OSError: pass"


def write(path, *sources):
    """A notebook of the lesson with these cells; the checks are below their headings."""
    cells = [new_markdown_cell("# 01 · A lesson"), new_code_cell(FIRST)]
    for source in sources:
        number, tier = (1, "core") if "double" in source else (2, "warm-up")
        tags = ["exercise"] if "check_" in source else []
        if tags:
            cells.append(new_markdown_cell(f"### Exercise {number} ({tier}): it"))
        cells.append(new_code_cell(source, metadata={"tags": tags}))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells), path)


@pytest.fixture
def book(tmp_path):
    """A workbook with this code and one lesson, and an empty folder of submissions."""
    (tmp_path / "lib").symlink_to(ROOT / "lib")
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "handed_in").mkdir()
    write(tmp_path / "notebooks/01_lesson.ipynb", *RIGHT)
    return tmp_path


def graded(book, seconds):
    """Each student's results, in the order of the exercises, from the CSV file."""
    config = ExercisesConfig((), book / "handed_in", book / "grades.csv", seconds)
    assert grade_submissions(config, root=book) == 0
    results = {}
    with open(book / "grades.csv", newline="") as file:
        for row in csv.DictReader(file):
            results.setdefault(row["student"], []).append((row["result"], row["points"]))
    return results


def test_a_submission_that_removes_its_folder_and_dies_keeps_what_it_had_solved(book, capsys):
    write(book / "handed_in/ada/01_lesson.ipynb", RIGHT[0], REMOVES, "os._exit(1)", RIGHT[1])
    before = sorted(path for path in book.rglob("*") if "lib" not in path.parts)
    assert graded(book, 300) == {"ada": [("passed", "3"), ("blocked", "0")]}
    after = sorted(path for path in book.rglob("*") if "lib" not in path.parts)
    assert after == sorted([*before, book / "grades.csv"])
    assert "| ada     | 1 passed, 1 blocked |      3 |   4 |" in capsys.readouterr().out


@pytest.mark.slow
def test_ten_submissions_are_graded_each_by_itself(book):
    folder = book / "handed_in"
    server = socket.create_server(("127.0.0.1", 0))
    calls = CALLS.format(server.getsockname()[1])
    students = {
        "ada": RIGHT,
        "bob": (RIGHT[0], STUB),
        "carl": (ENDLESS, *RIGHT),
        "dana": ("check = lambda *given: print('right: as expected')", *RIGHT),
        "eve": (REWRITES, *RIGHT),
        "finn": (REMOVES, *RIGHT),
        "gil": (DOUBLE.format("n * n"), RIGHT[1]),
        "hal": (RIGHT[0], calls, "check_half(half)", RIGHT[1]),
    }
    for name, sources in students.items():
        write(folder / f"{name}/01_lesson.ipynb", *sources)
    write(folder / "ivy_01_lesson.ipynb", *RIGHT)
    (folder / "jon").mkdir()
    (folder / "jon/01_lesson.ipynb").write_text("no notebook")
    both = [("passed", "3"), ("passed", "1")]
    assert graded(book, 20) == {
        "ada": both,
        "bob": [("passed", "3"), ("not attempted", "0")],
        "carl": [("blocked", "0")] * 2,
        "dana": [("tampered", "0")] * 2,
        "eve": [("tampered", "0")] * 2,
        "finn": both,
        "gil": [("failed", "0"), ("passed", "1")],
        "hal": both,
        "ivy": both,
        "jon": [("missing", "0")] * 2,
    }
    if offline():
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_of_several_versions_the_newest_counts(book, capsys):
    folder = book / "handed_in"
    names = ("ada/01_lesson.ipynb", "ada/a/01_lesson.ipynb", "ada_01_Lesson (1).ipynb")
    for age, name in enumerate(names):
        write(folder / name, *RIGHT)
        os.utime(folder / name, (10**9 - age,) * 2)
    (found,) = find_submissions(folder, (), book)
    assert (found.student, found.path) == ("ada", folder / names[0])
    assert capsys.readouterr().out.count("ada handed in 01_lesson more than once") == 2
    for name in ("01_lesson.ipynb", "01_lesson (1).ipynb"):
        write(folder / name, *RIGHT)
    # work of several students
    assert len(find_submissions(folder, (), book)) == 3


def test_every_student_is_found_and_what_is_missing_is_named(book, capsys, monkeypatch):
    write(book / "notebooks/02_more.ipynb", *RIGHT)
    folder = book / "handed_in"
    write(folder / "ada/deep/my 01_lesson.ipynb", *RIGHT)
    write(folder / "ada/02_more.ipynb", *RIGHT)
    # by the number in its first heading
    write(folder / "bob.ipynb", *RIGHT)
    write(folder / "carl-02_more.ipynb", *RIGHT)
    (folder / "dana").mkdir()
    (folder / "notes.txt").write_text("")
    found = find_submissions(folder, (), book)
    students = [(each.student, each.lesson.stem, bool(each.path)) for each in found]
    assert students == [
        ("ada", "01_lesson", True), ("ada", "02_more", True),
        ("bob", "01_lesson", True), ("bob", "02_more", False),
        ("carl", "01_lesson", False), ("carl", "02_more", True),
        ("dana", "01_lesson", False), ("dana", "02_more", False),
    ]  # fmt: skip
    assert len(find_submissions(folder, ("02",), book)) == 4
    monkeypatch.setattr(submissions, "_run", lambda *given: None)
    config = ExercisesConfig(submissions=folder, seconds=1)
    grade_submissions(config, root=book)
    (folder / "notes.txt").write_text("my grades")
    with pytest.raises(ValueError, match=r"csv must be new or a table of grades, got .*notes.txt"):
        grade_submissions(dataclasses.replace(config, csv=folder / "notes.txt"), root=book)
    assert "dana, 02_more: half is missing: not handed in\n" in capsys.readouterr().out
    (folder / "empty").mkdir()
    for name, said in (("none", "must be a folder"), ("empty", "must have notebooks of students")):
        assert main(["exercises", "--submissions", str(folder / name)]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["exercises", "--csv", "x.csv"])
    assert "csv must be left out without submissions" in " ".join(capsys.readouterr().err.split())
