"""Ranks that decide and fail together, so that none waits for one that is gone."""

from __future__ import annotations

import builtins
import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lib.distributed import rank, world_size

T = TypeVar("T")


def on_each_rank(call: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `call()` gives on this rank, once it has come to its end on all.

    Raises:
        Exception: what it raised on the first rank on which it did: there the exception itself, on
            all others one of that kind with its text.
    """
    if world_size(group) == 1:
        return call()
    result, error = None, None
    try:
        result = call()
    except Exception as caught:
        error = caught
    every: list[Any] = [None] * world_size(group)
    dist.all_gather_object(every, error and _kind_and_text(error, rank(group)), group=group)
    first = next((other for other, found in enumerate(every) if found), None)
    if first == rank(group):
        raise of_all_ranks(error)
    if first is not None:
        raise of_all_ranks(_exception(*every[first]))
    return result


def on_first_rank(call: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `call()` gives on rank 0 alone, given to all ranks; it must be possible to pickle.

    Raises:
        Exception: as `on_each_rank`.
    """
    if world_size(group) == 1:
        return call()
    found = on_each_rank(lambda: call() if rank(group) == 0 else None, group)
    results = [found]
    dist.broadcast_object_list(results, _global_first(group), group=group)
    return results[0]


def patient_group() -> dist.ProcessGroup | None:
    """All ranks once more, to wait in for what one of them does alone, however long it takes.

    A rank that fails ends the waiting at once, as in any group.
    """
    if world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))


def of_all_ranks(error: Exception) -> Exception:
    """Mark an exception that all ranks raise, so that rank 0 alone need tell it."""
    error.is_of_all_ranks = True
    return error


def is_of_all_ranks(error: Exception) -> bool:
    return getattr(error, "is_of_all_ranks", False)


def _global_first(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)


def _kind_and_text(error: Exception, rank: int) -> tuple[str, str]:
    """The name of the built-in class that `error` is of, which every rank knows, and its text."""
    kind = next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")
    text = str(error) or type(error).__name__
    return kind.__name__, text if rank == 0 else f"rank {rank}: {text}"


def _exception(kind: str, text: str) -> Exception:
    try:
        return getattr(builtins, kind)(text)
    except TypeError:
        # one that wants more than a text, as UnicodeDecodeError
        return RuntimeError(text)
