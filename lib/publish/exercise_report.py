"""Which exercises of the notebooks are solved: `python -m lib exercises`.

The notebooks are run as they are, at small sizes, past cells that fail; each check of an exercise
leaves a line. An exercise whose check was not reached, since its cell failed or one that it needs,
is blocked.
"""

from __future__ import annotations

import ast
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from lib.core.files import ROOT, write_atomically
from lib.core.records import to_markdown
from lib.lessons.exercise import RESULTS
from lib.lessons.notebook import workspace
from lib.publish.run_notebooks import find_notebooks, read_notebook, run_past_errors

Result = Literal["passed", "failed", "not attempted", "blocked"]


@dataclass(frozen=True)
class Answer:
    """The result of an exercise."""

    notebook: str
    exercise: str
    tier: str
    result: Result
    verdict: str
    """The text that its check printed."""


def report_exercises(
    notebooks: Sequence[str] = (), *, folder: Path | None = None, output: Path | None = None
) -> int:
    """Run notebooks, print which of their exercises are solved, and write that as JSON.

    Args:
        notebooks: numbers (`01`) or names (`01_tokenizer`); default: all.
        folder: where they are (default: the reader's copies in `work/` if there are any, or else
            `notebooks/`).
        output: the JSON file (default: `artifacts/local/exercises.json`).

    Returns:
        The exit code, 0: an unsolved exercise is no error.

    Raises:
        ValueError: a file is no notebook; before any is run.
    """
    root = workspace()
    folder = folder or next((f for f in (root / "work",) if f.is_dir()), ROOT / "notebooks")
    output = output or root / "artifacts/local/exercises.json"
    answers = []
    paths = find_notebooks(notebooks, folder.parent, folder.name)
    expected = {path: exercises_in(path) for path in paths}
    for path in tqdm(paths, desc="notebooks", disable=None, leave=False):
        answers += answers_in(path, expected[path])
    write_atomically(output, json.dumps([asdict(answer) for answer in answers], indent=1))
    columns = ("notebook", "exercise", "tier", "result")
    print(to_markdown([asdict(answer) for answer in answers], columns))
    counts = Counter(answer.result for answer in answers)
    print(", ".join(f"{count} {result}" for result, count in counts.items()) or "no exercises")
    print(output)
    return 0


def answers_in(path: Path, expected: Sequence[str]) -> list[Answer]:
    """Run the notebook at `path`; return what became of each exercise that is `expected` there."""
    if not expected:
        return []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "results.jsonl"
        lines.touch()
        run_past_errors(path, {RESULTS: str(lines), "WORKBOOK_SMALL": "1"})
        found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    # of a check that ran twice, the last verdict
    by_name = {line["exercise"]: line for line in found}
    blocked = {"tier": "", "result": "blocked", "verdict": ""}
    return [Answer(path.stem, **({"exercise": n} | by_name.get(n, blocked))) for n in expected]


def exercises_in(path: Path) -> list[str]:
    """Return the names of the functions that the reader is asked for, in the notebook's order."""
    cells = read_notebook(path).cells
    stubs = (cell.source for cell in cells if "exercise" in cell.metadata.get("tags", []))
    return [name for stub in stubs for name in _checked(stub)]


def _checked(source: str) -> list[str]:
    """Return `f` for each call `exercises.check…(f)` in a cell, also in one that does not parse."""
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return _checked(source.rstrip().rpartition("\n")[2]) if "\n" in source.strip() else []
    return [
        call.args[0].id
        for call in calls
        if getattr(call.func, "attr", "").startswith("check")
        and call.args
        and isinstance(call.args[0], ast.Name)
    ]
