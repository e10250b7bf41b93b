"""Arithmetic of intervals against counting on a grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import intervals

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair))),
    max_size=12,
)
GRID = np.arange(31) + 0.5


def on_grid(spans) -> np.ndarray:
    """Which of the unit cells 0 … 30 the spans cover."""
    cells = np.zeros(len(GRID), dtype=bool)
    for start, end in spans:
        cells |= (start < GRID) & (end > GRID)
    return cells


def assert_canonical(result: np.ndarray) -> None:
    assert result.shape[1:] == (2,)
    assert (result[:, 1] > result[:, 0]).all()
    assert (result[1:, 0] > result[:-1, 1]).all()


@given(SPANS)
def test_union_covers_what_any_span_covers(spans):
    result = intervals.union(spans)
    assert_canonical(result)
    assert (on_grid(result) == on_grid(spans)).all()
    assert intervals.total(result) == on_grid(spans).sum()


@given(SPANS, SPANS)
def test_intersection_covers_what_both_cover(first, second):
    result = intervals.intersection(intervals.union(first), intervals.union(second))
    assert_canonical(result)
    assert (on_grid(result) == on_grid(first) & on_grid(second)).all()


@given(SPANS, SPANS)
def test_difference_covers_what_only_the_first_covers(first, second):
    result = intervals.difference(intervals.union(first), intervals.union(second))
    assert_canonical(result)
    assert (on_grid(result) == on_grid(first) & ~on_grid(second)).all()


@given(SPANS)
def test_gaps_are_the_rest_of_the_window(spans):
    result = intervals.gaps(intervals.union(spans), 5, 20)
    assert_canonical(result)
    assert (on_grid(result) == on_grid([(5, 20)]) & ~on_grid(spans)).all()


@given(SPANS)
def test_contains_agrees_with_the_grid(spans):
    assert (intervals.contains(intervals.union(spans), GRID) == on_grid(spans)).all()


@pytest.mark.parametrize(("time", "inside"), [(1, True), (1.9, True), (2, False), (0.9, False)])
def test_a_start_is_inside_and_an_end_is_not(time, inside):
    assert intervals.contains(intervals.union([(1, 2)]), np.array([time])).tolist() == [inside]
