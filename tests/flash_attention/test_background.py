"""Kernels are compiled once, beside the caller."""

import threading

import pytest

from lib.flash_attention.background import Once


def test_what_many_callers_ask_for_is_computed_once():
    calls, may_end = [], threading.Event()

    def slowly(x):
        calls.append(x)
        assert may_end.wait(10)
        return 2 * x

    once = Once(slowly)
    futures = [once.start(3) for _ in range(5)]
    may_end.set()
    assert [future.result() for future in futures] == [6] * 5
    assert once(3) == 6
    assert calls == [3]


def test_another_result_is_computed_at_the_same_time():
    both = threading.Barrier(2, timeout=10)
    once = Once(lambda x: both.wait() and x)
    once.start(1)
    once(2)


def test_an_error_reaches_the_caller_and_is_not_kept():
    results = [ValueError("no compiler"), "code"]

    def fail_once():
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    once = Once(fail_once)
    with pytest.raises(ValueError, match="no compiler"):
        once()
    assert once() == "code"
