"""Check that the notebooks are in the state in which they are committed; run by `make lint`.

The reader's copies, in work/, are not looked at.

Each complaint names the notebook, the cell (counted from 1, Markdown included) and what to do.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
import papermill

from lib.lessons import show
from lib.tools.publish.cells import FIRST_CELL, METADATA, cell_metadata
from lib.tools.publish.pages import mathml_errors
from lib.tools.publish.plan import parameter_names

ROOT = Path(__file__).resolve().parent.parent

# Tags that a tool or this workbook acts on; a misspelled one would be ignored silently.
TAGS = {
    "parameters",
    "nbval-check-output",
    "nbval-ignore-output",
    "nbval-skip",
    "nbval-raises-exception",
    "exercise",
    "folded",
    "solution",
    "extra",
}
# Folders at the root of one machine's disk; /kaggle is the same for everybody.
MACHINE_PATH = re.compile(
    r"(?<![\w./:-])/(?:home|root|Users|work\w*|mnt|media|tmp|opt|var|private|content)/[\w.-]+"
    r"|(?<!\w)[A-Za-z]:\\\\?[\w.-]+"
)
# Functions that return what Jupyter shows if it is the value of a cell.
RETURN_WHAT_IS_SHOWN = {
    name
    for name, function in vars(show).items()
    if "return" in getattr(function, "__annotations__", {})
    and function.__annotations__["return"] in ("HTML", "Markdown")
}
REMOTE_PICTURE = re.compile(r"!\[[^]]*\]\(\s*https?:|<(?:img|script|iframe)\b[^>]*https?:")


def main(folder: Path = ROOT / "notebooks") -> int:
    complaints = []
    for path in sorted(folder.glob("*.ipynb")):
        complaints += [f"{path.name}: {complaint}" for complaint in check(path)]
    for complaint in complaints:
        print(complaint)
    return int(bool(complaints))


def check(path: Path) -> Iterator[str]:
    """Yield a complaint for each fault of the notebook at `path`."""
    if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name):
        yield "is not named like 01_topic.ipynb, so nothing runs it; rename it"
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        yield f"is no valid notebook: {error}"
        return
    if dict(notebook.metadata) != METADATA:
        extra = sorted(set(notebook.metadata) - set(METADATA)) or "kernelspec or language_info"
        yield f"metadata is not clean ({extra}); run: make format"
    yield from _check_order(notebook.cells)
    yield from _check_parameters(path)
    count = 0
    for number, cell in enumerate(notebook.cells, start=1):
        for complaint in _check_cell(cell):
            yield f"cell {number}: {complaint}"
        if cell.cell_type == "code":
            count += 1
            if cell.execution_count != count:
                found = cell.execution_count or "none"
                yield f"cell {number}: execution count is {found}, not {count}; run: make notebooks"


def _check_order(cells: list) -> Iterator[str]:
    if not cells or cells[0].cell_type != "markdown" or not cells[0].source.startswith("# "):
        yield "cell 1: is not a Markdown cell that starts with the title, `# …`; add one"
    code = [cell for cell in cells if cell.cell_type == "code"]
    if not code or code[0].source != FIRST_CELL:
        yield "the first code cell is not FIRST_CELL of lib/tools/publish/cells.py; copy it"
    tagged = [n for n, c in enumerate(cells, 1) if "parameters" in c.metadata.get("tags", [])]
    if len(tagged) != 1:
        where = f"cells {tagged}" if tagged else "no cell"
        yield f"{where} tagged `parameters`; tag the one cell that sets the sizes"


def _check_parameters(path: Path) -> Iterator[str]:
    """Complain about parameters that `papermill --help-notebook` cannot explain."""
    known = papermill.inspect_notebook(path)
    for name in sorted(parameter_names(path)):
        about = known.get(name, {"inferred_type_name": "None", "help": ""})
        if about["inferred_type_name"] == "None" or not about["help"]:
            example = f"{name}: int = 3  # what it is"
            yield f"parameter {name} needs a type and a comment on its line, as in `{example}`"


def _check_cell(cell: dict) -> Iterator[str]:
    if dict(cell.metadata) != cell_metadata(cell.metadata.get("tags")):
        yield f"metadata {sorted(cell.metadata)} is not clean; run: make format"
    for tag in cell.metadata.get("tags", []):
        if tag not in TAGS:
            yield f"tag {tag!r} means nothing here; known: {', '.join(sorted(TAGS))}"
    if not cell.source.strip():
        yield "is empty; delete it"
    if cell.cell_type == "markdown":
        if REMOTE_PICTURE.search(cell.source):
            yield "loads something from the network; store it beside the notebook"
        for formula, error in mathml_errors(cell.source):
            yield f"formula {formula!r} cannot be shown in the report: {error}"
    yield from _check_paths("source", cell.source)
    if cell.cell_type == "code":
        yield from _check_outputs(cell)
        for name in _lost(cell.source):
            yield f"what {name} returns is lost before the cell's end; call it last, or display it"


def _check_outputs(cell: dict) -> Iterator[str]:
    if not cell.outputs and _shows_something(cell.source):
        yield "has no output but makes one; run: make notebooks"
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"ends in {output.ename}: {output.evalue}; repair it and run: make notebooks"
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            yield "holds a live widget, dead in the file; run: make notebooks"
        texts = [output.get("text", ""), *map(str, output.get("data", {}).values())]
        for text in texts:
            # base64 of a picture may contain anything
            if len(text) < 100_000 and not re.fullmatch(r"[A-Za-z0-9+/=\s]{200,}", text):
                yield from _check_paths("output", text)


def _check_paths(where: str, text: str) -> Iterator[str]:
    if found := MACHINE_PATH.search(text):
        yield f"{where} has a path of one machine, {found[0]!r}; show it relative to the workbook"


def _statements(source: str) -> list[ast.stmt]:
    """The statements of a cell; none if it has magics."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


def _called(statements: Iterable[ast.stmt]) -> set[str]:
    """Names of the functions that are called by themselves, without use of what they return."""
    calls = [s.value for s in statements if isinstance(s, ast.Expr)]
    found = [call.func for call in calls if isinstance(call, ast.Call)]
    return {function.id for function in found if isinstance(function, ast.Name)}


def _lost(source: str) -> list[str]:
    """Functions of `lib.lessons.show` whose table or code a cell makes and does not show."""
    return sorted(_called(_statements(source)[:-1]) & RETURN_WHAT_IS_SHOWN)


def _shows_something(source: str) -> bool:
    """Return whether the cell surely makes an output: it prints, displays or ends in a value."""
    body = _statements(source)
    names = _called(body)
    last = body[-1] if body else None
    bare = isinstance(last, ast.Expr) and not isinstance(last.value, (ast.Call, ast.Await))
    return bool(names & {"print", "display"}) or (bare and not source.rstrip().endswith(";"))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
