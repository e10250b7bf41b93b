"""Measurements of functions whose time and memory are known; most of them by a clock of our own."""

import itertools
import json
import statistics
import time
import weakref

import pytest
import torch

from lib.profiling import measurement
from lib.profiling.measurement import Measurement, measure, measure_interleaved

GPU = torch.device("cuda")


class Clock:
    """A clock that only the functions measured move on."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def takes(self, *milliseconds):
        """A function whose calls take these times, the last one for ever."""
        times = itertools.chain(milliseconds, itertools.repeat(milliseconds[-1]))

        def call():
            self.now_ns += round(1e6 * next(times))

        return call


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measurement, "time", clock)
    return clock


@pytest.mark.serial
def test_a_sleep_is_measured_right():
    slept = []

    def sleep():
        start = time.perf_counter()
        time.sleep(0.02)
        slept.append(1e3 * (time.perf_counter() - start))

    measured = measure(sleep, device="cpu", warmup=1, samples=9)
    # a sleep may last longer than asked for: compare with how long these were
    assert measured.median_ms == pytest.approx(statistics.median(slept[-9:]), rel=0.05)
    assert measured.median_ms >= 20
    assert measured.calls_per_sample == 1


@pytest.mark.parametrize(
    ("call_ms", "min_sample_ms", "at_least", "at_most"),
    [(0.02, 2, 100, 300), (0.02, 0, 1, 1), (3, 2, 1, 1), (2, 2, 1, 1), (1.9, 2, 2, 3)],
)
def test_a_sample_is_as_many_calls_as_fill_its_time(
    clock, call_ms, min_sample_ms, at_least, at_most
):
    measured = measure(clock.takes(call_ms), device="cpu", min_sample_ms=min_sample_ms)
    assert at_least <= measured.calls_per_sample <= at_most
    # the time of one call, however many a sample has
    assert measured.times_ms == pytest.approx([call_ms] * 20)


def test_the_first_calls_do_not_count(clock):
    # three for warmup, one for memory, one to find the number of calls
    fn = clock.takes(100, 100, 100, 100, 2, 1, 5, 3)
    measured = measure(fn, device="cpu", warmup=3, samples=4)
    assert measured.times_ms == (1, 5, 3, 3)
    assert (measured.samples, measured.median_ms, measured.mean_ms) == (4, 3, 3)
    assert measured.iqr_ms == 1
    figures = json.loads(json.dumps(measured.figures()))
    assert (figures["status"], figures["median_ms"]) == ("ok", 3.0)
    assert figures["times_ms"] == [1, 5, 3, 3]


@pytest.mark.parametrize(("seconds", "samples"), [(0.1, 5), (1e-3, 3), (10, 50)])
def test_long_calls_get_fewer_samples_but_three(clock, seconds, samples):
    measured = measure(clock.takes(20), device="cpu", samples=50, max_seconds=seconds)
    assert measured.samples == samples


def test_the_cache_is_flushed_before_each_sample_of_one_call_and_not_timed(clock, monkeypatch):
    calls = []
    flush, call = clock.takes(500), clock.takes(0.1)
    monkeypatch.setattr(
        measurement, "_cache_flush", lambda device: lambda: (calls.append("flush"), flush())
    )
    fn = lambda: (calls.append("call"), call())  # noqa: E731
    measured = measure(fn, device="cpu", samples=3, flush_l2=True)
    assert calls[-6:] == ["flush", "call"] * 3
    assert (measured.times_ms, measured.calls_per_sample) == ((0.1,) * 3, 1)


def test_a_flush_overwrites_a_buffer_of_the_size_of_the_cache(monkeypatch):
    monkeypatch.setattr(measurement, "CPU_CACHE_BYTES", 12_345)
    flushed = measurement._cache_flush(torch.device("cpu"))()
    assert (flushed.nbytes, flushed.count_nonzero()) == (12_345, 0)


def test_the_order_of_interleaved_functions_reverses_from_round_to_round(clock):
    calls, ticks = [], {"a": clock.takes(9, 9, 9, 2, 3, 8), "b": clock.takes(9, 9, 9, 4, 3, 2)}
    functions = [lambda n=name: (calls.append(n), ticks[n]()) for name in ticks]
    # three calls before the first sample
    measured = measure_interleaved(functions, device="cpu", warmup=1, samples=3)
    assert "".join(calls[-6:]) == "abbaab"
    assert [each.times_ms for each in measured] == [(2, 3, 8), (4, 3, 2)]
    assert (measured[0].median_ms, measured[0].iqr_ms) == (3, 3)


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_memory_is_the_most_that_a_call_holds():
    measured = measure(lambda: torch.ones(2_500_000).clone(), device="cpu", samples=1)
    assert measured.peak_memory_bytes == 20_000_000
    assert measured.total_memory_bytes is None


def test_out_of_memory_is_a_status_and_what_the_call_held_is_free():
    held = []

    def fail():
        tensor = torch.ones(1000)
        held.append(weakref.ref(tensor))
        cycle = [tensor]
        cycle.append(cycle)
        out_of_memory()

    measured = measure(fail, device="cpu")
    assert measured == Measurement("oom")
    assert (measured.median_ms, measured.iqr_ms, measured.samples) == (None, None, 0)
    assert [reference() for reference in held] == [None]


@pytest.mark.parametrize("last", [0, 1, 2, 7])
def test_memory_may_run_out_in_any_call(clock, last):
    calls, tick = iter(range(100)), clock.takes(1)
    fn = lambda: out_of_memory() if next(calls) == last else tick()  # noqa: E731
    assert measure(fn, device="cpu", warmup=1, samples=10).status == "oom"


def test_one_of_a_pair_may_run_out_of_memory_but_another_error_is_raised(clock):
    first, second = measure_interleaved((clock.takes(2), out_of_memory), device="cpu", samples=3)
    assert (first.times_ms, second.status, second.times_ms) == ((2, 2, 2), "oom", ())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure(lambda: torch.ones(2, 3) @ torch.ones(2, 3), device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [("warmup", 0), ("samples", 0), ("min_sample_ms", -1), ("max_seconds", 0)],
)
def test_wrong_settings_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        measure(lambda: None, device="cpu", **{name: value})


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize("cycles", [20_000, 20_000_000])
def test_a_kernel_of_known_duration_is_measured_right(cycles):
    def wait():
        torch.cuda._sleep(cycles)

    measured = measure(wait, device="cuda", samples=20)
    calls = max(20, 200_000_000 // cycles)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        wait()
    torch.cuda.synchronize()
    expected = (time.perf_counter() - start) / calls * 1e3
    assert measured.median_ms == pytest.approx(expected, rel=0.05)


@pytest.mark.gpu
@pytest.mark.serial
def test_reading_is_slower_after_the_cache_was_flushed():
    # the norm of one row is the work of one block, which waits for every few kilobytes: its time is
    # that of the way to them, and so long that the launch does not count
    cache = torch.cuda.get_device_properties(GPU).L2_cache_size
    x = torch.ones(1, cache // 8 // 4, device=GPU)
    norm = lambda: torch.layer_norm(x, x.shape[1:])  # noqa: E731
    near, far = (
        measure(norm, device="cuda", samples=50, flush_l2=flush).times_ms for flush in (False, True)
    )
    assert min(far) > 1.1 * min(near)


@pytest.mark.gpu
def test_memory_on_a_gpu_is_that_of_the_call_and_of_everything():
    kept = torch.ones(1 << 20, device=GPU)
    measured = measure(lambda: torch.ones(1 << 22, device=GPU), device="cuda", samples=2)
    assert measured.peak_memory_bytes == 1 << 24
    assert measured.total_memory_bytes >= (1 << 24) + kept.nbytes
