"""Named ranges in the library's own code, which profilers show; nearly free when off.

    with ranges.enabled(), torch.profiler.profile() as profiler:
        step(batch, lr)

Ranges are off by default, and then cost a fraction of a microsecond. `enabled` turns them on for
the calling thread alone. On a GPU, autograd runs the backward pass in a thread of its own, so only
the range around the whole backward pass shows.
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
# None: off. False: ranges for PyTorch's profiler. True: NVTX ranges as well.
_nvtx: ContextVar[bool | None] = ContextVar("nvtx", default=None)


@contextlib.contextmanager
def enabled(*, nvtx: bool = False) -> Iterator[None]:
    """Turn the ranges of `annotate` on inside the block.

    Args:
        nvtx: also open NVTX ranges, for NVIDIA's tools such as Nsight Systems.

    Raises:
        ValueError: `nvtx` without a CUDA device.
    """
    if nvtx and not torch.cuda.is_available():
        raise ValueError("nvtx must be False without a CUDA device, got True")
    token = _nvtx.set(nvtx)
    try:
        yield
    finally:
        _nvtx.reset(token)


class annotate:  # noqa: N801  # reads as the functions of contextlib do
    """Name a block, or each call of a function, as a range.

    `torch.compile` drops ranges from the code that it compiles: it fuses across them, and names its
    kernels by what they do. A CUDA graph replays without the Python code that it was captured from,
    and so without its ranges.

    Example:
        >>> with annotate("forward"):
        ...     loss = model.loss(inputs, targets)
        >>> @annotate("attention")
        ... def attention(q, k, v): ...

    Raises:
        TypeError: it decorates a generator or coroutine function. Calling one only makes an object,
            so the range would end before the work begins.
    """

    __slots__ = ("_open", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        # a stack as nested pairs (innermost range, the rest): blocks of one object may nest
        self._open: tuple | None = None

    def __enter__(self) -> None:
        # the compiler takes the first test for a constant, so it traces nothing of what follows
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
                f"annotate({self.name!r}) cannot decorate {function.__name__}, whose calls return "
                "before its work begins; use `with annotate(…):` inside it"
            )

        @functools.wraps(function)
        def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
            # a new object for each call, since calls may nest
            with annotate(self.name):
                return function(*args, **kwargs)

        return annotated


def _open_range(name: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(torch.profiler.record_function(name))
    if _nvtx.get():
        torch.cuda.nvtx.range_push(name)
        stack.callback(torch.cuda.nvtx.range_pop)
    return stack
