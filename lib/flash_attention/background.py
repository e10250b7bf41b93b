"""Compile kernels beside the caller, so that several take as long as one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
_threads = ThreadPoolExecutor(8)


class Once(Generic[Result]):
    """A function whose result is computed once for each tuple of arguments, in a thread.

    A call waits for the result. After an error the next call computes it again.
    """

    def __init__(self, function: Callable[..., Result]):
        functools.update_wrapper(self, function)
        self.function = function
        self.known: dict[tuple, Future[Result]] = {}
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Result:
        return self.start(*args).result()

    def start(self, *args: Any) -> Future[Result]:
        """Start to compute the result, unless it is known or being computed."""
        with self.lock:
            future = self.known.get(args)
            if not future or (future.done() and future.exception()):
                future = self.known[args] = _threads.submit(self.function, *args)
            return future
