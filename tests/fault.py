"""A deliberate fault in `lib`, and whether the tests that should catch it do.

`python -m tests.fault tests/ddp/faults.py` tries the faults of a room, with `--jobs 8` eight at a
time, each in a copy of the workbook; `tests/test_faults.py` tries all.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What takes seconds to load and has no part in any fault: processes that run tests are copies of
# one that has loaded it.
LOADED = ["hypothesis", "matplotlib.pyplot", "nbformat", "numba", "pandas", "pytest", "torch"]
TIME_LIMIT = 600


@dataclass(frozen=True)
class Fault:
    """A careless change, and the tests that fail when it is made."""

    file: str
    old: str
    """Text that occurs once in the file."""

    new: str
    test: str
    """A test file, or `file::test`."""

    def is_caught(self, root: Path = ROOT) -> bool:
        """Make the change in a copy of the workbook and run the tests there.

        Raises:
            ValueError: `old` does not occur exactly once.
            RuntimeError: no test ran, or not to its end.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.old!r} must occur once in {self.file}, found {text.count(self.old)} times"
            )
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            # Numba would not see that a function it has compiled calls another one by now; other
            # processes may be renaming half-written bytecode
            without = shutil.ignore_patterns("*.nbi", "*.nbc", "*.pyc.*")
            for name in ("lib", "tests"):
                shutil.copytree(root / name, copy / name, ignore=without)
            for name in (
                "pyproject.toml",
                "artifacts",
                "notebooks",
                ".ci",
                "README.md",
                "Makefile",
            ):
                (copy / name).symlink_to(root / name)
            (copy / self.file).write_text(text.replace(self.old, self.new), encoding="utf-8")
            context = get_context("forkserver")
            context.set_forkserver_preload(LOADED)
            process = context.Process(target=run_tests, args=(copy, self.test.split()))
            process.start()
            process.join(TIME_LIMIT)
            process.kill()
            process.join()
            output = (copy / "output.txt").read_text(encoding="utf-8")
        # 1: a test failed; 2: a file cannot even be imported, which a fault in a constant may cause
        if process.exitcode in (0, 1, 2):
            return process.exitcode > 0
        raise RuntimeError(f"{self.test} ended with {process.exitcode}:\n{output[-4000:]}")


def run_tests(root: Path, tests: list[str]) -> NoReturn:
    """Run `tests` of the workbook at `root` in this process, which has loaded nothing of another's.

    Exits with pytest's code; what it prints is in output.txt.
    """
    with (root / "output.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("lib", "tests")]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(root)
    os.chdir(root)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:nbval"]
    code = pytest.main([*options, "-m", "not gpu and not slow", *tests])
    sys.stdout.flush()
    os._exit(code)


def name_of(path: str) -> str:
    """The module of a list of faults."""
    return path.removesuffix(".py").replace("/", ".")


def tried(number: str, fault: Fault) -> bool:
    """Whether the fault is caught; a line on how it went is printed."""
    try:
        caught = fault.is_caught()
        words = "caught" if caught else "MISSED"
    except (ValueError, RuntimeError) as error:
        caught, words = False, f"ERROR {error}"
    print(f"{number} {words}: {fault.file}: {fault.new!r}", flush=True)
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(description="Try the deliberate faults of these lists.")
    parser.add_argument("paths", nargs="+", help="such as tests/ddp/faults.py")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults at a time")
    arguments = parser.parse_args()
    cases = [
        (f"{path}:{index}", fault)
        for path in arguments.paths
        for index, fault in enumerate(importlib.import_module(name_of(path)).FAULTS)
    ]
    # ranks share the processor, and each has one thread
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        caught = list(pool.map(tried, *zip(*cases)))
    print(f"{sum(caught)} of {len(caught)} caught")
    return int(not all(caught))


if __name__ == "__main__":
    sys.exit(main())
