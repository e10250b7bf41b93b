"""Output for the user: standard streams, progress bars, and one-line errors."""

import contextlib
import functools
import logging
import os
import select
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning once in this process: something slower runs than what was asked for."""
    logger.warning(message)


def prepare_streams() -> None:
    """Let standard output take any text, here and in the processes started from now on.

    What its encoding lacks is written as `\\u2713`.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if encoding.lower() not in ("utf-8", "utf8"):
        os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as behind `| head`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    # Windows has no poll, and a notebook's output no number
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def progress_bar(description: str, num_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar in a notebook or on a terminal; yield what takes the bytes just done."""
    from tqdm.auto import tqdm

    # a widget in a notebook; None: no bar where there is no terminal, as in a log file
    is_off, size = (False, {}) if in_notebook() else (None, bar_size())
    # miniters=1, or tqdm would wait for as many bytes again as the last call reported at once
    options = {"unit": "B", "unit_scale": True, "disable": is_off, "leave": False, "miniters": 1}
    with tqdm(desc=description, total=num_bytes, **options, **size) as bar:
        yield functools.partial(advance_bar, bar)


def bar_size() -> dict[str, Any]:
    """tqdm's options for the size of a bar on stderr, which follows that of the terminal.

    A terminal that does not know its size, as some consoles, gets the size of the environment's
    COLUMNS and LINES, or 80 x 24; tqdm would show nothing there.
    """
    try:
        is_known = all(os.get_terminal_size(sys.stderr.fileno()))
    except (OSError, ValueError):
        # no terminal: tqdm decides
        is_known = True
    if is_known:
        return {"dynamic_ncols": True}
    columns, lines = shutil.get_terminal_size()
    return {"ncols": columns, "nrows": lines}


def advance_bar(bar: Any, count: int) -> None:
    """Show that `count` more is done: ten times a second at most, but the end of it at once.

    What comes after the last call may take long, and would leave the bar short of its end.
    """
    bar.update(count)
    if count and bar.total and bar.n >= bar.total:
        bar.refresh()


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    return hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def one_line(error: Exception) -> str:
    """The message of `error` for a user, with its notes, without Python's error numbers."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    message = "; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
    return " ".join(message.split())
