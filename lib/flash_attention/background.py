"""Compile kernels beside the caller, so that several take as long as one."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
# Threads that work at a time: for what a call waits for, and for what a later one may need.
URGENT, SPARE = 8, 2
# how many there are, of the spare ones by True
_running = {False: 0, True: 0}
_changed = threading.Condition()


class Once(Generic[Result]):
    """A function that is computed once for each tuple of arguments, in a thread of its own.

    A call waits for the result. What raised an error is computed again the next time.
    """

    def __init__(self, function: Callable[..., Result]):
        functools.update_wrapper(self, function)
        self.function = function
        # the arguments -> the result, and whether it is a spare one
        self.known: dict[tuple, tuple[Future, bool]] = {}
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Result:
        return self.start(*args).result()

    def start(self, *args: Any, is_spare: bool = False) -> Future:
        """Start to compute the result, unless it is known or under way.

        Args:
            is_spare: it may be needed later, and is computed while no call waits for another.
        """
        with self.lock:
            future, was_spare = self.known.get(args, (None, False))
            if future and was_spare and not is_spare:
                # one that has not begun is needed now; this fails for the others
                future.cancel()
            if not future or future.cancelled() or (future.done() and future.exception()):
                future = Future()
                self.known[args] = future, is_spare
                threading.Thread(target=self._compute, args=(future, args, is_spare)).start()
            return future

    def _compute(self, future: Future, args: tuple, is_spare: bool) -> None:
        with _turn(is_spare):
            # Python waits for this thread, but nobody for its result, once the main one has ended
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
    """Wait until one more thread may work."""

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
