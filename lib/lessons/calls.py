"""Call a reader's function: whatever it does, the call ends, and its error is a result."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

# A call may take this many times its limit by the wall clock, since other processes may be busy.
PATIENCE = 5
# How often a function that catches TimeLimitError gets it, within one more limit, before its next
# lines raise it, too.
CAUGHT = 8
NOT_FINISHED = object()
# Where checks are, and what they raise.
LESSONS, OF_CHECKS = Path(__file__).parent, (ValueError, TypeError)


@dataclass(frozen=True)
class Raised:
    """The result of a call that raised; equal to another with the same error in any line."""

    error: str
    line: int | None = field(compare=False)

    def __str__(self) -> str:
        where = f"line {self.line} of the cell" if self.line else "it"
        return f"{where} raised {self.error}"


@dataclass(frozen=True)
class Refused(Raised):
    """The result of a call that a check itself refuses, in its own words."""

    def __str__(self) -> str:
        return self.error


class TimeLimitError(BaseException):
    """A call took too long; not an Exception, so that `except Exception` doesn't catch it."""


def call(function: Callable, arguments: tuple, seconds: float) -> Any:
    """Return the result of `function(*arguments)`, a `Raised`, `Refused` or NOT_FINISHED.

    The function may change the arguments.

    Raises:
        NotImplementedError: the function is a stub.
    """
    try:
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
        is_said = (frames[-1].line or "").startswith("raise") and isinstance(error, OF_CHECKS)
        if is_said and all(map(_is_of_a_check, frames)):
            return Refused(str(error), None)
        return Raised(_first_line(error), inside[-1] if inside else None)


def _is_of_a_check(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(LESSONS)


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


class time_limit:  # noqa: N801 - a context manager, used as a function
    """Raise TimeLimitError after `seconds` of work, or PATIENCE times as many by the clock.

    Work is the time of all threads on processors, so that other processes don't count; one that
    only sleeps or waits is stopped by the clock. No limit on Windows or outside the main thread.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.raised = seconds, 0
        in_main = threading.current_thread() is threading.main_thread()
        self.is_on = in_main and hasattr(signal, "setitimer")

    def __enter__(self) -> None:
        if not self.is_on:
            return
        self.worked, self.began = time.process_time(), time.monotonic()
        self.tracers = sys.gettrace(), sys.getprofile()
        self.handler = signal.signal(signal.SIGALRM, self._look)
        # again and again, since a loop may catch what is raised in it
        period = self.seconds / CAUGHT
        self.timer = signal.setitimer(signal.ITIMER_REAL, self.seconds, period)

    def __exit__(self, *error: Any) -> None:
        if not self.is_on:
            return
        self.is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.raised > CAUGHT:
            sys.settrace(self.tracers[0])
            sys.setprofile(self.tracers[1])
        # a late alarm, on its way in another thread, ends a process that does not handle it
        if self.handler is not signal.SIG_DFL:
            signal.signal(signal.SIGALRM, self.handler)
        signal.setitimer(signal.ITIMER_REAL, *self.timer)

    def _look(self, number: int, frame: FrameType) -> None:
        """Raise if time is over, but not in this file, unless C code runs that `call` called."""
        is_ours = frame.f_code.co_filename == __file__ and frame.f_code is not call.__code__
        if not self.is_on or is_ours:
            return
        too_much_work = time.process_time() - self.worked >= self.seconds
        if too_much_work or time.monotonic() - self.began >= PATIENCE * self.seconds:
            self.raised += 1
            if self.raised > CAUGHT:
                _raise_again(frame, 1 + self.raised % CAUGHT)
            raise TimeLimitError


def _raise_again(frame: FrameType, lines: int) -> None:
    """Raise TimeLimitError `lines` lines on, and a line behind each call that ends from now on.

    What catches it around a loop gets the next one where it has caught it, outside of its `try`.
    """

    def trace(frame: FrameType, event: str, _: Any) -> Callable | None:
        nonlocal lines
        if frame.f_code.co_filename == __file__:
            return None
        lines -= event == "line"
        if lines <= 0:
            # Python ends tracing when this is raised
            raise TimeLimitError
        return trace

    def start_tracing(frame: FrameType) -> None:
        # a frame that runs already is traced only if told so
        frame.f_trace = trace
        sys.settrace(trace)

    def look_at_end(frame: FrameType, event: str, _: Any) -> None:
        nonlocal lines
        if event == "return" and frame.f_code.co_filename != __file__ and frame.f_back:
            lines = 1
            start_tracing(frame.f_back)

    start_tracing(frame)
    sys.setprofile(look_at_end)
