"""Helpers for several processors."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lib.parallel import available_cpus, ordered_map


def test_results_come_in_the_order_of_the_jobs():
    with ThreadPoolExecutor(4) as executor:
        assert list(ordered_map(executor, lambda k: k * k, range(50), 5)) == [
            k * k for k in range(50)
        ]


def test_jobs_are_taken_only_so_far_ahead():
    taken, lock = [], threading.Lock()

    def jobs():
        for k in range(100):
            with lock:
                taken.append(k)
            yield k

    with ThreadPoolExecutor(2) as executor:
        results = ordered_map(executor, lambda k: k, jobs(), 3)
        assert next(results) == 0
        assert len(taken) == 3
        results.close()


def test_an_error_in_a_job_comes_out():
    with ThreadPoolExecutor(2) as executor, pytest.raises(ZeroDivisionError):
        list(ordered_map(executor, lambda k: 1 // k, [1, 0, 2], 2))


def test_there_is_a_processor():
    assert available_cpus() >= 1
