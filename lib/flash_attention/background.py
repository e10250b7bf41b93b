"""Compile kernels beside the caller, so that several take as long as one."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
# Threads at a time: for results that a call waits for, and for those that a later one may need.
URGENT, SPARE = 8, 2
# running threads: True has the number of those for later calls
_running = {False: 0, True: 0}
_changed = threading.Condition()


class Once(Generic[Result]):
    """A function whose result is computed once for each tuple of arguments, in a thread.

    A call waits for the result. After an error the next call computes it again.
    """

    def __init__(self, function: Callable[..., Result]):
        functools.update_wrapper(self, function)
        self.function = function
        # the arguments -> the result, and whether no call needs it yet
        self.known: dict[tuple, tuple[Future, bool]] = {}
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Result:
        return self.start(*args).result()

    def start(self, *args: Any, is_spare: bool = False) -> Future:
        """Start to compute the result, unless it is known or being computed.

        Args:
            is_spare: only a later call may need it; it is computed when no call waits for another.
        """
        with self.lock:
            future, was_spare = self.known.get(args, (None, False))
            if future and was_spare and not is_spare:
                # now a call needs it: begin anew with the urgent ones, unless it has begun already
                future.cancel()
            if not future or future.cancelled() or (future.done() and future.exception()):
                future = Future()
                self.known[args] = future, is_spare
                threading.Thread(target=self._compute, args=(future, args, is_spare)).start()
            return future

    def _compute(self, future: Future, args: tuple, is_spare: bool) -> None:
        with _turn(is_spare):
            # once the main thread has ended, Python waits for this one, but nobody needs its result
            if not threading.main_thread().is_alive():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self.function(*args))
            except BaseException as error:
                future.set_exception(error)


@contextlib.contextmanager
def _turn(is_spare: bool) -> Iterator[None]:
    """Wait until one more thread may run."""

    def may_begin() -> bool:
        if is_spare:
            return not _running[False] and _running[True] < SPARE
        return _running[False] < URGENT

    with _changed:
        _changed.wait_for(may_begin)
        _running[is_spare] += 1
    try:
        yield
    finally:
        with _changed:
            _running[is_spare] -= 1
            _changed.notify_all()
