"""A plugin of pytest for `make test`: notebooks run at small sizes, and no other test does."""

import os
from collections.abc import Generator
from unittest import mock

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator:
    """Set up a notebook's first cell, which starts its kernel, in the environment for that."""
    if item.path.suffix != ".ipynb":
        return (yield)
    with mock.patch.dict(os.environ, {"WORKBOOK_SMALL": "1"}):
        # other tests draw without showing what they draw
        del os.environ["MPLBACKEND"]
        return (yield)
