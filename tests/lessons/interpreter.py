"""Triton's interpreter, without a check that tests do not need."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def no_overflow_checks() -> Iterator[None]:
    """Spare Triton's interpreter a look at each sum of integers, a quarter of its time.

    Not where solutions are tried, which readers run with these checks.
    """
    if not importlib.util.find_spec("triton"):
        yield
        return
    from triton.runtime.interpreter import interpreter_builder

    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    with patch.object(interpreter_builder, "options", options):
        yield
