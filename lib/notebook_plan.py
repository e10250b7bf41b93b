"""What is decided before notebooks run: which, with what parameters, after which others."""

import ast
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One notebook to run."""

    source: Path
    parameters: dict[str, Any]
    needs: tuple[str, ...]
    """Names of the notebooks whose results it reads."""

    @property
    def name(self) -> str:
        return self.source.stem


def find_notebooks(selection: Sequence[str], root: Path) -> list[Path]:
    """The numbered notebooks in reading order; only those that `selection` names, if it does.

    Raises:
        ValueError: there are no notebooks, or `selection` names one that does not exist.
    """
    known = sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not known:
        raise ValueError(f"no notebook is named like 01_topic.ipynb in {root / 'notebooks'}")
    chosen = set()
    for wanted in selection:
        stem = Path(wanted).name.removesuffix(".ipynb")
        found = {
            path for path in known if stem in (path.stem, path.stem[:2], path.stem[:2].lstrip("0"))
        }
        if not found:
            names = ", ".join(path.stem for path in known)
            raise ValueError(f"no notebook is called {wanted!r}; there are: {names}")
        chosen |= found
    return [path for path in known if path in chosen or not selection]


def plan(
    notebooks: Sequence[Path],
    parameters: str | os.PathLike | None,
    overrides: Mapping[str, Any] | None,
    root: Path,
) -> list[Job]:
    """What to run with which parameters (see `lib.notebook.run_notebooks`), every name checked.

    Raises:
        ValueError: an unknown file, notebook or parameter; names the known ones.
    """
    overrides = overrides or {}
    known = {path.stem: parameter_names(path) for path in find_notebooks((), root)}
    sections = read_parameters(parameters, root) if parameters else {}
    for name, values in sections.items():
        if name not in known:
            raise ValueError(f"{parameters}: no notebook is called {name!r}; {_known(known)}")
        for unknown in sorted(values.keys() - known[name]):
            raise ValueError(
                f"{parameters}: {name} has no parameter {unknown!r}; {_known(known[name])}"
            )
    settable = {name for path in notebooks for name in known[path.stem]}
    for unknown in sorted(overrides.keys() - settable):
        raise ValueError(f"no chosen notebook has a parameter {unknown!r}; {_known(settable)}")
    jobs = []
    for path in notebooks:
        own = {name: value for name, value in overrides.items() if name in known[path.stem]}
        values = sections.get(path.stem, {}) | own
        jobs.append(Job(path, values, _needed_by(path, list(known))))
    return jobs


def _known(names: Any) -> str:
    return f"there are: {', '.join(sorted(names)) or 'none'}"


def read_parameters(name: str | os.PathLike, root: Path) -> dict[str, dict[str, Any]]:
    """The parameter file called `name`, or at that path: a notebook's name -> its parameters.

    Raises:
        ValueError: there is no such file, or it holds something else; says what is right.
    """
    import yaml

    folder = root / "notebooks/parameters"
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        raise ValueError(f"no parameter file is called {str(name)!r}; {_known(names)}")
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(sections, dict):
        raise ValueError(f"{path}: right is a mapping, notebook name -> parameters")
    for section, values in sections.items():
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {section} is {values!r}; right is a mapping of parameters")
    return sections


def parameter_names(notebook: Path) -> set[str]:
    """The names that the notebook's cell tagged `parameters` assigns."""
    names = set()
    for statement in ast.parse(_parameters_cell(notebook)).body:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        # a, b = 1, 2 sets two
        parts = [part for target in targets for part in getattr(target, "elts", [target])]
        names |= {part.id for part in parts if isinstance(part, ast.Name)}
    return names


def _needed_by(notebook: Path, names: Sequence[str]) -> tuple[str, ...]:
    """The notebooks that a line `# needs: 01, 02` in the parameters cell lists."""
    found = re.search(r"^# needs: *(.+)$", _parameters_cell(notebook), re.MULTILINE)
    needed = []
    for wanted in re.findall(r"\w+", found[1]) if found else []:
        matches = [name for name in names if wanted in (name, name[:2])]
        # a lower number only, so that no two can wait for each other
        if not matches or matches[0] >= notebook.stem:
            earlier = [name for name in names if name < notebook.stem]
            raise ValueError(f"{notebook.name}: needs {wanted!r}; earlier ones: {_known(earlier)}")
        needed += matches
    return tuple(needed)


def _parameters_cell(notebook: Path) -> str:
    import nbformat

    cells = nbformat.read(notebook, as_version=4).cells
    return next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
