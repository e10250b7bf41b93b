"""Which exercises of the notebooks are solved: `python -m lib exercises`.

The notebooks are run as they are, at small sizes, past cells that fail; each check of an exercise
leaves a line. An exercise whose check was not reached, since its cell failed or one that it needs,
is blocked. It is missing if no cell checks it any more, as the lesson's own notebook does, and
tampered if its check ran without a verdict, since something else has taken its name.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from tqdm import tqdm

from lib.core.files import ROOT, write_atomically
from lib.core.records import to_markdown
from lib.core.settings import PositiveInt, check, settings
from lib.core.terminal import bar_size
from lib.lessons.exercise import RESULTS
from lib.lessons.notebook import workspace
from lib.tools.publish.cells import read_notebook
from lib.tools.publish.execute import execute, kill
from lib.tools.publish.plan import find_notebooks

# check_merge(merge), exercises.check(mine, "merge"), order = exercises.take(order)
CALL = re.compile(
    r"""^[^#\n]*?(?<!def )\b(check\w*|take)\(\s*(\w+)\b\s*(?:,\s*["'](\w+)["'])?\s*[,)]""",
    re.MULTILINE,
)
# ### Exercise 2 (core): learn the merges
TIER = re.compile(r"^### (?:Exercise|Puzzle) \d+ \(([\w-]+)\)", re.MULTILINE)


@settings
class ExercisesConfig:
    """Which notebooks to run, and whose."""

    notebooks: tuple[str, ...] = ()
    """Numbers (`01`) or names (`01_tokenizer`); none = all, or all that were handed in."""

    submissions: Path | None = None
    """Folder with a folder or a notebook of each student, to grade. None = your own, in work/."""

    csv: Path | None = None
    """With `submissions`: write a row for each exercise of each student to this file."""

    seconds: PositiveInt = 900
    """Most seconds for a notebook; exercises that are not reached by then are blocked."""

    def __post_init__(self) -> None:
        check(self, "csv", self.submissions or not self.csv, "left out without submissions")


def report_exercises(config: ExercisesConfig) -> int:
    """Run notebooks, print which of their exercises are solved, and write that as JSON.

    They are the reader's copies in `work/` if there are any, or else those in `notebooks/`.

    Returns:
        The exit code, 0: an unsolved exercise is no error.

    Raises:
        ValueError: a file is no notebook; before any is run.
    """
    root = workspace()
    folder = root / "work" if (root / "work").is_dir() else ROOT / "notebooks"
    output = root / "artifacts/local/exercises.json"
    answers = []
    paths = find_notebooks(config.notebooks, folder.parent, folder.name)
    for path in paths:
        # one that is no notebook is named before any is run
        read_notebook(path)
    for path in tqdm(paths, desc="notebooks", disable=None, leave=False, **bar_size()):
        answers += answers_in(path, config.seconds)
    write_atomically(output, json.dumps(answers, indent=1))
    print(to_markdown(answers, ("notebook", "exercise", "tier", "result")))
    counts = Counter(answer["result"] for answer in answers)
    print(", ".join(f"{count} {result}" for result, count in counts.items()) or "no exercises")
    print(output)
    return 0


@dataclass(frozen=True)
class Check:
    """A call `exercises.check(merge)` or `exercises.check_merge(merge)` in a notebook."""

    name: str
    """`check merge` where one function checks all; else `check_merge`."""

    exercise: str
    """`merge`, the function that the reader is asked for."""

    cell: int
    """The number of its cell."""

    tier: str = ""
    """The word in the heading above it: warm-up, core, extra or open."""


def answers_in(path: Path, seconds: float = 900) -> list[dict[str, str]]:
    """Run the notebook at `path`; return what became of each of its exercises.

    Those are the ones of the lesson's own notebook of that name, and others that it may have. After
    `seconds` the kernel is ended.

    Returns:
        notebook, exercise, tier, result (passed, failed, not attempted, blocked, missing or
        tampered) and verdict, the text that its check printed.
    """
    cells = read_notebook(path).cells
    checks = [check for number, cell in enumerate(cells) for check in checks_in(cell, number)]
    lesson = ROOT / "notebooks" / path.name
    asked = exercises_in(lesson if lesson.exists() else path)
    if not asked:
        return []
    by_name, done, failed = _verdicts(path, seconds)
    answers = []
    for wanted in asked:
        # a copy may call its function something else
        own = [check for check in checks if check.name == wanted.name]
        own = [check for check in own if check.exercise == wanted.exercise] or own[-1:]
        name = own[-1].exercise if own else wanted.exercise
        if name in by_name:
            became: dict = by_name[name]
        elif not own:
            became = {"result": "missing", "verdict": "no cell checks it"}
        elif own[-1].cell >= done:
            why = f"not reached: the run ended before, or took more than {seconds} s"
            became = {"result": "blocked", "verdict": why}
        elif own[-1].cell in failed:
            became = {"result": "blocked", "verdict": "its cell failed before the check"}
        else:
            became = {"result": "tampered", "verdict": "its check ran and gave no verdict"}
        about = {"notebook": path.stem, "exercise": name, "tier": "", "result": "", "verdict": ""}
        answers.append(about | became | ({"tier": wanted.tier} if wanted.tier else {}))
    return answers


def _verdicts(path: Path, seconds: float) -> tuple[dict[str, dict], int, set[int]]:
    """Run a notebook; return the verdict on each exercise, how many cells ran, and which failed.

    Of a check that ran twice, it is the last one.
    """
    notebook, done, clients = read_notebook(path), 0, set[NotebookClient]()

    def on_cell(count: int) -> None:
        nonlocal done
        done = count

    def end() -> None:
        for client in list(clients):
            kill(client)

    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "results.jsonl"
        lines.touch()
        environment = {RESULTS: str(lines), "WORKBOOK_SMALL": "1"}
        timer = threading.Timer(seconds, end)
        timer.start()
        # a kernel that was ended, or died, or removed the folder that it ran in
        with contextlib.suppress(RuntimeError, OSError):
            execute(
                notebook,
                path.parent,
                environment=environment,
                past_errors=True,
                on_cell=on_cell,
                clients=clients,
            )
        timer.cancel()
        text = lines.read_text(encoding="utf-8") if lines.exists() else ""
    verdicts = [json.loads(line) for line in text.splitlines()]
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    failed = {i for i, found in enumerate(outputs) if any(o.output_type == "error" for o in found)}
    return {verdict["exercise"]: verdict for verdict in verdicts}, done, failed


def exercises_in(path: Path) -> list[Check]:
    """Return the checks of a notebook's exercises, in its order."""
    found, tier = [], ""
    for number, cell in enumerate(read_notebook(path).cells):
        if cell.cell_type == "markdown" and (heading := TIER.search(cell.source)):
            tier = heading[1]
        elif "exercise" in cell.metadata.get("tags", []):
            found += [replace(check, tier=tier) for check in checks_in(cell, number)]
            tier = ""
    return found


def checks_in(cell: Any, number: int) -> list[Check]:
    """Return the checks of a cell, also of one that does not parse."""
    found = []
    for name, given, other in CALL.findall(cell.source) if cell.cell_type == "code" else ():
        if name in ("check", "take"):
            # the second argument tells which one, if the function is called something else
            name = f"check {other or given}"
        found.append(Check(name, given, number))
    return found
