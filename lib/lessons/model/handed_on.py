"""The functions that the reader wrote in notebook 02, for the model of notebook 03."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lib.core.files import ROOT
from lib.lessons.exercise import NOT_ATTEMPTED, verdict, whose
from lib.lessons.model import exercises

NOTEBOOK = "02_model.ipynb"
NEEDED = ("rms_norm", "rotate", "attention", "swiglu", "block", "init_weights", "transformer")
# In an order in which each one calls only those before it.
EXERCISES = ("rotate", "attention", "block")


def model_of_notebook_02() -> SimpleNamespace:
    """The functions of notebook 02 as it is saved beside this one, or in the workbook's notebooks.

    In place of an exercise that is not solved there is the solution; what is whose is printed.
    """
    path = next(p for p in (Path(NOTEBOOK), ROOT / "notebooks" / NOTEBOOK) if p.is_file())
    names = read_functions(path)
    given = [name for name in NEEDED if name not in EXERCISES]
    if missing := ", ".join(name for name in given if name not in names):
        raise NameError(f"{path} has no function {missing}; or its cell has a syntax error")
    for name in EXERCISES:
        exercise = getattr(exercises, name)
        text = f"{path.name} has no function {name}; or its cell has a syntax error"
        if name in names:
            text = verdict(exercise, names[name])
        if not text.startswith("right"):
            names[name] = exercise.solve
            # why, where there is an answer
            print(f"{name}: {text}\n" if text != NOT_ATTEMPTED else "", end="")
    whose(*(names[name] for name in EXERCISES))
    return SimpleNamespace(**{name: names[name] for name in NEEDED})


def read_functions(path: Path) -> dict[str, Any]:
    """Run a notebook's imports, functions and constants, and nothing else; return its names."""
    found: list[ast.stmt] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        try:
            body = ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else []
        except SyntaxError:
            # commands of Jupyter's, or a cell that is not finished
            continue
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
        found += [part for part in body if isinstance(part, kinds) or is_constant(part)]
    names: dict[str, Any] = {"__name__": path.stem}
    for statement in found:
        # a constant may be made of what was not run
        allowed = (NameError,) if is_constant(statement) else ()
        with contextlib.suppress(*allowed):
            exec(compile(ast.Module([statement], []), path.name, "exec"), names)
    return names


def is_constant(statement: ast.stmt) -> bool:
    """Whether it is an assignment such as `HALF = 2` or `LATER = -math.inf`, without a call."""
    computed = (ast.Call, ast.Subscript, ast.comprehension, ast.Await)
    return isinstance(statement, ast.Assign) and not any(
        isinstance(part, computed) for part in ast.walk(statement)
    )
