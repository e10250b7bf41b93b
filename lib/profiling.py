"""Names for stretches of the library's own code, which profilers show as ranges; free when off.

    with profiling.enabled(), torch.profiler.profile() as profiler:
        step(windows, lr)

Ranges are off by default, and then cost a fraction of a microsecond. They are switched on for what
the calling thread runs inside `enabled`, and not for other threads: on a GPU, autograd runs the
backward pass in a thread of its own, where only the range around the whole of it shows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# None: no ranges. False: ranges for PyTorch's profiler. True: NVTX ranges as well.
_nvtx: ContextVar[bool | None] = ContextVar("nvtx", default=None)


@contextlib.contextmanager
def enabled(*, nvtx: bool = False) -> Iterator[None]:
    """Let `annotate` make ranges in the block, for the profiler that runs there.

    Args:
        nvtx: make NVTX ranges too, which NVIDIA's tools such as Nsight Systems show.

    Raises:
        ValueError: `nvtx` without a CUDA device.
    """
    if nvtx and not torch.cuda.is_available():
        raise ValueError("nvtx is True, but torch sees no CUDA device; right is: False")
    token = _nvtx.set(nvtx)
    try:
        yield
    finally:
        _nvtx.reset(token)


def annotate(name: str) -> Annotation:
    """A range called `name`, around a block or around each call of a function.

    In code that `torch.compile` compiles there are none: it fuses across them, and its kernels say
    in their names what they do. A CUDA graph launches without the code that it was recorded from,
    and so without the ranges in it.

    Example:
        >>> with annotate("forward"):
        ...     loss = model.loss(inputs, targets)
        >>> @annotate("attention")
        ... def attention(q, k, v): ...

    Raises:
        TypeError: it is put around a generator or a coroutine function, whose calls only make an
            object: the range would be over before the work begins.
    """
    return Annotation(name)


class Annotation:
    """What `annotate` returns: a context manager and a decorator."""

    __slots__ = ("_open", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        # the range that is open and, as a pair, those around it: blocks of one object may nest
        self._open: tuple | None = None

    def __enter__(self) -> None:
        # asked first: the compiler takes it for a constant, and then nothing else is left to trace
        if not torch.compiler.is_dynamo_compiling() and _nvtx.get() is not None:
            self._open = _open_range(self.name), self._open

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            innermost, self._open = self._open
            innermost.__exit__(*error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        kinds = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_kind(function) for is_kind in (*kinds, inspect.iscoroutinefunction)):
            raise TypeError(
                f"annotate({self.name!r}) is put around {function.__name__}, whose calls return "
                "before its work begins; right is: `with annotate(…):` inside it"
            )

        @functools.wraps(function)
        def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
            # a new one each time, since calls may nest
            with Annotation(self.name):
                return function(*args, **kwargs)

        return annotated


def _open_range(name: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(torch.profiler.record_function(name))
    if _nvtx.get():
        torch.cuda.nvtx.range_push(name)
        stack.callback(torch.cuda.nvtx.range_pop)
    return stack
