"""The functions that the reader wrote in notebook 02, for the model of notebook 03."""

from __future__ import annotations

import ast
import contextlib
import dis
import json
from pathlib import Path
from types import CodeType, SimpleNamespace
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
    unread = f"{path.name}: no function {{}} could be read: is there a syntax error in its cell?"
    for name in NEEDED:
        if name not in names and name not in EXERCISES:
            raise NameError(unread.format(f"`{name}`"))
    for name in EXERCISES:
        exercise = getattr(exercises, name)
        text = unread.format(f"`{name}`")
        if name in names:
            text = verdict(exercise, names[name])
        if not text.startswith("right"):
            is_block = exercise is exercises.block
            names[name] = exercises.block_with(names) if is_block else exercise.solve
            # why, where there is an answer
            print(f"{name}: {text}\n" if text != NOT_ATTEMPTED else "", end="")
    whose(*(names[name] for name in EXERCISES))
    return SimpleNamespace(**{name: names[name] for name in NEEDED})


def read_functions(path: Path) -> dict[str, Any]:
    """Run the definitions of a notebook that NEEDED functions use, and nothing else.

    These are imports, functions, classes and assignments at the top level of cells.

    Returns:
        The names that they define.
    """
    found = definitions(path)
    wanted, seen = ["*", *NEEDED], set[str]()
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            wanted += [n for code in found if name in stored(code) for n in looked_up(code)]
    names: dict[str, Any] = {"__name__": path.stem}
    for code in found:
        if seen.intersection(stored(code)):
            # it may be made of what is no definition; a call will say what is missing
            with contextlib.suppress(Exception):
                exec(code, names)
    return names


def definitions(path: Path) -> list[CodeType]:
    """The imports, functions, classes and assignments of a notebook, each compiled."""
    found = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        try:
            body = ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else []
        except SyntaxError:
            # commands of Jupyter's, or a cell that is not finished
            continue
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        for part in body:
            if isinstance(part, (*kinds, ast.Assign, ast.AnnAssign, ast.AugAssign)):
                try:
                    code = compile(ast.Module([part], []), path.name, "exec", dont_inherit=True)
                except SyntaxError:
                    # `await`, which only a notebook has
                    continue
                # not `rotate = exercises.take(rotate)`
                if isinstance(part, kinds) or stored(code).isdisjoint(NEEDED):
                    found.append(code)
    return found


def stored(code: CodeType) -> set[str]:
    """The names that a statement defines; "*" for `from module import *`."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    return found | {"*"} if ("*",) in code.co_consts else found


def looked_up(code: CodeType) -> set[str]:
    """The names that a statement, and the functions in it, look up in the notebook."""
    found = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME"
    }
    return found.union(*(looked_up(c) for c in code.co_consts if isinstance(c, CodeType)))
