"""The tests notice each careless change that tests/faults.txt lists.

`python -m pytest -m slow tests/test_faults.py -k ddp` tries those of a room; `-n 2` two at a time.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(.+)\n(lib/.+?): (tests/.+)\n- (.+)\n\+ ?(.*)")
OPTIONS = ["-q", "-x", "-p", "no:nbval", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
TIME_LIMIT = 600


class Fault(NamedTuple):
    what: str
    file: str
    tests: str
    """The tests to run, as arguments of pytest."""

    old: str
    new: str


def read_faults() -> list[Fault]:
    """The blocks between empty lines, without the first, which is about the file itself."""
    blocks = (ROOT / "tests/faults.txt").read_text(encoding="utf-8").strip().split("\n\n")[1:]
    return [Fault(*BLOCK.fullmatch(block).groups()) for block in blocks]


FAULTS = read_faults()


def test_each_text_is_there_once_and_each_test_exists():
    wrong = []
    for fault in FAULTS:
        if (count := (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old)) != 1:
            wrong.append(f"{count} times in {fault.file}: {fault.old}")
        path, _, name = fault.tests.split()[0].partition("::")
        if f"def {name.split('[')[0]}" not in (ROOT / path).read_text(encoding="utf-8"):
            wrong.append(f"no such test: {fault.tests}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.what}")
def test_a_fault_is_noticed(fault: Fault, tmp_path: Path):
    # Numba would not see that a function it has compiled calls another one by now
    without = shutil.ignore_patterns("*.nbi", "*.nbc", "*.pyc*")
    for name in ("lib", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=without)
    for name in ("pyproject.toml", "artifacts", "notebooks", ".ci", "README.md", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / fault.file).read_text(encoding="utf-8").replace(fault.old, fault.new)
    (tmp_path / fault.file).write_text(text, encoding="utf-8")

    alone = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *fault.tests.split()],
        cwd=tmp_path,
        env=os.environ | alone,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    # 1: a test failed; any other code would not be about the fault
    assert run.returncode == 1, f"pytest ended with {run.returncode}:\n{run.stdout[-4000:]}"
