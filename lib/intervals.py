"""Arithmetic of time intervals: float arrays of shape (count, 2), each row a start and an end.

Every function returns disjoint intervals in ascending order, none of them empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def union(spans: Iterable[tuple[float, float]] | np.ndarray) -> np.ndarray:
    """The times in at least one of `spans`, which may overlap and touch; (count, 2).

    Example:
        >>> union([(4, 6), (0, 2), (1, 3), (3, 3.5)]).tolist()
        [[0.0, 3.5], [4.0, 6.0]]
    """
    spans = _array(spans)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    # how far the ones before reach: where a start lies behind, a new interval begins
    reach = np.maximum.accumulate(spans[:, 1])
    begins = np.concatenate(([True], spans[1:, 0] > reach[:-1]))
    lasts = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(spans) - 1]))
    return np.stack((spans[begins, 0], reach[lasts]), axis=1)


def intersection(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The times in both of two sets of intervals, each as `union` returns them."""
    first, second = _array(first), _array(second)
    times = np.concatenate((first.ravel(), second.ravel()))
    changes = np.tile([1, -1], len(first) + len(second))
    # at equal times ends come first, so that intervals that touch do not meet
    order = np.lexsort((changes, times))
    times, depth = times[order], np.cumsum(changes[order])
    spans = np.stack((times[:-1], times[1:]), axis=1)[depth[:-1] == 2]
    return union(spans)


def gaps(intervals: np.ndarray, start: float, end: float) -> np.ndarray:
    """The times from `start` to `end` in none of `intervals`, which are as from `union`."""
    inside = intersection(intervals, np.array([[start, end]]))
    edges = np.concatenate(([start], inside.ravel(), [end])).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The times in `first` and not in `second`, each as `union` returns them."""
    first = _array(first)
    if not len(first):
        return first
    return intersection(first, gaps(second, first[0, 0], first[-1, 1]))


def total(intervals: np.ndarray) -> float:
    """How long disjoint `intervals` are together."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def contains(intervals: np.ndarray, times: np.ndarray) -> np.ndarray:
    """For each of `times` whether it lies in one of `intervals`, starts included: bool."""
    times = np.asarray(times, dtype=np.float64)
    if not len(intervals):
        return np.zeros(times.shape, dtype=bool)
    index = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (index >= 0) & (times < intervals[index, 1])


def _array(spans: Iterable[tuple[float, float]] | np.ndarray) -> np.ndarray:
    spans = spans if isinstance(spans, np.ndarray) else list(spans)
    return np.asarray(spans, dtype=np.float64).reshape(-1, 2)
