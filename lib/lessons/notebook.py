"""Imported first by notebooks: figures in the house style, small sizes, the folder to write to.

Loads none of the tools that run notebooks, so that a notebook starts fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from lib.core.files import ROOT

# The output type that holds the key figures in an executed notebook.
KEY_FIGURES = "application/vnd.workbook.key-figures+json"


def load_ipython_extension(shell: Any) -> None:
    """Give figures the house style, sharp and with an alt text: `%load_ext lib.lessons.notebook`.

    `%%writefile` names its file only. Also puts the workbook's folder on the import path, for
    processes started in other folders.
    """
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    from lib.core.figures import describe_figures, use_house_style

    sys.path.insert(0, str(ROOT))
    use_house_style()
    set_matplotlib_formats("retina")
    describe_figures(shell.display_formatter.formatters["image/png"])
    write_file = shell.find_cell_magic("writefile")

    def writefile(line: str, cell: str) -> None:
        """`%%writefile`, which names the file and not the way to its folder."""
        with contextlib.redirect_stdout(None):
            write_file(line, cell)
        print("Writing", Path(line.split()[-1].strip("\"'")).name)

    shell.register_magic_function(writefile, "cell")


def small() -> bool:
    """Whether notebooks should use their smallest sizes: WORKBOOK_SMALL=1, as tests set it."""
    return os.environ.get("WORKBOOK_SMALL", "") not in ("", "0")


def workspace(root: Path = ROOT) -> Path:
    """The folder whose data/ and artifacts/ are written to.

    The workbook's own, or the working folder where the workbook is read-only (as on Kaggle). Small
    runs, as tests make them, work in artifacts/small: nothing of the reader's is in their way.
    """
    if not os.access(root, os.W_OK):
        return Path.cwd()
    return root / "artifacts/small" if small() else root


def run_folder(name: str, *, start_again: bool) -> Path:
    """The folder in artifacts/runs of the newest run called `name`, or one for a new run.

    Nothing is ever removed: where `name` has a run, the next ones are called `name-2`, `name-3`, …
    The folder may not exist yet.
    """
    runs = workspace() / "artifacts/runs"
    pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    found = [match for path in runs.glob("*") if (match := pattern.fullmatch(path.name))]
    newest = max((int(match[1] or 1) for match in found), default=0)
    number = newest + 1 if start_again else max(newest, 1)
    folder = runs / (name if number == 1 else f"{name}-{number}")
    if start_again and newest:
        print(f"a new run, artifacts/runs/{folder.name}; earlier ones stay (python -m lib runs)")
    return folder


def key_figures(**figures: Any) -> None:
    """Show two or three results of a notebook, which the report's front page shows too.

    Args:
        figures: name with unit -> number or text; `bits_per_byte` reads "bits per byte",
            `tokens_per_s` "tokens/s".
    """
    from IPython.display import display

    from lib.core.records import format_value

    # pairs, because notebooks are stored with the keys of mappings sorted
    names = [re.sub(r" per s\b", "/s", name.replace("_", " ")) for name in figures]
    shown = list(zip(names, map(format_value, figures.values())))
    line = " · ".join(f"{name}: {value}" for name, value in shown)
    display({KEY_FIGURES: shown, "text/plain": f"Key figures. {line}"}, raw=True)
