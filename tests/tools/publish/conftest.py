"""A workbook that the tests of publishing share."""

from pathlib import Path

import pytest


@pytest.fixture
def shelf(tmp_path, make_notebook) -> Path:
    """A workbook of two notebooks that are not run here."""
    make_notebook(tmp_path / "notebooks/01_one.ipynb", "steps: int | None = 3\nsize = {\n 'a': 1}")
    make_notebook(tmp_path / "notebooks/02_two.ipynb", "# runs alone: yes\nratio = 2")
    (tmp_path / "notebooks/parameters").mkdir()
    return tmp_path
