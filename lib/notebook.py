"""Notebooks: what their first cell needs, running them all, and storing their outputs.

`python -m lib run` (`make run`) ends in `run_notebooks`; `python -m lib.notebook refresh` and
`clean` are `make notebooks` and a part of `make format`. Importing this loads none of the tools
that all that needs, so that a notebook starts at once.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Under this type an executed notebook holds what `key_figures` was told.
KEY_FIGURES = "application/vnd.workbook.key-figures+json"

# The first code cell of every notebook, word for word; `make lint` compares. It stands there in
# full because nothing can be imported before it has run.
FIRST_CELL = """\
# Find the workbook: in this folder, above it, or in a bundle attached on Kaggle.
import sys
from pathlib import Path

attached = [p for depth in ("*", "*/*", "*/*/*") for p in Path("/kaggle/input").glob(depth)]
places = [Path.cwd(), *Path.cwd().parents, *attached]
root = next((place for place in places if (place / "lib/notebook.py").is_file()), None)
if root is None:
    raise FileNotFoundError("no workbook here: start in its folder, or give papermill --cwd")
sys.path.insert(0, str(root))

import lib.notebook

lib.notebook.setup()"""


def setup() -> None:
    """Give figures the house style, sharp and with a text instead; the first cell calls it."""
    if "IPython" in sys.modules:
        from IPython.core.interactiveshell import InteractiveShell
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        from lib.plots import describe_figures, use_house_style

        use_house_style()
        set_matplotlib_formats("retina")
        describe_figures(InteractiveShell.instance().display_formatter.formatters["image/png"])


def small() -> bool:
    """Whether notebooks should take their smallest sizes: WORKBOOK_SMALL=1, as tests set it."""
    return os.environ.get("WORKBOOK_SMALL", "") not in ("", "0")


def workspace(root: Path = ROOT) -> Path:
    """The folder whose data/ and artifacts/ are written to.

    The workbook's own, or the working folder where the workbook is read-only (as on Kaggle).
    """
    return root if os.access(root, os.W_OK) else Path.cwd()


def key_figures(**figures: Any) -> None:
    """Show two or three results of a notebook, which the report's front page shows too.

    Args:
        figures: name with unit -> number or text; `bits_per_byte` reads "bits per byte",
            `tokens_per_s` "tokens/s".
    """
    from IPython.display import display

    from lib.report import format_value

    # pairs, because notebooks are stored with the keys of mappings sorted
    names = [re.sub(r" per s\b", "/s", name.replace("_", " ")) for name in figures]
    shown = list(zip(names, map(format_value, figures.values())))
    line = " · ".join(f"{name}: {value}" for name, value in shown)
    display({KEY_FIGURES: shown, "text/plain": f"Key figures. {line}"}, raw=True)


def run_notebooks(
    notebooks: Sequence[str] = (),
    *,
    parameters: str | os.PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    report: Path | None = None,
    workers: int | None = None,
    root: Path = ROOT,
) -> int:
    """Run notebooks in parallel processes and write them as web pages with an index.

    A notebook whose parameters cell says `# needs: 01` runs after 01 where both are run, and is
    skipped when 01 failed; all others go on. What an earlier run left of them moves into
    `previous/`, where the newest runs are kept; the index leads to it.

    Args:
        notebooks: numbers (`01`, `1`), names (`01_tokenizer`) or file names; all by default.
        parameters: a YAML file, or the name of one in notebooks/parameters/. It maps a notebook's
            name to a mapping of its parameters.
        overrides: parameters for each of `notebooks` that has them; they win over the file.
        report: folder for the pages; artifacts/report by default.
        workers: notebooks run at a time, each in a process and a kernel of its own; by default one
            for two cores.

    Returns:
        The exit code: 0, 1 when a notebook failed, 2 when what was asked for makes no sense.
    """
    from lib.notebook_plan import find_notebooks, plan
    from lib.notebook_runs import plain, run_all
    from lib.parallel import available_cpus
    from lib.site_index import write_index

    workers = workers or max(1, available_cpus() // 2)
    report = Path(report or workspace(root) / "artifacts/report").resolve()
    try:
        every = find_notebooks((), root)
        jobs = plan(find_notebooks(notebooks, root), parameters, overrides, root)
        report.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        results = run_all(jobs, report, str(parameters or ""), workers)
    finally:
        index = write_index(report, [path.stem for path in every])
    for result in results:
        if result.traceback:
            print(f"\n{result.name} failed:\n{plain(result.traceback)}", file=sys.stderr)
    print(f"\nReport: {index}")
    return int(any(result.status != "done" for result in results))


def refresh_notebooks(notebooks: Sequence[str] = (), *, root: Path = ROOT) -> int:
    """Run notebooks one after another and store their outputs in them, as they are committed.

    Returns the exit code; a notebook that fails is left as it was.
    """
    import nbformat
    from papermill import PapermillExecutionError

    from lib.notebook_cells import clean, static_widgets
    from lib.notebook_kernel import execute
    from lib.notebook_plan import find_notebooks
    from lib.notebook_runs import plain

    failed = 0
    for path in find_notebooks(notebooks, root):
        started = time.monotonic()
        try:
            executed = execute(path, None)
        except (PapermillExecutionError, RuntimeError) as error:
            print(f"{path.stem} failed and is left as it was:\n{plain(str(error))}")
            failed = 1
            continue
        nbformat.write(clean(static_widgets(executed)), path)
        print(f"{path.stem}: outputs stored after {time.monotonic() - started:.1f} s", flush=True)
    return failed


def clean_notebooks(root: Path = ROOT) -> int:
    """Bring the notebooks' metadata to the form that is committed, without running them."""
    import nbformat

    from lib.notebook_cells import clean
    from lib.notebook_plan import find_notebooks

    for path in find_notebooks((), root):
        notebook = nbformat.read(path, as_version=4)
        cleaned = clean(notebook)
        if cleaned != notebook:
            nbformat.write(cleaned, path)
            print(f"{path.stem}: metadata cleaned")
    return 0


def main() -> int:
    """The command line that the Makefile uses."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m lib.notebook")
    parser.add_argument("command", choices=("refresh", "clean"))
    parser.add_argument("--notebooks", nargs="+", default=(), metavar="NUMBER")
    args = parser.parse_args()
    try:
        if args.command == "refresh":
            return refresh_notebooks(args.notebooks)
        return clean_notebooks()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
