"""Grading of what students handed in: `python -m lib exercises --submissions DIR --csv FILE`.

DIR has a folder of notebooks for each student, or a notebook. Each notebook runs in a process of
its own and in a copy of the workbook, which is removed afterwards: it reaches neither the teacher's
workbook nor another student's work. Time, memory and the size of files are limited, and where the
system allows it there is no network. That stops accidents, not attacks: for people whom you do not
know, run all this in a container.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lib.core.files import ROOT, write_atomically
from lib.core.hardware import available_cpus
from lib.core.records import to_markdown
from lib.core.settings import require
from lib.core.terminal import bar_size
from lib.tools.publish.cells import read_notebook
from lib.tools.publish.exercise_report import ExercisesConfig, exercises_in, report_exercises
from lib.tools.publish.plan import find_notebooks

# What an exercise of each tier is worth.
POINTS = {"warm-up": 1, "core": 3, "extra": 1, "open": 2}
# The parts of the workbook that notebooks read, without what its owner has made.
PARTS = ("lib", "notebooks", "artifacts")
OWN = shutil.ignore_patterns("runs", "local", "report", "small", "screenshots", "kaggle")
GIB = 2**30
# Seconds that a run may take beyond its notebook's cells.
BEYOND = 120
# Starts a run with limits: memory, size of a file, and, in a network of its own, just this machine.
START = f"""
import os, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_DATA, ({16 * GIB},) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * GIB},) * 2)
except (ImportError, ValueError, OSError):
    pass
if sys.argv[1] == "offline":
    import fcntl, socket, struct
    # SIOCSIFFLAGS: the loopback device is up and running
    fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 0x41))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True)
class Submission:
    """A notebook that a student was to hand in."""

    student: str
    lesson: Path
    """The lesson's own notebook."""

    path: Path | None
    """The file that was handed in, or None."""

    def rows(self, answers: dict[str, dict[str, Any]], otherwise: str, why: str) -> list[dict]:
        """A row for each exercise of the lesson; those without an answer have another result."""
        date = datetime.fromtimestamp(self.path.stat().st_mtime) if self.path else None
        rows = []
        for asked in exercises_in(self.lesson):
            answer = answers.get(asked.exercise, {"result": otherwise, "verdict": why})
            worth = POINTS.get(asked.tier, 1)
            rows.append(
                {
                    "student": self.student,
                    "notebook": self.lesson.stem,
                    "exercise": asked.exercise,
                    "tier": asked.tier,
                    "result": answer["result"],
                    "points": worth * (answer["result"] == "passed"),
                    "of": worth,
                    "submitted": f"{date:%Y-%m-%d %H:%M}" if date else "",
                    "verdict": answer["verdict"],
                }
            )
        return rows


def exercises(config: ExercisesConfig) -> int:
    """List which exercises are solved: the reader's own, or those of all submissions."""
    return grade_submissions(config) if config.submissions else report_exercises(config)


def grade_submissions(config: ExercisesConfig, *, root: Path = ROOT) -> int:
    """Run every submission, print a table with a row for each student, and write all results.

    Returns:
        The exit code, 0: a failed exercise is no error.

    Raises:
        ValueError: there is no submission.
    """
    folder = config.submissions
    assert folder is not None
    found = find_submissions(folder, config.notebooks, root)
    if config.csv and config.csv.exists():
        is_ours = config.csv.read_text(encoding="utf-8", errors="replace").startswith("student,")
        require(is_ours, f"csv must be new or a table of grades, got {config.csv}")
    if not offline():
        print("the network stays on: this system does not let a process do without it")
    grade_one = functools.partial(grade, seconds=config.seconds, root=root)
    with ThreadPoolExecutor(max(1, available_cpus() // 2)) as pool:
        graded = pool.map(grade_one, found)
        bar = tqdm(graded, "notebooks", len(found), disable=None, leave=False, **bar_size())
        rows = [row for rows in bar for row in rows]
    print(to_markdown(list(_by_student(rows))))
    for row in rows:
        if row["result"] in ("missing", "tampered"):
            text = f"{row['student']}, {row['notebook']}: {row['exercise']} is {row['result']}"
            print(": ".join(filter(None, (text, row["verdict"]))))
    if config.csv:
        import pandas as pd

        write_atomically(config.csv, pd.DataFrame(rows).to_csv(index=False))
        print(config.csv)
    return 0


def find_submissions(folder: Path, wanted: Sequence[str], root: Path = ROOT) -> list[Submission]:
    """Return what each student was to hand in: the notebooks `wanted`, or those that anyone has.

    A student is a folder, or a notebook that names its lesson in its first heading, as `# 01 · …`.
    """
    require(folder.is_dir(), f"submissions must be a folder, got {folder}")
    lessons = find_notebooks(wanted, root)
    handed_in: dict[tuple[str, Path], Path] = {}
    students = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            students.append(entry.name)
            paths = sorted(entry.rglob("*.ipynb"))
        elif entry.suffix == ".ipynb":
            students.append(_student_of(entry, lessons))
            paths = [entry]
        else:
            continue
        for path in paths:
            lesson = _lesson_of(path, lessons)
            if ".ipynb_checkpoints" in path.parts or lesson is None:
                continue
            other = handed_in.get((students[-1], lesson))
            if other:
                print(f"{students[-1]} handed in {lesson.stem} more than once; the newest counts")
            if other is None or path.stat().st_mtime >= other.stat().st_mtime:
                handed_in[students[-1], lesson] = path
    require(handed_in, f"submissions must have notebooks of students, got none in {folder}")
    asked = [each for each in lessons if wanted or any(each == lesson for _, lesson in handed_in)]
    names = dict.fromkeys(students)
    return [Submission(name, each, handed_in.get((name, each))) for name in names for each in asked]


def _lesson_of(path: Path, lessons: Sequence[Path]) -> Path | None:
    """The lesson whose name a notebook has in its own, or whose number in its first heading."""
    for lesson in lessons:
        if lesson.stem in path.stem.lower():
            return lesson
    text = path.read_text(encoding="utf-8", errors="replace")
    number = re.search(r'"# (\d\d) · ', text)
    return next((each for each in lessons if number and each.stem[:2] == number[1]), None)


def _student_of(path: Path, lessons: Sequence[Path]) -> str:
    """The name of a student from that of a notebook: `ada` from `ada_01_tokenizer.ipynb`."""
    lesson = _lesson_of(path, lessons)
    # browsers number files that are downloaded again
    name = re.sub(r" ?\(\d+\)$", "", path.stem)
    if lesson:
        name = re.sub(lesson.stem, "", name, flags=re.IGNORECASE).strip(" _-")
    # without a name, files are told apart by theirs
    return name or path.stem


def grade(submission: Submission, *, seconds: float, root: Path = ROOT) -> list[dict[str, Any]]:
    """Run a submission in a copy of the workbook at `root`; return a row for each exercise."""
    if submission.path is None:
        return submission.rows({}, "missing", "not handed in")
    try:
        read_notebook(submission.path)
    except ValueError as error:
        return submission.rows({}, "missing", str(error))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        copy = Path(name) / "workbook"
        for part in PARTS:
            shutil.copytree(root / part, copy / part, ignore=OWN)
        (copy / "work").mkdir()
        shutil.copyfile(submission.path, copy / "work" / submission.lesson.name)
        before = _digest(copy)
        _run(copy, submission.lesson.stem, seconds)
        if _digest(copy) != before:
            return submission.rows({}, "tampered", "the notebook changed the workbook's own files")
        answers = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((copy / "artifacts/local/exercises.json").read_bytes())
            asked = exercises_in(submission.lesson)
            answers = {check.exercise: answer for check, answer in zip(asked, found, strict=True)}
    return submission.rows(answers, "blocked", f"the run did not end within {seconds} s")


def _run(copy: Path, notebook: str, seconds: float) -> None:
    """Run `python -m lib exercises` for a notebook in a `copy` of the workbook, with limits."""
    command = [*offline(), sys.executable, "-c", START, "offline" if offline() else "online"]
    command += ["-m", "lib", "exercises", "--notebooks", notebook, "--seconds", str(seconds)]
    home = copy.parent / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(copy)}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds + BEYOND)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
        process.wait()


@functools.cache
def offline() -> tuple[str, ...]:
    """The words before a command that give it a network of its own; empty where that cannot be."""
    words = ("unshare", "--user", "--map-root-user", "--net", "--")
    start = [sys.executable, "-c", START, "offline", "-c", ""]
    try:
        done = subprocess.run([*words, *start], capture_output=True)
    except OSError:
        return ()
    return words if done.returncode == 0 else ()


def _digest(copy: Path) -> str:
    """The SHA-256 of the code and the lessons in a copy of the workbook."""
    found = hashlib.sha256()
    for path in sorted([*copy.glob("lib/**/*.py"), *copy.glob("notebooks/*.ipynb")]):
        found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()


def _by_student(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """A row for each student: how many exercises ended how, the points, the newest date."""
    students: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        students.setdefault(row["student"], []).append(row)
    for student, own in students.items():
        counts = Counter(row["result"] for row in own)
        yield {
            "student": student,
            "results": ", ".join(f"{count} {result}" for result, count in counts.items()),
            "points": sum(row["points"] for row in own),
            "of": sum(row["of"] for row in own),
            "submitted": max(row["submitted"] for row in own),
        }
