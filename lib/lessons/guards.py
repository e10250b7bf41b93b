"""Sentences about what a notebook shows, each with the condition under which it is true.

    holds("The first call is the slowest.", lambda: times[0] > 2 * median(times[1:]))

is quiet where the condition is true of this run, and says so where it is not. `make notebooks`
stores no outputs in which a sentence fails, so a committed page proves what it says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

STRICT = "WORKBOOK_STRICT"


class GuardError(AssertionError):
    """A sentence of a notebook is not true of what the notebook shows."""


def holds(
    sentence: str,
    condition: Callable[[], Any],
    *,
    otherwise: str = "",
    always: bool = False,
) -> None:
    """Say that `sentence` is not true of this run, unless `condition()` is true.

    Args:
        sentence: one sentence about the outputs above, in Markdown.
        condition: takes no arguments and looks measurements up by their names in the notebook.
        otherwise: what a reader should make of it where it fails; timings on a busy machine do.
        always: it must hold on every machine and at every size, since it follows from the code.

    Raises:
        GuardError: it fails though it must hold `always` or the outputs are to be stored.
    """
    from IPython.display import Markdown, display

    if condition():
        return
    if always or os.environ.get(STRICT):
        raise GuardError(f"this is not true of the outputs: {sentence}")
    display(Markdown(f"✗ Not in this run: {sentence} {otherwise}".rstrip()))
