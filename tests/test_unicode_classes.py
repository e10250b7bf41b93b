"""Ranges of code points."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lib.unicode_classes import LETTERS, NUMBERS, WHITESPACE, parse_ranges, to_ranges


def test_ranges_are_parsed():
    assert parse_ranges("41-5a aa") == [(0x41, 0x5A), (0xAA, 0xAA)]


@given(st.sets(st.integers(0, 300)))
def test_ranges_hold_the_codes_and_no_others(codes):
    ranges = to_ranges(sorted(codes))
    assert [code for lo, hi in ranges for code in range(lo, hi + 1)] == sorted(codes)
    assert all(after > before + 1 for (_, before), (after, _) in pairwise(ranges))


def test_the_tables_are_in_order_and_apart():
    seen = set()
    for table in (LETTERS, NUMBERS, WHITESPACE):
        codes = [code for lo, hi in parse_ranges(table) for code in range(lo, hi + 1)]
        assert codes == sorted(set(codes))
        assert seen.isdisjoint(codes)
        seen.update(codes)
