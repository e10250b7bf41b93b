"""The exercises of notebook 04 against independent answers; their mistakes: test_exercises.py."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib.lessons.exercise import verdict
from lib.lessons.profiling.exercises import IDLE_TIME, INTENSITY, TIME_RUNS, ToyGPU


def time_runs(gpu, warmup, samples):
    """Waits more often than needed."""
    times = []
    for _ in range(warmup + samples):
        gpu.wait()
        start = gpu.clock()
        gpu.run()
        gpu.wait()
        times.append(gpu.clock() - start)
    times = sorted(times[warmup:])
    return (times[(samples - 1) // 2] + times[samples // 2]) / 2


def idle_time(kernels, start, end):
    """Second by second: drawn times are whole numbers."""
    return sum(not any(a <= t < b for a, b in kernels) for t in range(start, end))


def intensity(m, k, n, element_bytes):
    factors = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
    with FlopCounterMode(display=False) as counter:
        result = factors[0] @ factors[1]
    numbers = sum(tensor.numel() for tensor in (*factors, result))
    return counter.get_total_flops() / (numbers * element_bytes)


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [(TIME_RUNS, time_runs), (IDLE_TIME, idle_time), (INTENSITY, intensity)],
)
@pytest.mark.parametrize("seed", range(2))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


def test_the_queue_of_the_toy_runs_one_piece_after_the_other():
    gpu = ToyGPU([10, 5])
    gpu.run()
    gpu.run()
    assert gpu.clock() == 2
    gpu.wait()
    # the first starts when it is ordered, at 1 ms
    assert gpu.clock() == 1 + 10 + 5
    gpu.wait()
    assert gpu.clock() == 16


def test_the_failing_call_shows_the_work_of_the_toy():
    text = verdict(TIME_RUNS, lambda gpu, warmup, samples: -1.0, seed=0)
    assert "ToyGPU(work_ms=[" in text


def test_a_clock_read_too_late_is_named():
    def attempt(gpu, warmup, samples):
        for _ in range(warmup + samples):
            gpu.run()
        gpu.wait()
        start = gpu.clock()
        return gpu.clock() - start

    assert "no time passes" in verdict(TIME_RUNS, attempt)


def test_kernels_lie_before_and_behind_the_window_too():
    drawn = [IDLE_TIME.draw(random.Random(seed), 3) for seed in range(100)]
    assert any(first > end for kernels, _, end in drawn for first, _ in kernels)
    assert any(last < start for kernels, start, _ in drawn for _, last in kernels)


def test_durations_clipped_to_the_window_are_named():
    def attempt(kernels, start, end):
        inside = [(max(a, start), min(b, end)) for a, b in kernels if b > start and a < end]
        return end - start - sum(b - a for a, b in inside)

    text = verdict(IDLE_TIME, attempt)
    assert "It looks as if where kernels overlap, the same time is counted twice" in text
