"""Small helpers for work on several processors."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def available_cpus() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(
    executor: Executor, function: Callable[[Job], Result], jobs: Iterable[Job], ahead: int
) -> Iterator[Result]:
    """Like `executor.map`, but with at most `ahead` jobs and results in memory at a time."""
    pending = deque()
    for job in jobs:
        pending.append(executor.submit(function, job))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
