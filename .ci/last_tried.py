"""Print what a run of the workflow was made with, and when: a line for its summary."""

import datetime
import platform
from importlib.metadata import version

names = ("torch", "numpy", "numba", "pydantic", "nbconvert")
versions = ", ".join(f"{name} {version(name)}" for name in names)
print(
    f"Last tried with: {datetime.date.today()}, {platform.platform()}, "
    f"Python {platform.python_version()}, {versions}"
)
