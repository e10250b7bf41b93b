"""Kernels are compiled once, beside the caller, and spare ones after those that calls wait for."""

import subprocess
import sys
import threading

import pytest

from lib.flash_attention import background
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


def test_a_call_does_not_wait_for_spare_results_before_its_own():
    may_end = threading.Event()
    once = Once(lambda x: may_end.wait(10) if x < background.SPARE else x)
    for x in range(background.SPARE + 2):
        once.start(x, is_spare=True)
    # behind those that take all spare threads
    last = background.SPARE + 1
    assert once(last) == last
    assert not once.start(last - 1, is_spare=True).running()
    may_end.set()
    assert once(0) is True


ENDS = """
import time
from lib.flash_attention.background import SPARE, Once
once = Once(lambda x: time.sleep(0.5) or print(x, flush=True))
for x in range(20 * SPARE):
    once.start(x, is_spare=True)
time.sleep(0.1)
"""


def test_a_process_that_ends_leaves_spare_results_undone():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) <= background.SPARE
    assert not done.stderr
