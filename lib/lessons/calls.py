"""Call a reader's function: whatever it does, the call ends, and its error is a result."""

from __future__ import annotations

import contextlib
import copy
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# A call may take this many times its limit by the wall clock, since other processes may be busy.
PATIENCE = 5
# A function that catches TimeLimitError gets it this many times more, a second apart.
CAUGHT = 8
NOT_FINISHED = object()
# Files that a TimeLimitError comes by on its way out of a call.
OURS = (__file__, contextlib.__file__)


@dataclass(frozen=True)
class Raised:
    """The result of a call that raised; equal to another with the same error in any line."""

    error: str
    line: int | None = field(compare=False)

    def __str__(self) -> str:
        where = f"line {self.line} of the cell" if self.line else "it"
        return f"{where} raised {self.error}"


class TimeLimitError(BaseException):
    """A call took too long; not an Exception, so that `except Exception` doesn't catch it."""


def call(function: Callable, arguments: tuple, seconds: float) -> Any:
    """Return the result of `function(*arguments)`, a `Raised` or NOT_FINISHED.

    Raises:
        NotImplementedError: the function is a stub.
    """
    try:
        # a copy, since a function may change the list that it is given
        arguments = copy.deepcopy(arguments)
        with time_limit(seconds):
            return function(*arguments)
    except TimeLimitError:
        return NOT_FINISHED
    # `exit()` must not end the kernel
    except (Exception, SystemExit) as error:
        if isinstance(error, NotImplementedError) and _is_of_a_stub(error):
            raise
        # in the function's own file, which for a cell holds its inner functions and nothing else
        code = getattr(inspect.unwrap(function), "__code__", None)
        file = code.co_filename if code else None
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame.lineno for frame in frames if frame.filename == file]
        return Raised(_first_line(error), inside[-1] if inside else None)


def _is_of_a_stub(error: NotImplementedError) -> bool:
    # PyTorch raises others, where a kind of tensor lacks an operation
    (*_, last) = traceback.extract_tb(error.__traceback__)
    return str(error) in ("", "your code here") or (last.line or "").startswith("raise ")


def _first_line(error: BaseException) -> str:
    try:
        # in PyTorch's errors, hints and addresses follow
        message = f"{type(error).__name__}: {error}".split("\n")[0]
    except Exception:
        return type(error).__name__
    # Python's wording depends on the types divided
    return message.replace("float division by zero", "division by zero")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError after `seconds` of work, or PATIENCE times as many by the clock.

    Work is the time of all threads on processors, so that other processes don't count; one that
    only sleeps or waits is stopped by the clock. No limit on Windows or outside the main thread.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and hasattr(signal, "setitimer")):
        yield
        return
    worked, began, is_over, raised = time.process_time(), time.monotonic(), False, 0

    def look(number, frame):
        nonlocal raised
        # not on the way in or out
        if is_over or frame.f_code.co_filename in OURS:
            return
        too_much_work = time.process_time() - worked >= seconds
        if too_much_work or time.monotonic() - began >= PATIENCE * seconds:
            raised += 1
            if raised > CAUGHT:
                # what catches this one gets another where it has caught it, or a few lines on
                _raise_after(frame, raised - CAUGHT)
            raise TimeLimitError

    handler, tracer = signal.signal(signal.SIGALRM, look), sys.gettrace()
    # again and again, since a loop may catch what is raised in it
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / CAUGHT)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        if sys.gettrace() is not tracer:
            sys.settrace(tracer)
        # a late alarm, on its way in another thread, ends a process that does not handle it
        if handler is not signal.SIG_DFL:
            signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _raise_after(frame: FrameType | None, lines: int) -> None:
    """Raise TimeLimitError where the code that runs in `frame` begins its `lines`-th next line."""

    def trace(frame: FrameType, event: str, _: Any) -> Callable | None:
        nonlocal lines
        if frame.f_code.co_filename in OURS:
            return None
        lines -= event == "line"
        if lines == 0:
            # Python ends tracing when this is raised
            raise TimeLimitError
        return trace

    # frames that run already are traced only if told so, from the inner to the reader's own
    while frame and frame.f_code.co_filename != __file__:
        frame.f_trace, frame = trace, frame.f_back
    sys.settrace(trace)
