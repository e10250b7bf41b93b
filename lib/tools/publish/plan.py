"""Which notebooks are run, with which parameters, and which of them run alone."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.core.settings import require, settings
from lib.tools.publish.cells import read_notebook

# Ends the name of a new version beside a copy that the reader changed: 08_ddp.new.ipynb
NEW = ".new"


@settings
class NotebooksConfig:
    """Which notebooks."""

    notebooks: tuple[str, ...] = ()
    """Numbers (`01`) or names (`01_tokenizer`); none = all."""


def find_notebooks(selection: Sequence[str], root: Path, name: str = "notebooks") -> list[Path]:
    """Return the numbered notebooks in reading order, or only those that `selection` names.

    They are in the folder called `name` of the workbook at `root`.
    """
    known = sorted((root / name).glob("[0-9][0-9]_*.ipynb"))
    known = [path for path in known if not path.stem.endswith(NEW)]
    if not known:
        raise ValueError(f"no notebook is named like 01_topic.ipynb in {root / name}")
    chosen = set()
    for wanted in selection:
        stem = Path(wanted).name.removesuffix(".ipynb")
        found = {
            path for path in known if stem in (path.stem, path.stem[:2], path.stem[:2].lstrip("0"))
        }
        if not found:
            names = _known(path.stem for path in known)
            raise ValueError(f"no notebook is called {wanted!r}; {names}")
        chosen |= found
    return [path for path in known if path in chosen or not selection]


@dataclass(frozen=True)
class Job:
    """One notebook to run."""

    source: Path
    parameters: dict[str, Any] = field(default_factory=dict)

    runs_alone: bool = False
    """Whether no other notebook may run beside it, because its numbers are timings."""

    @property
    def name(self) -> str:
        return self.source.stem


def plan(notebooks: Sequence[Path], parameters: str | os.PathLike | None, root: Path) -> list[Job]:
    """Return what to run with which parameters (see `run_notebooks`), with every name checked."""
    known = {path.stem: path for path in find_notebooks((), root)}
    sections = read_parameters(parameters, root) if parameters else {}
    for name, values in sections.items():
        if name not in known:
            raise ValueError(f"{parameters}: no notebook is called {name!r}; {_known(known)}")
        has = parameter_names(known[name])
        for unknown in sorted(values.keys() - has):
            raise ValueError(f"{parameters}: {name} has no parameter {unknown!r}; {_known(has)}")
    return [
        Job(
            path,
            sections.get(path.stem, {}),
            bool(re.search(r"^# runs alone\b", _parameters_cell(path), re.MULTILINE)),
        )
        for path in notebooks
    ]


def _known(names: Iterable[str]) -> str:
    return f"there are: {', '.join(sorted(names)) or 'none'}"


def read_parameters(name: str | os.PathLike, root: Path) -> dict[str, dict[str, Any]]:
    """Return the parameter file called `name`, or at that path: notebook name -> parameters.

    Raises:
        ValueError: there is no such file, or it has another form.
    """
    import yaml

    folder = root / "notebooks/parameters"
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        raise ValueError(f"no parameter file is called {str(name)!r}; {_known(names)}")
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8-sig")) or {}
        require(isinstance(sections, dict), "must map notebook names to parameters")
        for section, values in sections.items():
            right = f"{section} must be a mapping of parameters, got {values!r}"
            require(isinstance(values, dict), right)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return sections


def parameter_names(notebook: Path) -> set[str]:
    """Return the names that the notebook's cell tagged `parameters` assigns."""
    nodes = ast.walk(ast.parse(_parameters_cell(notebook)))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _parameters_cell(notebook: Path) -> str:
    cells = read_notebook(notebook).cells
    return next((c.source for c in cells if "parameters" in (c.metadata.get("tags") or [])), "")
