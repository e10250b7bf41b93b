"""The exercises of notebook 04 against independent answers; their mistakes: test_exercises.py."""

import itertools
import random
import statistics

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib.exercises import verdict
from lib.exercises_profiling import IDLE_TIME, INTENSITY, TIME_RUNS, ToyGPU
from lib.roofline import product_cost

CHECKED = {"time runs": TIME_RUNS, "idle time": IDLE_TIME, "intensity": INTENSITY}


def time_runs(gpu, warmup, samples):
    for _ in range(warmup):
        gpu.run()
    gpu.wait()
    times = []
    for _ in range(samples):
        start = gpu.clock()
        gpu.run()
        gpu.wait()
        times.append(gpu.clock() - start)
    return statistics.median(times)


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
    ids=CHECKED,
)
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


def test_intensity_is_that_of_the_roofline():
    assert verdict(INTENSITY, lambda m, k, n, e: product_cost(m, k, n, e).intensity).startswith(
        "right"
    )


def test_waiting_more_often_than_needed_is_right():
    def attempt(gpu, warmup, samples):
        for _ in range(warmup):
            gpu.run()
            gpu.wait()
        gpu.wait()
        return time_runs(gpu, 0, samples)

    assert verdict(TIME_RUNS, attempt).startswith("right")


def test_the_queue_of_the_toy_runs_one_piece_after_the_other():
    gpu = ToyGPU([10, 5])
    gpu.run()
    gpu.run()
    assert gpu.clock() == 2
    gpu.wait()
    # the first starts when it is ordered, at 1 ms
    assert gpu.clock() == 1 + 10 + 5


def test_a_toy_that_waits_without_work_goes_on_at_once():
    gpu = ToyGPU([10])
    gpu.wait()
    assert gpu.clock() == 0


def test_the_failing_call_shows_the_work_of_the_toy():
    text = verdict(TIME_RUNS, lambda gpu, warmup, samples: -1.0, seed=0)
    assert "ToyGPU(work_ms=[" in text


def time_runs_written_by_hand(change):
    """The notebook's solution with a line changed: `change` is (right, wrong) in its text."""
    code = """
def attempt(gpu, warmup, samples):
    for _ in range(warmup):
        gpu.run()
    gpu.wait()
    times = []
    for _ in range(samples):
        start = gpu.clock()
        gpu.run()
        gpu.wait()
        times.append(gpu.clock() - start)
    return statistics.median(times)
"""
    right, wrong = change
    assert right in code
    names = {"statistics": statistics}
    exec(code.replace(right, wrong, 1), names)
    return names["attempt"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("        gpu.wait()\n        times", "        times"), "nothing waits for the device"),
        (("statistics.median(times)", "min(times)"), "the fastest run is returned"),
        (("statistics.median(times)", "sum(times) / samples"), "the mean is returned"),
        (("statistics.median(times)", "sorted(times)[samples // 2]"), "one of the two middle"),
        (("range(warmup)", "range(1)"), "gpu.run() is called once"),
        (("range(warmup)", "range(0)"), "nothing is run before"),
    ],
    ids=["never waits", "minimum", "mean", "upper middle", "one warm-up", "no warm-up"],
)
def test_a_changed_line_fails_and_is_named(change, name):
    text = verdict(TIME_RUNS, time_runs_written_by_hand(change))
    assert text.startswith("not yet")
    assert f"It looks as if {name}" in text


def test_a_clock_read_too_late_is_named():
    def attempt(gpu, warmup, samples):
        for _ in range(warmup + samples):
            gpu.run()
        gpu.wait()
        start = gpu.clock()
        return gpu.clock() - start

    assert "no time passes" in verdict(TIME_RUNS, attempt)


@pytest.mark.parametrize(
    ("clip", "clips_end", "ends", "name"),
    [
        (min, False, 0, "the gap behind the last"),
        (lambda first, end: first, True, 0, "the gap before a kernel behind"),
        (min, True, 1, "a kernel runs through"),
    ],
    ids=["end not clipped", "gap not clipped", "ends included"],
)
def test_a_changed_gap_fails_and_is_named(clip, clips_end, ends, name):
    def attempt(kernels, start, end):
        idle, reached = 0, start
        for first, last in sorted(kernels):
            idle += max(0, clip(first, end) - reached)
            reached = max(reached, last + ends)
        return idle + (max(0, end - reached) if clips_end else end - reached)

    assert f"It looks as if {name}" in verdict(IDLE_TIME, attempt)


def test_gaps_of_neighbours_are_named():
    def attempt(kernels, start, end):
        kernels = sorted(kernels)
        return sum(max(0, b - a) for (_, a), (b, _) in itertools.pairwise(kernels))

    assert "compared with the next one alone" in verdict(IDLE_TIME, attempt)


def test_kernels_lie_before_and_behind_the_window_too():
    drawn = [IDLE_TIME.draw(random.Random(seed), 3) for seed in range(100)]
    assert any(first > end for kernels, _, end in drawn for first, _ in kernels)
    assert any(last < start for kernels, start, _ in drawn for _, last in kernels)


@pytest.mark.parametrize(
    ("attempt", "name"),
    [
        (lambda m, k, n, e: 2 * m * k * n / e * (m * k + k * n + m * n), "brackets"),
        (lambda m, k, n, e: 2 * m * k * n // (e * (m * k + k * n + m * n)), "//"),
        (lambda m, k, n, e: (2 * k - 1) * m * n / (e * (m * k + k * n + m * n)), "k - 1 additions"),
    ],
    ids=["brackets", "floor", "k - 1"],
)
def test_a_usual_mistake_in_the_formula_is_named(attempt, name):
    text = verdict(INTENSITY, attempt)
    assert name in text.split("It looks as if")[1]


def test_idle_time_of_no_overlap_is_told_from_that_of_overlap():
    def attempt(kernels, start, end):
        inside = [(max(a, start), min(b, end)) for a, b in kernels if b > start and a < end]
        return end - start - sum(b - a for a, b in inside)

    text = verdict(IDLE_TIME, attempt)
    assert "It looks as if where kernels overlap, the same time is counted twice" in text
