"""A deliberate fault in `lib`, and whether the tests that should catch it do.

`python -m tests.fault tests/ddp/faults.py` tries the faults of a room; `tests/test_faults.py` all.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
            RuntimeError: no test ran.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.old!r} must occur once in {self.file}, found {text.count(self.old)} times"
            )
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            for name in ("lib", "tests"):
                shutil.copytree(
                    root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
                )
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
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, "-m", "not gpu and not slow", *self.test.split()],
                cwd=copy,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)},
                capture_output=True,
                text=True,
                timeout=300,
            )
        # 1: a test failed; 2: a file cannot even be imported, which a fault in a constant may cause
        if done.returncode in (0, 1, 2):
            return done.returncode > 0
        raise RuntimeError(f"{self.test} ran no test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(paths: list[str]) -> int:
    missed = 0
    for path in paths:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for index, fault in enumerate(module.FAULTS):
            caught = fault.is_caught()
            missed += not caught
            print(f"{path} {index} {'caught' if caught else 'MISSED'}: {fault.new!r}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
