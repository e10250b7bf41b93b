"""Running a bundle's notebook as Kaggle would: read-only code, Kaggle's packages, no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from lib.files import sha256_file

INPUT = "/kaggle/input"
# Those that this workbook's notebooks import, directly or through what they import. Kaggle's image
# is Colab's (googlecolab/backend-info, pip-freeze.gpu.txt) with further packages
# (Kaggle/docker-python, kaggle_requirements.txt); both list these, in versions that
# requirements.txt allows. It has no tyro, without which the command line has no help, and no
# math-core, which only the report needs.
IMAGE_PACKAGES = (
    "filelock",
    "ipykernel",
    "ipython",
    "ipywidgets",
    "matplotlib",
    "nbclient",
    "nbconvert",
    "nbformat",
    "numba",
    "numpy",
    "papermill",
    "pip",
    "pooch",
    "pyyaml",
    "regex",
    "requests",
    "safetensors",
    "setuptools",
    "torch",
    "tqdm",
    "triton",
    "wandb",
)
# What of this environment the notebook gets to see.
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
# Becomes papermill without the right of root to write into read-only folders (Linux's
# PR_CAPBSET_DROP of CAP_DAC_OVERRIDE); for everybody else, and elsewhere, that changes nothing.
START = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
except (AttributeError, OSError):
    pass
os.execv(sys.executable, [sys.executable, "-m", "papermill", *sys.argv[1:]])
"""
# Python runs this at its start, in the notebook's process and in those that it starts.
SITE = """
import socket
import sys
from importlib.machinery import PathFinder

ABSENT = {absent!r}


class Image(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in ABSENT:
            return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Image
connect = socket.socket.connect


def connect_here(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"there is no network here, not even to {{address[0]}}")
    return connect(self, address)


socket.socket.connect = connect_here
"""


def check_kernel(bundle: Path, kernel: str, dataset: str) -> tuple[float, list[str]]:
    """Run the notebook of `kernel` with small sizes; seconds, and the files that it left.

    The dataset is a read-only copy, the working folder another one, the home folder empty. What
    Kaggle's image lacks cannot be imported, and no host but this one be reached.

    Raises:
        ValueError: a cell failed (with the end of its traceback), or the copy was written to.
    """
    with tempfile.TemporaryDirectory(prefix="kaggle-") as name:
        place = Path(name)
        attached, working = place / "input" / dataset, place / "working"
        shutil.copytree(bundle / "dataset", attached)
        for folder in ("working", "home", "site"):
            (place / folder).mkdir()
        # also beside lib, for processes that the notebook starts with a PYTHONPATH of its own
        for folder in (place / "site", attached):
            (folder / "sitecustomize.py").write_text(SITE.format(absent=absent_modules()))
        before = _hashes(attached)
        source = (bundle / "kernels" / kernel / f"{kernel}.ipynb").read_text(encoding="utf-8")
        notebook = place / f"{kernel}.ipynb"
        notebook.write_text(source.replace(INPUT, str(place / "input")), encoding="utf-8")
        started = time.monotonic()
        _set_writable(attached, False)
        try:
            done = _run(place, notebook)
            after = _hashes(attached)
        finally:
            _set_writable(attached, True)
        if done.returncode:
            raise ValueError(f"{kernel} does not run on Kaggle:\n{_end_of(done.stderr)}")
        changed = sorted(set(before.items()) ^ set(after.items()))
        if changed:
            raise ValueError(f"{kernel} wrote into its dataset: {changed[0][0]}")
        written = [p.relative_to(working).as_posix() for p in working.rglob("*") if p.is_file()]
        return time.monotonic() - started, sorted(written)


def absent_modules() -> list[str]:
    """What can be imported here but not on Kaggle: what no package of its image brings along."""
    present = _with_requirements(IMAGE_PACKAGES)
    modules = metadata.packages_distributions()
    return sorted(
        module for module, names in modules.items() if present.isdisjoint(map(_normal, names))
    )


def _with_requirements(packages: tuple[str, ...]) -> set[str]:
    """`packages` and all that they require, and so on."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        # an extra is not installed with the package
        waiting += [re.match(r"[\w.-]+", line)[0] for line in required if "extra ==" not in line]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(place: Path, notebook: Path) -> subprocess.CompletedProcess:
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {
        "HOME": str(place / "home"),
        "PYTHONPATH": str(place / "site"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "KAGGLE_KERNEL_RUN_TYPE": "Batch",
        "WANDB_MODE": "disabled",
        "WORKBOOK_SMALL": "1",
    }
    output = place / "executed.ipynb"
    folders = ["--cwd", str(place / "working"), "-k", "python3", "--no-progress-bar"]
    command = [sys.executable, "-c", START, str(notebook), str(output), *folders]
    return subprocess.run(
        command, cwd=place / "working", env=environment, capture_output=True, text=True
    )


def _end_of(text: str) -> str:
    """The last lines, without colours."""
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()[-25:])


def _hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def _set_writable(folder: Path, is_writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | 0o200 if is_writable else mode & ~0o222)
